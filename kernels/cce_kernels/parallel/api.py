"""The loss where each rank of a process group holds some rows of C (vocabulary parallelism).

    LSE_i = log Σ_r exp(LSE_i^r)        −log p_i = −log p_i^o + softplus(log Σ_{r ≠ o} exp(LSE_i^r) − LSE_i^o)

LSE^r is of the logits of rank r's rows of C, o the rank that holds row i's target, p^o the softmax over its rows alone:
the forward pass of one device, on each rank. A row whose target is elsewhere has a stand-in, another entry in each row.
One all-gather of 2 numbers a row then gives every rank every rank's: a sum over ranks would need a maximum first, and
of a loss near 0 it would keep no digit.

The backward pass is that of one device with the whole LSE: dC is complete where it is, dE is summed over the ranks in
fp32 and rounded once. With stored exponentials (three_products.py) each chunk of rows is settled, one all-gather,
before it is multiplied: exp(LSE^r − LSE) goes into the rows' factors. What overlaps with computation: with rows="own"
the gathering of E but its first chunk's; the sum of dE over the ranks but the last chunk's, which goes on while that is
multiplied. What does not: each chunk's numbers (dC needs them, and dE's product is not taken first: the two fill each
other's idle multiprocessors, which is worth more), and the last chunk's dE.

`rows="same"`: every rank has all rows of E, as in tensor parallelism; dE by an all-reduce. `rows="own"`: every rank has
rows of its own, as in sequence and data parallelism; E is gathered, dE reduced and scattered.

Cost on each of W ranks: a W-th of the products. Sent, for N rows in all: 8 N bytes for the sums (a row's metrics and
smoothing: 4 each), N D × 4 bytes for dE, and with rows="own" N D × 2 for E in 16 bits and, where logits are made again,
4 N for the gradients of the row losses. A filter's statistics are two sums of N numbers in fp32, filter_mass takes one;
the unbiased rule gathers V numbers in fp32, to rank all entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..api import check_inputs, gradients_wanted, make_options, product_dtype, shifted
from ..arguments import check_tensor
from ..filter_rule import FilterStats
from ..options import Options
from .agreement import agree
from .operators import total, vocabulary_parallel
from .sharding import name_of, vocabulary_shards

ROWS = ("same", "own")
__all__ = ["ROWS", "vocabulary_parallel_linear_cross_entropy", "vocabulary_shards"]


def vocabulary_parallel_linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    *,
    shards: Sequence[int],
    group: dist.ProcessGroup | None = None,
    rows: str = "same",
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    shift: int = 0,
    main_grad_c: Tensor | None = None,
    return_lse: bool = False,
    return_metrics: bool = False,
    return_stats: bool = False,
    preset: str | None = None,
    **options: Any,
) -> Any:
    """`linear_cross_entropy` with the rows of c, bias and main_grad_c spread over the ranks of a group.

    All ranks call it together, forward and backward, with the same shapes and options. Gradients equal those of one
    device within rounding; those of c and bias are of the rank's rows.
    Under torch.compile one operator, with the same graph on every rank.
    The signature is wide because it repeats linear_cross_entropy's own keywords, as far as ranks change their meaning.

    Args:
        e: (..., D), and targets: (...), places in the whole vocabulary. With rows="same" the same on every rank, as
            must be the gradient of what is returned; with rows="own" the rank's own, of one shape on all ranks.
        c: (shards[rank], D), the rank's rows of the whole classifier, in order of rank. bias, main_grad_c: likewise.
        shards: rows of c on each rank, none of them 0; see `vocabulary_shards`.
        group: None for all processes.
        rows: "same": loss and gradients of e as on one device, on every rank; gradients are those of one rank's loss,
            not of the sum of all ranks' copies. "own": loss, lse and gradient of e are of the rank's own rows;
            gradients are those of the sum of all ranks' losses. "mean" then divides the rank's sum by the targets that
            are not ignored on all ranks, so that the ranks' losses add up to the mean; metrics are of all ranks' rows.
            The gradient of a "sum" or "mean" must be the same number on all ranks.
        options: softcap, logit_scale, label_smoothing, z_loss, filter_eps, filter_unbiased, filter_mass, filter_e,
            filter_c, accumulate and workspace_mib, and all else: as in `linear_cross_entropy`. Mass and statistics are
            those of all ranks' shards.

    Returns:
        As `linear_cross_entropy`.

    Raises:
        ValueError: as there; shards that are not the group's, or not c's; no targets; no group. Where one rank finds
            it, or ranks call with other shapes or options than the rest, all ranks raise the same error (agreement.py;
            not under torch.compile, nor while a CUDA graph is captured).
        WorkspaceTooSmall: as there.
        RuntimeError: in the backward pass, on all ranks: the gradients of the ranks' losses differ where they must not.
            No gradient has been written or added then.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise ValueError("group: torch.distributed has no process group yet")
    check_tensor("e", e)
    options_of_call = {"returned": (return_lse, return_metrics, return_stats), "rows": rows, "reduction": reduction}

    def check() -> tuple[Options, Tensor, int]:
        o = make_options(preset, options)
        _check_place(shards, rows, group)
        found = check_inputs(e, c, targets, bias, main_grad_c, ignore_index, reduction, shift, sum(shards))
        rank = dist.get_rank(group)
        if c.shape[0] != shards[rank]:
            raise ValueError(f"c: has {c.shape[0]} rows, shards says {shards[rank]} for rank {rank}")
        if not targets.numel():
            raise ValueError("targets: must not be empty")
        return o, *found

    def describe(o: Options, _targets: Tensor, ignore_index: int) -> str:
        tensors = {"e": e, "c": c, "bias": bias, "main_grad_c": main_grad_c}
        dtypes = {name: (x.dtype, x.requires_grad) for name, x in tensors.items() if x is not None}
        return (
            f"e {tuple(e.shape)}, dtypes and whether they require gradients {dtypes}, gradients enabled "
            f"{torch.is_grad_enabled()}, products in {product_dtype(e, c)}, shards {list(shards)}, shift {shift}, "
            f"ignore_index {ignore_index}, {options_of_call}, {o}"
        )

    if torch.compiler.is_compiling():
        from .compiler import constant_name_of  # imports all of torch's compiler: 2 s

        name = constant_name_of(group)
    else:
        name = name_of(group)
    capturing = e.is_cuda and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or capturing or dist.get_world_size(group) == 1:
        o, targets, ignore_index = check()
    else:
        o, targets, ignore_index = agree(check, describe, group, e.device)
    if shift:
        targets = shifted(targets, shift, ignore_index)
    shape, flat = targets.shape, targets.reshape(-1)
    stats = FilterStats.empty(e.device) if return_stats else None
    needs, main_grad_c = gradients_wanted(e, c, bias, main_grad_c)
    row_losses, lse, metrics = vocabulary_parallel(
        e.reshape(-1, e.shape[-1]), c, flat, bias, main_grad_c, stats, ignore_index, product_dtype(e, c),
        reduction != "none" and not return_lse, return_metrics, needs,
        name, list(shards), rows == "own", *o.values(),
    )  # fmt: skip

    last = shape[-1] - shift if shift else None
    loss = row_losses.reshape(shape)[..., :last] if reduction == "none" else row_losses.sum()
    if reduction == "mean" or return_metrics:
        kept = flat != ignore_index
        sums = [torch.where(kept, x, 0).sum(dtype=torch.float64) for x in (kept, *metrics.T)]
        of_rows = torch.stack(sums)
        n_kept, *sums = (total(of_rows, name) if rows == "own" else of_rows).float()
        if reduction == "mean":
            loss = loss / n_kept.clamp(min=1)
    extras: tuple[Any, ...] = (lse.reshape(shape)[..., :last],) if return_lse else ()
    if return_metrics:
        accuracy, entropy = (x / n_kept.clamp(min=1) for x in sums)
        extras = (*extras, {"accuracy": accuracy, "entropy": entropy})
    if stats is not None:
        extras = (*extras, FilterStats.report(stats))
    return (loss, *extras) if extras else loss


def _check_place(shards: Sequence[int], rows: str, group: dist.ProcessGroup) -> None:
    ranks = dist.get_world_size(group)
    if len(shards) != ranks or min(shards) < 1:
        raise ValueError(f"shards: must be {ranks} positive numbers, one for each rank, got {list(shards)}")
    if rows not in ROWS:
        raise ValueError(f"rows: must be one of {', '.join(ROWS)}, got {rows!r}")
