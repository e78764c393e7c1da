"""The gradient filter in Triton. Nothing outside of this package and the backends imports it."""
