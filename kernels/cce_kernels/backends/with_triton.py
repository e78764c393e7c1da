"""The Triton backend: the same names as in_torch.py, and modules that only Triton has."""

from torch import Tensor

from .. import planner
from ..filter import gather, select
from ..filter.recomputed import backward
from ..options import Options
from ..parallel.combine import settle
from ..planner import Plan, Problem
from ..row_math import target_columns
from ..runtime import ahead, program
from ..runtime.tiles import multiprocessors
from ..schemes import three_products
from ..schemes.stored_rows import prepare
from ..triton.logits import find_targets
from ..triton.logits import target_logits as logits_at
from ..triton.loss_sum import mean_gradient, reduce_loss
from ..triton.row_coefficients import row_coefficients
from ..triton.row_stats import forward

__all__ = [
    "ahead", "backward", "find_targets", "forward", "gather", "logits_at", "mean_gradient",
    "plan", "prepare", "program", "reduce_loss", "row_coefficients", "select", "settle",
    "target_columns", "three_products",
]  # fmt: skip


def plan(problem: Problem, e: Tensor, o: Options) -> Plan:
    """The plan of the backward pass on e's device."""
    return planner.plan(problem, multiprocessors(e), o)
