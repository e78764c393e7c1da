"""Experiments of many runs: sweeps, the largest batch, the dry run, the breakdown of memory and time."""
