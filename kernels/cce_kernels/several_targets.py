"""Several weighted targets a row, beside the loss of each row's first one.

    loss_i = Σ_k w_ik l_i(t_ik) = W_i l_i(t_i0) + (1 − s) Σ_k w_ik (z_i,t_i0 − z_i,t_ik)        W_i = Σ_k w_ik

l_i(t) is the row's loss with one target t, with label smoothing s and z_loss. So the products and kernels are those of
one target, with the row weights W. Each row takes K logits more, from a product with the targets' rows of C. To the
gradient dL/dz of W l(t_0) the second term adds (1 − s) (W_i − w_i0) at t_i0 and −(1 − s) w_ik at the others. Three
products add it in fp32 where they add the first target's (matmul.py), four products in dz. A target that a row has
twice counts twice.

The first target is one that is not ignored, if there is one (arguments.py). The exponentials of the others stay in the
products, so their p are as accurate as a bf16 softmax.

Cost: reads K rows of C for each row in the forward pass, and K rows of C and of E in the backward pass. Memory: some
50 bytes a target.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .options import Options
from .row_math import Rows


class Several(NamedTuple):
    """The targets of all ranks' rows, seen from this rank."""

    columns: Tensor  # (N, K) int64, columns of this rank's shard; negative where ignored or on another rank
    weights: Tensor  # (N, K) fp32, 0 where ignored
    group: dist.ProcessGroup | None = None  # of the ranks that share the vocabulary
    slope: Tensor | None = None  # (N, K) fp32: the softcap's at the targets

    @property
    def total(self) -> Tensor:
        """The rows' weights W (N,)."""
        return self.weights.sum(dim=1)

    def behind(self, columns: Tensor) -> Tensor:
        """All columns (N, K), with `columns` (N,) for the first targets: on ranks without them, stand-ins."""
        every = self.columns.clone()
        every[:, 0] = columns
        return every

    def losses(self, first: Tensor, rows: Rows, z: Tensor, o: Options) -> Tensor:
        """The row losses (N,), from the logits z (N, K) and the first target's losses, which are 0 for ignored rows."""
        z_first = z[:, 0] if self.group is None else rows.lse - rows.nll
        counts = (self.columns >= 0) & (self.weights != 0)
        apart = torch.where(counts, self.weights * (z_first[:, None] - z), 0)[:, 1:].sum(dim=1)
        if self.group is not None:
            dist.all_reduce(apart, group=self.group)
        return self.total * first + (1 - o.label_smoothing) * apart

    def gradient(self, upstream: Tensor, o: Options) -> Tensor:
        """What is added to dL/dz (N, K) at the columns; upstream: dL/d(row loss), (N,) or ()."""
        weights = self.weights.clone()
        weights[:, 0] -= self.total
        grad = (o.label_smoothing - 1) * weights * upstream[..., None]
        if self.slope is not None:
            grad = grad * self.slope
        return torch.where((self.columns >= 0) & (weights != 0), grad, 0)  # an ignored row's upstream may be NaN
