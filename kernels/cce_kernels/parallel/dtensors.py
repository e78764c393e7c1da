"""The loss of DTensors: tensors whose placements say which rank holds which part, as FSDP2 and tensor parallelism use.

If e is a DTensor, the loss and its gradients are those of one device that holds all tensors whole. The placements
decide alone where the loss is computed, along each dimension of e's mesh:

    e                 c           computed
    replicated        Shard(0)    vocabulary-parallel, rows="same" (api.py): tensor parallelism
    rows sharded      Shard(0)    vocabulary-parallel, rows="own": sequence parallelism
    rows sharded      otherwise   each rank its rows with the whole c, c's gradient is summed
    replicated        otherwise   the same on every rank

A mesh dimension of c that e does not have is data parallelism: the ranks have rows of their own, and a loss of their
own. c is gathered, and its gradient is averaged over the ranks and scattered, as FSDP2 does it for all parameters. If e
is no DTensor, that holds for all dimensions of c's mesh. c.full_tensor(grad_placements=[Partial()]) in place of c
gives the sum over ranks instead of the average.

One dimension at most spreads the vocabulary, the last one with Shard(0). Along the others c is gathered. It is gathered
along all of them if the division by torch.chunk leaves a rank without a row of c. e is gathered along dimensions where
ranks would have different numbers of rows, and where D is sharded.

Imported late: torch's own module takes half a second, and whoever has a DTensor has imported it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..arguments import as_integer, check_reduction_and_shift, check_tensor, shifted
from ..row_math import nonzero_divisor
from .api import vocabulary_parallel_linear_cross_entropy
from .sharding import vocabulary_shards


class _Plain(torch.autograd.Function):
    """A tensor without its wait for a collective; the gradient times a number."""

    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Tensor:  # type: ignore[override]
        ctx.factor = factor
        x = x.trigger_wait() if hasattr(x, "trigger_wait") else x
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad if ctx.factor == 1 else grad * ctx.factor, None


def _waited(x: Any) -> Any:
    return _Plain.apply(x, 1.0) if hasattr(x, "trigger_wait") else x


def _gathered(name: str, x: DTensor, mesh: DeviceMesh | None) -> Any:
    """x on `mesh`, or as a plain tensor for None: gathered along the dimensions of its mesh that `mesh` lacks. Their
    ranks' gradients are averaged. Raises a ValueError if mesh is neither x's mesh nor a part of it.
    """
    if mesh is not None and x.device_mesh == mesh:
        return x
    names, kept = x.device_mesh.mesh_dim_names or (), () if mesh is None else mesh.mesh_dim_names or ()
    if mesh is not None and not (kept and set(kept) < set(names) and x.device_mesh[kept] == mesh):
        raise ValueError(
            f"{name}: is a DTensor on {x.device_mesh}, e on {mesh}; e's mesh must be {name}'s mesh or a part of it"
        )
    own = [d for d in range(x.device_mesh.ndim) if not kept or names[d] not in kept]
    ranks = math.prod([x.device_mesh.size(d) for d in own])
    placements = [Replicate() if d in own else p for d, p in enumerate(x.placements)]
    grads = [Partial() if d in own else p for d, p in enumerate(x.placements)]
    local = _Plain.apply(x.redistribute(placements=placements).to_local(grad_placements=grads), 1 / ranks)
    if mesh is None:
        return local
    there = [x.placements[names.index(name)] for name in kept]
    return DTensor.from_local(local, mesh, there, run_check=False, shape=x.shape, stride=x.stride())


@dataclass(frozen=True)
class Layout:
    """Where the parts of a call lie: e's mesh and placements, and the dimension that spreads the vocabulary."""

    mesh: DeviceMesh
    of_e: tuple[Placement, ...]
    vocabulary: int | None

    @classmethod
    def of(cls, e: DTensor, c: DTensor, spread: bool) -> Layout:
        """The layout for e (..., D) and c (V, D) on one mesh. spread: whether the vocabulary may be spread."""
        mesh, rows = e.device_mesh, range(e.dim() - 1)
        of_e = [p if any(p.is_shard(k) for k in rows) else Replicate() for p in e.placements]
        vocabulary = None
        for d, p in enumerate(c.placements):
            each = -(-c.shape[0] // mesh.size(d))
            if spread and p.is_shard(0) and each * (mesh.size(d) - 1) < c.shape[0]:
                vocabulary = d
        if vocabulary is not None:  # ranks of a vocabulary-parallel call have equally many rows
            for k in rows:
                along = [d for d, p in enumerate(of_e) if p.is_shard(k)]
                if e.shape[k] % math.prod([mesh.size(d) for d in along]):
                    of_e = [Replicate() if d in along else p for d, p in enumerate(of_e)]
        return cls(mesh, tuple(of_e), vocabulary)

    def local(self, x: DTensor) -> Tensor:
        """This rank's rows of e (..., D)."""
        return _waited(x.redistribute(placements=self.of_e).to_local(grad_placements=self.of_e))

    def local_rows(self, x: Tensor, whole: int | None = None) -> Tensor:
        """This rank's part of numbers for rows (...), which every rank has; all along the mesh dimension `whole`."""
        placements = [Replicate() if d == whole else p for d, p in enumerate(self.of_e)]
        everywhere = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        return everywhere.redistribute(placements=placements).to_local()

    def local_head(self, x: DTensor) -> Tensor:
        """This rank's rows of c (V, D) or of the bias (V,)."""
        here = [Shard(0) if d == self.vocabulary else Replicate() for d in range(self.mesh.ndim)]
        summed = [d for d, p in enumerate(self.of_e) if d != self.vocabulary and p.is_shard()]
        grads = [Partial() if d in summed else p for d, p in enumerate(here)]
        return _waited(x.redistribute(placements=here).to_local(grad_placements=grads))

    def total(self, x: Tensor, whole: int | None = None) -> Any:
        """The sum of numbers (), one for each part of the rows, as a replicated DTensor. whole: as in `local_rows`."""
        parts = [Partial() if p.is_shard() and d != whole else Replicate() for d, p in enumerate(self.of_e)]
        return DTensor.from_local(x, self.mesh, parts, run_check=False).redistribute(
            placements=[Replicate()] * self.mesh.ndim
        )

    def rows(self, x: Tensor, like: Tensor, shift: int) -> Any:
        """Numbers for this rank's rows as a DTensor of the shape of like[..., shift:]."""
        stride = torch.empty(like.shape, device="meta").stride()
        whole = DTensor.from_local(x, self.mesh, self.of_e, run_check=False, shape=like.shape, stride=stride)
        return whole[..., : like.shape[-1] - shift] if shift else whole

    def compute(self, function: Any, e: Tensor, c: Tensor, targets: Tensor, vocab: int, **options: Any) -> Any:
        """`function` of this rank's tensors, or the vocabulary-parallel loss of them."""
        if self.vocabulary is None:
            return function(e, c, targets, **options)
        return vocabulary_parallel_linear_cross_entropy(
            e, c, targets, shards=vocabulary_shards(vocab, self.mesh.size(self.vocabulary)),
            group=self.mesh.get_group(self.vocabulary),
            rows="own" if self.of_e[self.vocabulary].is_shard() else "same", **options,
        )  # fmt: skip


def of_dtensors(
    function: Callable[..., Any], e: Any, c: Any, targets: Any, bias: Any, main_grad_c: Any, *, ignore_index: int,
    shift: int, spread: bool = True, token_weights: Any = None, target_weights: Any = None, **options: Any,
) -> Any:  # fmt: skip
    """`function`, linear_cross_entropy or linear_log_probs, of tensors that `any_distributed` finds.

    spread: whether the vocabulary may be spread.

    Returns:
        What function returns. If e is a DTensor, so is everything returned: numbers are replicated, row losses and
        log-sum-exps are placed as e's rows are.

    Raises:
        TypeError, ValueError: as function; or the tensors do not fit each other (`_checked`).
    """
    e, c, targets, bias, token_weights = (_waited(x) for x in (e, c, targets, bias, token_weights))
    options["ignore_index"] = ignore_index
    if not isinstance(e, DTensor):
        of_rows = {"token_weights": token_weights, "target_weights": target_weights}
        of_rows = {name: x for name, x in of_rows.items() if x is not None}
        c, bias = plain_heads(c, bias, main_grad_c, targets=targets, **of_rows)
        return function(e, c, targets, bias=bias, shift=shift, **of_rows, **options)
    if target_weights is not None:
        raise ValueError(
            "target_weights: cannot be given with a DTensor for e; give its to_local() and c's full_tensor(), or call "
            "vocabulary_parallel_linear_cross_entropy"
        )
    if options.pop("return_stats", False):
        raise ValueError("return_stats: each rank of a DTensor has statistics of its own; give e.to_local()")
    c, bias, targets, weights = _checked(e, c, targets, bias, token_weights, main_grad_c, shift, ignore_index)
    layout, reduction = Layout.of(e, c, spread), options.get("reduction", "none")
    if weights is not None:
        options["token_weights"] = layout.local_rows(weights)
    if reduction == "mean":
        options["reduction"] = "sum"
    found = layout.compute(
        function, layout.local(e), layout.local_head(c), layout.local_rows(targets), c.shape[0],
        bias=None if bias is None else layout.local_head(bias), **options,
    )  # fmt: skip
    loss, *extras = found if isinstance(found, tuple) else (found,)
    kept = targets != ignore_index
    if reduction == "none":
        loss = layout.rows(loss, targets, shift)
    elif reduction == "mean":
        whole = kept.sum().clamp(min=1) if weights is None else nonzero_divisor(torch.where(kept, weights, 0).sum())
        loss = layout.total(loss / whole)
    else:
        loss = layout.total(loss)
    if options.get("return_lse") or options.get("return_entropy"):
        extras[0] = layout.rows(extras[0], targets, shift)
    if options.get("return_metrics"):  # means over the rows of one rank, or of all ranks that spread the vocabulary
        share = layout.local_rows(kept, layout.vocabulary).sum() / kept.sum().clamp(min=1)
        extras[-1] = {name: layout.total(x * share, layout.vocabulary) for name, x in extras[-1].items()}
    return (loss, *extras) if extras else loss


def plain_heads(c: Any, bias: Any, main_grad_c: Any, **of_rows: Any) -> tuple[Any, Any]:
    """c and bias for a plain e: gathered, if they are DTensors.

    Raises:
        ValueError: numbers of rows are DTensors, or main_grad_c is given.
    """
    for name, x in of_rows.items():
        if isinstance(x, DTensor):
            raise ValueError(f"{name}: is a DTensor, e is none; give its to_local(), or a DTensor for e")
    _refuse_buffer(main_grad_c)
    return tuple(_gathered(name, x, None) if isinstance(x, DTensor) else x for name, x in (("c", c), ("bias", bias)))


def _checked(
    e: DTensor, c: Any, targets: Any, bias: Any, token_weights: Any, main_grad_c: Any, shift: Any, ignore_index: Any
) -> tuple[Any, Any, Tensor, Tensor | None]:
    """c and bias on e's mesh, and all rows' shifted targets and weights.

    Raises:
        TypeError, ValueError: an argument has the wrong type; c or bias is no DTensor, or on another mesh than e; rows
            do not have the shape of e without D; or main_grad_c is given.
    """
    _refuse_buffer(main_grad_c)
    heads = []
    for name, x in (("c", c), ("bias", bias)):
        if x is not None:
            check_tensor(name, x)
            if not isinstance(x, DTensor):
                raise ValueError(
                    f"{name}: is no DTensor, e is one; give DTensor.from_local({name}, mesh, [Replicate()])"
                )
            x = _gathered(name, x, e.device_mesh)
        heads.append(x)
    shift, ignore_index = as_integer("shift", shift), as_integer("ignore_index", ignore_index)
    rows: list[Any] = []
    for name, x in (("targets", targets), ("token_weights", token_weights)):
        if x is not None:
            check_tensor(name, x)
            if x.shape != e.shape[:-1]:
                raise ValueError(f"{name}: must be {tuple(e.shape[:-1])} like e without D, got {tuple(x.shape)}")
            x = x.full_tensor() if isinstance(x, DTensor) else x
        rows.append(x)
    targets, weights = rows
    check_reduction_and_shift("none", shift, targets)
    if shift:
        targets = shifted(targets.long(), shift, ignore_index)
        weights = None if weights is None else shifted(weights, shift, 0)
    return heads[0], heads[1], targets, weights


def _refuse_buffer(main_grad_c: Any) -> None:
    if main_grad_c is not None:
        raise ValueError("main_grad_c: cannot be given with DTensors; c.grad gets the gradient")
