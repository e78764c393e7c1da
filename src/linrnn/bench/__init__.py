"""Benchmarks of the loss layer: alone (`loss`) and over several GPUs (`parallel`)."""
