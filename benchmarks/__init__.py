"""Benchmarks: scripts that measure what linrnn and cce_kernels cost. They are no part of the installed package."""
