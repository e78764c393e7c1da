"""`model=fla`: the configuration of any model of FLA."""
