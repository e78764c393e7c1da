"""Experiments of many runs: sweeps, the largest batch, a step by component; and the dry run and the doctor."""
