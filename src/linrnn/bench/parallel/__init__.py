"""The loss layer over several GPUs: time and memory of a training step."""
