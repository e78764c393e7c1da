"""How long a run takes from its command to the end of its first step, on a fresh machine."""
