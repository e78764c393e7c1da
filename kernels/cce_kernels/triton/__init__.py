"""Triton and Gluon kernels, one job a file."""
