"""Use a trained model: load it, generate text, export it."""

from linrnn.inference.load import Trained, load_trained

__all__ = ["Trained", "load_trained"]
