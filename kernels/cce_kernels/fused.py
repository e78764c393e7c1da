"""The Triton implementation, under the names that blockwise.py has: prepare, forward, backward."""

from .backward import backward
from .forward import forward
from .tiles import aligned as prepare

__all__ = ["backward", "forward", "prepare"]
