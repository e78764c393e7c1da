"""The Triton implementation, under the names that blockwise.py has."""

from torch import Tensor

from . import entries, gather, schemes, stored
from .coefficients import row_coefficients
from .columns import target_columns
from .draw import mean_logits
from .exponentials import find_targets
from .filter_figures import filter_figures
from .finish import forward
from .options import Options
from .recompute import backward
from .schemes import Plan, Problem
from .settle import settle
from .tiles import aligned as prepare
from .tiles import multiprocessors

__all__ = [
    "backward", "entries", "filter_figures", "find_targets", "forward", "gather", "mean_logits", "plan", "prepare",
    "row_coefficients", "settle", "stored", "target_columns",
]  # fmt: skip


def plan(problem: Problem, e: Tensor, o: Options) -> Plan:
    """How the backward pass goes about it on e's device."""
    return schemes.plan(problem, multiprocessors(e), o)
