"""Verdicts from the rows of benchmarks and from searches for the largest batch, instead of one group of runs."""
