"""Kernels of the rows' targets: their columns, their order, and their part of the gradients."""
