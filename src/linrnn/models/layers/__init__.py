"""Layers of linrnn's own, which replace parts of FLA's models."""
