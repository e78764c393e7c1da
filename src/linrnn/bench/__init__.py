"""Benchmarks: the loss layer alone (`loss`), on several GPUs (`parallel`), in training steps (`steps`, `models`), the
first step (`first_step`)."""
