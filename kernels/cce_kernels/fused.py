"""The Triton implementation, under the names that blockwise.py has."""

from .backward import backward, backward_width
from .forward import forward
from .tiles import aligned as prepare

__all__ = ["backward", "backward_width", "forward", "prepare"]
