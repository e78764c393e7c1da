"""Use a trained model: load it, generate text, export it."""
