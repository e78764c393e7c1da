"""One training run: the plan, the trainer, checkpoints and validation."""
