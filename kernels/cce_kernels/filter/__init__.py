"""The gradient filter. rule.py explains it in torch; its kernels are imported by this package and the backends."""
