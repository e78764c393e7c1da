"""Training steps of our models where the loss alone differs, interleaved in one process."""
