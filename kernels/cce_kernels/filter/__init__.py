"""The gradient filter in Triton; filter_rule.py explains it. Only this package and the backends import it."""
