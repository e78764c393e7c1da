"""Experiments of many runs: sweeps, the largest batch, the breakdown of memory and time; and the dry run, tuning and
the doctor."""
