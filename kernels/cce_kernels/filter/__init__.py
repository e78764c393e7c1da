"""The gradient filter in Triton; rule.py explains it. Only this package and the backends import it."""
