"""A trained model in use: load, generate text, export."""
