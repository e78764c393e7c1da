"""What a forward pass keeps in memory for its backward pass, beside the inputs e, c, bias and weights.

Tensors that a call does not need are None. A custom operator returns tensors only, so there they are empty instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Held(NamedTuple):
    """What three products keep and only read (schemes/three_products.py)."""

    w: Tensor  # (rows, V) bf16: the last chunk's exponentials, the largest tensor by far
    factor: Tensor  # (N,) fp32; see `row_stats.Gradient` for this and the next two
    coefficient: Tensor  # (N,) fp32
    of_lse: Tensor | None  # (2, N) fp32, if log-sum-exps may get gradients
    c_sum: Tensor | None  # (D,) fp32: the sum of C's rows, for label smoothing
    keys: Tensor | None  # (N,) int32: the rows' targets in order; see `order_by_target` for this and the next two
    order: Tensor | None  # (N,) int64: the rows in that order
    bounds: Tensor | None  # (tiles of dC + 1,) int32
    live: Tensor | None  # (N,) int64: the rows, those that count first; see `live_rows` for this and the next
    counts: Tensor | None  # (chunks + 1,) int32


class GradientSums(NamedTuple):
    """The gradients as three products sum them, finished in place by the backward pass."""

    parts: Tensor | None = None  # (splits, N, D) fp32: parts of w C, with several chunks
    grad_e: Tensor | None = None  # (N, D): dE
    lost_e: Tensor | None = None  # the rounding error of dE (accumulator.py)
    grad_c: Tensor | None = None  # (V, D): dC
    lost_c: Tensor | None = None  # the rounding error of dC
    grad_bias: Tensor | None = None  # (V,) fp32


class Saved(NamedTuple):
    """Everything that is kept. N counts the rows of all ranks."""

    columns: Tensor  # (N,) int64: each row's target column (row_math.py)
    here: Tensor | None = None  # (N,) int64: the same as columns of this rank's shard; None without shards
    counted: Tensor | None = None  # (): what a mean is divided by
    lse: Tensor | None = None  # (N,) fp32, if each rank has rows of its own; else the call's result has them
    lost: Tensor | None = None  # (N,) fp32: what lse lost by rounding, for four products
    e: Tensor | None = None  # the operands in the products' dtype, where they had to be copied
    c: Tensor | None = None
    held: Held | None = None  # of three products
    sums: GradientSums | None = None
    lists: Sequence[Tensor] = ()  # of the filter (filter/select.py)

    def flat(self) -> list[Any]:
        """All tensors, and None, in one list."""
        return [*self[:7], *(self.held or ()), *(self.sums or ()), *self.lists]

    @classmethod
    def of(cls, tensors: Sequence[Any], rows: int) -> Saved:
        """What `flat` has listed. rows: those of a chunk of three products; 0 for the other schemes."""
        first: Any = [present(x) for x in tensors[:7]]
        rest = tensors[7:]
        if not rows:
            return cls._make((*first, None, None, rest))
        held, sums = rest[: len(Held._fields)], rest[len(Held._fields) :]
        return cls._make((*first, Held._make(map(present, held)), GradientSums._make(map(present, sums)), ()))

    def used_up(self) -> Saved:
        """The same memory, for a backward pass that overwrites it and returns parts of it as gradients.

        `.data` has a version counter of its own. Otherwise autograd would refuse a second backward pass, because a
        saved tensor has changed. The second pass does not read the sums.
        """
        assert self.sums is not None
        return self._replace(sums=GradientSums._make([None if x is None else x.data for x in self.sums]))


def present(x: Tensor | None) -> Any:
    """A tensor, or None if it is empty."""
    return x if x is not None and x.numel() else None
