"""What kind of thing an argument must be: TypeErrors and ValueErrors that start with its name."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

NUMBERS = ("logit_scale", "label_smoothing", "z_loss")
NUMBERS_OR_NONE = ("softcap", "filter_eps", "filter_mass", "workspace_mib")
FLAGS = ("filter_unbiased", "filter_e", "filter_c")


def check_tensor(name: str, x: Any) -> None:
    """TypeError if x is no tensor; ValueError if its entries do not lie at strides in one block of memory."""
    if not isinstance(x, Tensor):
        remedy = "; give its weight" if isinstance(x, nn.Module) else ""
        raise TypeError(f"{name}: must be a tensor, got {_kind(x)}{remedy}")
    if x.is_nested:
        raise ValueError(f"{name}: is a nested tensor; give its values, or padding with targets that are ignored")
    if x.layout is not torch.strided:
        raise ValueError(f"{name}: must be a dense tensor, got one of layout {x.layout}; give to_dense() of it")


def check_option(name: str, x: Any) -> None:
    """TypeError if an option of `Options` is no number, None or bool where it must be one."""
    if type(x) in (float, int) and name not in FLAGS:  # the common ones first: the host's time counts
        return
    if name in FLAGS:
        if not isinstance(x, bool):
            raise TypeError(f"{name}: must be True or False, got {_kind(x)}")
    elif name in NUMBERS and (isinstance(x, bool) or not isinstance(x, Real)):
        raise TypeError(f"{name}: must be a number, got {_kind(x)}")
    elif name in NUMBERS_OR_NONE and x is not None and (isinstance(x, bool) or not isinstance(x, Real)):
        raise TypeError(f"{name}: must be a number or None, got {_kind(x)}")


def as_integer(name: str, x: Any) -> int:
    """x as a plain number; TypeError if it is no integer, None or 2.0 say."""
    try:
        if isinstance(x, bool):
            raise TypeError
        return operator.index(x)
    except TypeError:
        raise TypeError(f"{name}: must be an integer, got {_kind(x)}") from None


def _kind(x: Any) -> str:
    """A value where it is short, else its type."""
    return repr(x) if x is None or isinstance(x, bool | int | float | str) else type(x).__name__
