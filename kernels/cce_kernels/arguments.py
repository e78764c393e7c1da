"""Checks of an argument's type. Each error message starts with the argument's name."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

NUMBERS = ("logit_scale", "label_smoothing", "z_loss")
NUMBERS_OR_NONE = ("softcap", "filter_eps", "filter_mass", "workspace_mib")
FLAGS = ("filter_unbiased", "filter_e", "filter_c", "filter_if_faster")


def check_tensor(name: str, x: Any) -> None:
    """Raise a TypeError if x is no tensor, and a ValueError if x is nested, sparse or otherwise not strided."""
    if not isinstance(x, Tensor):
        remedy = "; give its weight" if isinstance(x, nn.Module) else ""
        raise TypeError(f"{name}: must be a tensor, got {_kind(x)}{remedy}")
    if x.is_nested:
        raise ValueError(f"{name}: is a nested tensor; give its values, or a padded tensor with ignored targets")
    if x.layout is not torch.strided:
        raise ValueError(f"{name}: must be a dense tensor, got one of layout {x.layout}; give its to_dense()")


def check_option(name: str, x: Any) -> None:
    """Raise a TypeError if x has the wrong type for the field `name` of `Options`."""
    if type(x) in (float, int) and name not in FLAGS:  # the common case first, to save time on the host
        return
    if name in FLAGS:
        if not isinstance(x, bool):
            raise TypeError(f"{name}: must be True or False, got {_kind(x)}")
    elif name in NUMBERS and (isinstance(x, bool) or not isinstance(x, Real)):
        raise TypeError(f"{name}: must be a number, got {_kind(x)}")
    elif name in NUMBERS_OR_NONE and x is not None and (isinstance(x, bool) or not isinstance(x, Real)):
        raise TypeError(f"{name}: must be a number or None, got {_kind(x)}")


def as_integer(name: str, x: Any) -> int:
    """x as an int; raises a TypeError if x is no integer (None, True or 2.0, for example)."""
    try:
        if isinstance(x, bool):
            raise TypeError
        return operator.index(x)
    except TypeError:
        raise TypeError(f"{name}: must be an integer, got {_kind(x)}") from None


def _kind(x: Any) -> str:
    """How a message names x: by its value if it is a number, string or None, else by its type."""
    return repr(x) if x is None or isinstance(x, bool | int | float | str) else type(x).__name__
