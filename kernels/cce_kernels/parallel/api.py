"""The loss with the rows of C sharded over the ranks of a process group (vocabulary parallelism).

    LSE_i = log Σ_r exp(LSE_i^r)        −log p_i = −log p_i^o + softplus(log Σ_{r ≠ o} exp(LSE_i^r) − LSE_i^o)

LSE^r is the log-sum-exp over rank r's columns. o is the rank that holds row i's target, its owner. p^o is the softmax
over the owner's columns alone. On ranks other than the owner, another column stands in for the target, a different one
in each row. One all-gather then gives every rank the numbers of all ranks. (A sum over ranks would need a maximum
first, and would keep no digit of a loss near 0.)

The backward pass is that of one device with the LSE of the whole vocabulary. dC is complete on its rank. dE is summed
over the ranks in fp32 and rounded once. With three products, each chunk of rows is settled before its products: one
all-gather, and then exp(LSE^r − LSE) goes into the rows' factors (combine.py).

`rows="same"`: every rank has all rows of E, as in tensor parallelism. dE takes an all-reduce.
`rows="own"`: every rank has rows of its own, as in sequence and data parallelism. E is gathered chunk by chunk, and dE
reduced and scattered, both beside the products: only the first chunk of E and the last of dE are waited for.

Cost on each of W ranks: 1 / W of the products. Bytes sent, for N rows in all: 4 N D for dE, 2 N D for E with
rows="own", some 8 to 24 numbers a row for all else (12 N K bytes more for K targets a row).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..arguments import as_integer, check_tensor, checked
from ..filter.rule import FilterStats
from ..operators import cross_entropy
from ..options import Call, Inputs, Place
from ..row_math import nonzero_divisor, of_targets
from .agreement import agree
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
    token_weights: Tensor | None = None,
    target_weights: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    shift: int = 0,
    main_grad_c: Tensor | None = None,
    return_lse: bool = False,
    return_metrics: bool = False,
    return_stats: bool = False,
    preset: str | None = None,
    agreed: bool = False,
    **options: Any,
) -> Any:
    """`linear_cross_entropy` with the rows of c, bias and main_grad_c sharded over the ranks of a group.

    All ranks call it together, forward and backward, with the same shapes and options. Gradients equal those of one
    device within rounding. A rank gets the gradients of its own rows of c and bias. Under torch.compile the loss is one
    custom operator, with the same graph on every rank.

    The signature is wide because it repeats the keywords of linear_cross_entropy whose meaning ranks change. The
    function is long because every rank checks its arguments and describes them to all ranks.

    Args:
        e: (..., D) hidden states. With rows="same", the same on every rank. With rows="own", the rank's own rows, with
            the same shape on all ranks.
        c: (shards[rank], D), the rank's rows of the whole classifier, in order of rank.
        targets: (...) integers, columns of the whole vocabulary; the same or the rank's own, like e.
        shards: number of c's rows on each rank, none of them 0; see `vocabulary_shards`.
        group: the process group; None for all processes.
        rows: "same" or "own":
            "same": every rank returns the loss and the gradient of e that one device has. The gradients are those of
              one rank's loss, not of the sum of all ranks' copies. The upstream gradient must be the same on all ranks.
            "own": a rank returns loss, lse and gradient of e of its own rows. The gradients are those of the sum of all
              ranks' losses. For reduction "mean" a rank divides its sum by the number of targets that are not ignored
              on all ranks, so that the ranks' losses add up to the mean. Metrics are those of all ranks' rows. The
              upstream gradient of a "sum" or "mean" must be the same number on all ranks.
        bias: (shards[rank],), the rank's entries, or None.
        token_weights: (...), the same or the rank's own, like targets; or None. As in `linear_cross_entropy`. Each rank
            gives token_weights, or none does. The same holds for target_weights (..., K), with targets (..., K).
        main_grad_c: (shards[rank], D) fp32, the rank's rows, or None; as in `linear_cross_entropy`.
        agreed: True if the ranks have called with the same shapes, dtypes and options before, as in all steps of a
            training run but the first. Each rank then checks alone, and the host waits for no other rank. A rank that
            calls differently all the same leaves the others waiting. Upstream gradients that differ where they must be
            the same make the gradients NaN.
        options: softcap, logit_scale, label_smoothing, z_loss, accumulate and workspace_mib, as in
            `linear_cross_entropy`. Over shards a filter is never faster. So a call with filter_if_faster is exact, and
            another filter is refused.

    The other arguments, and what is returned, are those of `linear_cross_entropy`.

    Raises:
        ValueError: as in `linear_cross_entropy`; or shards do not fit the group or c, there are no targets, or there is
            no process group. If one rank's check fails, or ranks call with different shapes or options, all ranks raise
            the same error (agreement.py). Under torch.compile, while a CUDA graph is captured, and if `agreed`, each
            rank checks alone.
        WorkspaceTooSmall: as in `linear_cross_entropy`.
        RuntimeError: in the backward pass, on all ranks: the upstream gradients differ where they must be the same. No
            gradient has been written or added to. While a CUDA graph is captured, and if `agreed`, the gradients are
            NaN instead.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise ValueError("group: torch.distributed has no process group yet; call init_process_group first")
    returned = {"return_lse": return_lse, "return_metrics": return_metrics, "return_stats": return_stats}

    def check() -> tuple[Inputs, Call, torch.Size]:
        _check_place(shards, rows, group)
        check_tensor("e", e)
        check_tensor("c", c)
        rank = dist.get_rank(group)
        if c.dim() == 2 and c.shape[0] != shards[rank]:  # before targets, which are checked against all shards
            raise ValueError(f"c: has {c.shape[0]} rows, shards says {shards[rank]} for rank {rank}")
        found = checked(
            e, c, targets, bias, token_weights, main_grad_c, options, preset=preset, ignore_index=ignore_index,
            reduction=reduction, shift=shift, place=Place(name, tuple(shards), rows == "own", agreed),
            target_weights=target_weights, **returned,
        )  # fmt: skip
        if not targets.numel():
            raise ValueError("targets: must not be empty; give at least one row, whose target may be ignore_index")
        return found

    def describe(_inputs: Inputs, call: Call, _shape: torch.Size) -> str:
        tensors = {"e": e, "c": c, "bias": bias, "token_weights": token_weights, "main_grad_c": main_grad_c}
        tensors["target_weights"] = target_weights
        dtypes = {name: (x.dtype, x.requires_grad) for name, x in tensors.items() if x is not None}
        return (
            f"e {tuple(e.shape)}, targets {tuple(targets.shape)}, dtypes and whether they require gradients {dtypes}, "
            f"gradients enabled {torch.is_grad_enabled()}, products in {call.dtype}, shards {list(shards)}, "
            f"shift {shift}, ignore_index {call.ignore_index}, rows {rows}, reduction {reduction}, {returned}, "
            f"{call.options}"
        )

    if torch.compiler.is_compiling():
        from ..runtime.compiler import constant_name_of

        name, agrees = constant_name_of(group), False
    else:
        # A rank whose e is no tensor tells the others so, from the device of another argument.
        device = next((x.device for x in (e, c, targets) if isinstance(x, Tensor)), torch.device("cpu"))
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        name, agrees = name_of(group), not agreed and not capturing and dist.get_world_size(group) > 1
    inputs, call, shape = agree(check, describe, group, device) if agrees else check()
    row_losses, lse, metrics = cross_entropy(inputs, call)

    loss = of_targets(row_losses, shape, shift) if reduction == "none" else row_losses.sum()
    if reduction == "mean" or return_metrics:
        kept, weights = inputs.targets != call.ignore_index, None if target_weights is not None else inputs.weights
        of_rows = [kept, *([] if metrics is None or not return_metrics else metrics)]
        of_rows = of_rows if weights is None else [*of_rows, weights]
        stacked = torch.stack([torch.where(kept, x, 0).sum(dtype=torch.float64) for x in of_rows])
        if rows == "own":
            dist.all_reduce(stacked, group=group)
        n_kept, *sums = stacked.float()
        if reduction == "mean":
            loss = loss / (n_kept.clamp(min=1) if weights is None else nonzero_divisor(sums[-1]))
    extras: tuple[Any, ...] = (of_targets(lse, shape, shift),) if return_lse else ()
    if return_metrics:
        accuracy, entropy = (x / n_kept.clamp(min=1) for x in sums[:2])
        extras = (*extras, {"accuracy": accuracy, "entropy": entropy})
    if inputs.stats is not None:
        extras = (*extras, FilterStats.report(inputs.stats))
    return (loss, *extras) if extras else loss


def _check_place(shards: Sequence[int], rows: str, group: dist.ProcessGroup) -> None:
    ranks = dist.get_world_size(group)
    try:
        fit = [as_integer("shards", n) > 0 for n in shards] == [True] * ranks
    except TypeError:
        fit = False
    if not fit:
        raise ValueError(f"shards: must be {ranks} positive integers, one for each rank, got {shards}")
    if rows not in ROWS:
        raise ValueError(f"rows: must be one of {', '.join(ROWS)}, got {rows!r}")
