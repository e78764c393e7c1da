"""Imports that the garbage collector never looks at again: for half a second each time, and in every fork."""

import gc
from types import SimpleNamespace

from linrnn.core import garbage


def freeze() -> None:
    """Freeze all that is there. A run, which would unfreeze it at its end, leaves it frozen."""
    gc.freeze()
    garbage.gc = SimpleNamespace(**{**vars(gc), "freeze": lambda: None, "unfreeze": lambda: None})  # type: ignore
