"""Requirements for every implementation: one table of cases and one check, on CPU, in the interpreter, on a GPU.

The truth is the reference in fp64. The bound is relative: twice the error of torch's own path in the same dtype,
F.cross_entropy(F.linear(e, c).float()), on the same inputs, plus 1e-6 for results that torch gets exactly right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cce_kernels import linear_cross_entropy, planner, reference_linear_cross_entropy
from cce_kernels.runtime.interpreter import INTERPRETED
from quick_interpreter import patch_once
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if INTERPRETED:
    patch_once()
IGNORE = -100
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    name: str
    shape: tuple[int, ...] = (130,)  # leading dimensions; N is their product
    dim: int = 40
    vocab: int = 777
    dtype: torch.dtype = FP32
    dtype_c: torch.dtype | None = None  # None: as e
    bias: bool = False
    dtype_bias: torch.dtype | None = None  # None: as e
    autocast: torch.dtype | None = None  # of the forward pass
    ignored: float = 0.3  # share of the targets
    targets_below: int | None = None  # targets are drawn from the entries before this one
    peak: float = 0.0  # how much each row's target logit exceeds the others, as in a trained model
    strided: bool = False
    weights: bool = False  # token_weights, of both signs unless the loss is their mean
    several: int = 0  # targets of a row, with target_weights, if more than one
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def _variants() -> list[Case]:
    cases = [
        Case("ragged"),
        Case("one_row", shape=(1,), ignored=0),
        Case("one_entry", vocab=1, dim=16, shape=(3,), ignored=0),
        Case("two_entries_one_dimension", vocab=2, dim=1, shape=(5,), ignored=0),
        Case("odd_dimension", dim=37, vocab=1001),
        Case("exact_tiles", shape=(128,), dim=64, vocab=512),
        Case("no_ignored", ignored=0),
        Case("all_ignored", ignored=1),
        Case("leading_dimensions", shape=(2, 3, 11)),
        Case("strided_inputs", strided=True),
        Case("trained_like", peak=12),
        Case("sum", options={"reduction": "sum"}),
        Case("row_losses", options={"reduction": "none"}),
        Case("shift", shape=(3, 21), options={"shift": 1}),
        Case("shift_two_row_losses", shape=(3, 21), options={"shift": 2, "reduction": "none"}),
        Case("bias", bias=True),
        Case("softcap", peak=12, options={"softcap": 15.0}),
        Case("logit_scale", options={"logit_scale": 0.3}),
        Case("label_smoothing", options={"label_smoothing": 0.1}),
        Case("z_loss", options={"z_loss": 1e-2}),
        Case("weights", weights=True, options={"z_loss": 1e-2, "label_smoothing": 0.1}),
        Case("weights_shift", shape=(3, 21), weights=True, options={"shift": 1, "reduction": "sum"}),
        Case(
            "everything", shape=(4, 33), peak=6, bias=True, strided=True, weights=True,
            options={
                "softcap": 20.0, "logit_scale": 1.3, "label_smoothing": 0.2, "z_loss": 1e-3, "shift": 1,
                "reduction": "none",
            },
        ),
        Case("several", several=3, peak=3),
        Case("several_rows", several=2, shape=(3, 21), options={"shift": 1, "reduction": "none"}),
        Case(
            "several_everything", several=4, shape=(4, 33), peak=6, bias=True, strided=True,
            options={
                "softcap": 20.0, "logit_scale": 1.3, "label_smoothing": 0.2, "z_loss": 1e-3, "shift": 1,
                "reduction": "sum", "workspace_mib": 0.125,
            },
        ),
        Case("many_chunks_kahan", vocab=1300, weights=True, options={"workspace_mib": 0.5}),
        Case("many_chunks_fp32", vocab=1300, options={"workspace_mib": 0.5, "accumulate": "fp32"}),
    ]  # fmt: skip
    typed = [replace(case, name=f"{case.name}-{str(dtype)[6:]}", dtype=dtype) for dtype in (FP32, BF16, FP16)
             for case in cases]  # fmt: skip
    return [
        *typed,
        Case("mixed-bf16_fp32", dtype=BF16, dtype_c=FP32, bias=True),
        Case("mixed-fp32_bf16", dtype=FP32, dtype_c=BF16, bias=True),
        Case("mixed-bf16_fp16", dtype=BF16, dtype_c=FP16),
    ]


CASES = _variants()


def draw(case: Case, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """e, c, targets and bias of a case. All but the targets need gradients."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    c = normal(case.vocab, case.dim) / case.dim**0.5
    targets = torch.randint(0, case.targets_below or case.vocab, case.shape, generator=g)
    e = normal(*case.shape, case.dim) + case.peak * c[targets]
    if case.several:  # a row may have a target twice
        others = torch.randint(0, case.vocab, (*case.shape, case.several - 1), generator=g)
        targets = torch.cat((targets[..., None], others), dim=-1)
    if case.ignored:
        targets[torch.rand(targets.shape, generator=g) < case.ignored] = IGNORE
    e, c, targets = e.to(device, case.dtype), c.to(device, case.dtype_c or case.dtype), targets.to(device)
    if case.strided:  # columns of a wider tensor, a transposed parameter, every other target
        e = torch.cat((e, e), dim=-1)[..., case.dim // 2 : case.dim // 2 + case.dim]
        c = c.T.contiguous().T
        targets = torch.stack((targets, targets), dim=-1)[..., 1]
    bias = normal(case.vocab).to(device, case.dtype_bias or case.dtype) if case.bias else None
    for x in (e, c, bias):
        if x is not None:
            x.requires_grad_()
    return e, c, targets, bias


def weights_of(case: Case, targets: Tensor) -> dict[str, Tensor]:
    """token_weights or target_weights of a case, for the targets of `draw`. Those of ignored ones are NaN."""
    if not (case.weights or case.several):
        return {}
    weights = torch.randn(targets.shape, generator=torch.Generator().manual_seed(2))
    if case.options.get("reduction", "mean") == "mean":
        weights = weights.abs() + 0.1
    return {
        "target_weights" if case.several else "token_weights": weights.to(targets.device).masked_fill_(
            targets == IGNORE, torch.nan
        )
    }


def torch_path(
    e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None, *, reduction: str = "mean", shift: int = 0,
    softcap: float | None = None, logit_scale: float = 1.0, label_smoothing: float = 0.0, z_loss: float = 0.0,
    token_weights: Tensor | None = None, target_weights: Tensor | None = None, return_lse: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """The loss as usually written in torch: products in e's dtype, then fp32. With return_lse also each row's LSE."""
    weights = torch.ones_like(targets) if token_weights is None else token_weights
    if target_weights is None:
        targets, weights = targets[..., None], weights[..., None]
    else:
        weights = target_weights
    if shift:
        e, targets, weights = e[..., :-shift, :], targets[..., shift:, :], weights[..., shift:, :]
    common = torch.promote_types(e.dtype, c.dtype)
    z = F.linear(e.to(common), c.to(common)).float() * logit_scale
    if bias is not None:
        z = z + bias
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z, weights = z.flatten(0, -2), weights.masked_fill(targets == IGNORE, 0)
    rows = torch.zeros_like(z[:, 0])
    for flat, weight in zip(targets.flatten(0, -2).T, weights.flatten(0, -2).T, strict=True):
        of_target = F.cross_entropy(z, flat, ignore_index=IGNORE, reduction="none", label_smoothing=label_smoothing)
        rows = rows + weight * (of_target + (flat != IGNORE) * z_loss * z.logsumexp(dim=-1).square())
    loss = rows.reshape(targets.shape[:-1]) if reduction == "none" else rows.sum()
    if reduction == "mean":
        loss = loss / _counted(targets, weights, target_weights is not None)
    return (loss, z.logsumexp(dim=-1)) if return_lse else loss


def _counted(targets: Tensor, weights: Tensor, several: bool) -> Tensor:
    """What a mean is divided by. targets: (..., K), and their weights, 0 where ignored."""
    return (targets != IGNORE).any(dim=-1).sum().clamp(min=1) if several else weights.float().sum().clamp(min=1e-9)


def gradients(loss: Tensor, inputs: tuple[Tensor | None, ...], seed: int = 1) -> list[Tensor]:
    """Gradients of the inputs that are not None; row losses get an arbitrary upstream gradient."""
    upstream = torch.randn(loss.shape, generator=torch.Generator().manual_seed(seed)) if loss.dim() else None
    wanted = [x for x in inputs if x is not None]
    return list(torch.autograd.grad(loss, wanted, None if upstream is None else upstream.to(loss)))


def error(x: Tensor, truth: Tensor) -> float:
    """Relative Frobenius error; absolute where the truth is 0."""
    truth = truth.double()
    size = truth.norm().item()
    return ((x.double() - truth).norm() / (size or 1.0)).item()


def of_operator(
    e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None, weights: Tensor | None = None, place: Any = None,
    *, reduction: str = "mean", return_lse: bool = True, return_metrics: bool = True,
    target_weights: Tensor | None = None, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The inputs of the loss's custom operator."""
    from cce_kernels.arguments import checked

    inputs, call, _ = checked(
        e, c, targets, bias, weights, None, options, reduction=reduction, return_lse=return_lse,
        return_metrics=return_metrics, place=place, target_weights=target_weights,
    )  # fmt: skip
    return *inputs, call.handle()


def in_fp64(*inputs: Tensor | None) -> list[Any]:
    """Leaves of their own in fp64; None if the input is None."""
    return [None if x is None else x.detach().double().requires_grad_() for x in inputs]


def check(case: Case, device: str, floor: float = 1e-6) -> None:
    """Loss and gradients are within twice torch's error, in each input's dtype, and finite. The loss is fp32."""
    e, c, targets, bias = draw(case, device)
    multiplied = (e, c) if case.autocast is None else (e.to(case.autocast), c.to(case.autocast))
    e64, c64, bias64 = in_fp64(*multiplied, bias)
    weights = weights_of(case, targets)
    truth, _ = reference_linear_cross_entropy(e64, c64, targets, bias=bias64, **_truth_options(case), **weights)
    truth_grads = gradients(truth, (e64, c64, bias64))

    with torch.autocast(e.device.type, case.autocast, enabled=case.autocast is not None):
        baseline = torch_path(e, c, targets, bias, **case.options, **weights)
        loss = linear_cross_entropy(e, c, targets, bias=bias, **case.options, **weights)
    baseline_grads = gradients(baseline, (e, c, bias))
    grads = gradients(loss, (e, c, bias))

    assert loss.dtype == torch.float32
    assert loss.shape == truth.shape
    assert torch.isfinite(loss).all()
    rounded, rounded_grads = _rounded_terms(case, e64, c64, targets, bias64)
    assert error(loss, truth) <= 2 * error(baseline, truth) + floor + error(truth + rounded, truth)
    inputs = {name: x for name, x in (("e", e), ("c", c), ("bias", bias)) if x is not None}
    each = zip(inputs.items(), grads, baseline_grads, truth_grads, rounded_grads, strict=True)
    for (name, x), grad, base, want, rounded in each:
        assert grad.dtype == x.dtype
        assert grad.shape == x.shape
        assert error(grad, want) <= 2 * error(base, want) + floor + error(want + rounded, want), name
    if case.ignored == 1:
        assert not loss.any()
        assert not any(grad.any() for grad in grads)


def _rounded_terms(
    case: Case, e64: Tensor, c64: Tensor, targets: Tensor, bias64: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """What rounding the targets' p in fp32 may add to the loss and to each gradient.

    An exponential on a GPU is right to 2^-22, and its log-sum-exp to the last place: 2^-21 of p, and of the targets'
    terms in the gradients. This is a large share if p is near 1 or the terms cancel.
    """
    shift, e_at = case.options.get("shift", 0), e64
    weights = next(iter(weights_of(case, targets).values()), torch.ones_like(targets))
    if not case.several:
        targets, weights = targets[..., None], weights[..., None]
    if shift:
        e_at, targets, weights = e64[..., :-shift, :], targets[..., shift:, :], weights[..., shift:, :]
    kept, columns = targets != IGNORE, targets.clamp(min=0)
    weights = weights.masked_fill(~kept, 0)
    z = case.options.get("logit_scale", 1.0) * (e_at[..., None, :] * c64[columns]).sum(dim=-1)
    if bias64 is not None:
        z = z + bias64[columns]

    def reduced(rows: Tensor) -> Tensor:
        rows = (2**-21 * weights * torch.where(kept, rows, 0)).sum(dim=-1)
        reduction = case.options.get("reduction", "mean")
        if reduction == "none":
            return rows
        return rows.sum() / (1 if reduction == "sum" else _counted(targets, weights, bool(case.several)))

    return reduced(kept.double()), gradients(reduced(z), (e64, c64, bias64))


def _truth_options(case: Case) -> dict[str, Any]:
    return {k: v for k, v in case.options.items() if k not in ("workspace_mib", "accumulate")}


class LargestTensor(TorchDispatchMode):
    """Watches the operators called inside. nbytes: the largest memory behind a tensor that one of them returned."""

    nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        found = [x.untyped_storage().nbytes() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.nbytes = max([self.nbytes, *found])
        return result


@contextmanager
def launches_are_free(**constants: Any) -> Iterator[None]:
    """The planner stores exponentials even for small problems, in chunks of 128 rows. constants: others of its own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in {"LAUNCH_SECONDS": 0.0, "LEAST_ROWS": 128, **constants}.items():
            monkeypatch.setattr(planner, name, value)
        planner.plan.cache_clear()
        yield
    planner.plan.cache_clear()


def check_default_dtype(options: dict[str, Any], dtype: torch.dtype, device: str, rows: int = 240) -> None:
    """torch.set_default_dtype changes no bit of a result, and no dtype."""
    e, c, targets, _ = draw(Case("default", shape=(rows,), dim=24, vocab=700, dtype=BF16, peak=3), device)

    def results() -> list[Tensor]:
        loss, *metrics, stats = linear_cross_entropy(e, c, targets, return_stats=True, **options)
        grads = gradients(loss, (e, c))
        return [loss.detach(), *grads, *stats.values(), *(metrics[0].values() if metrics else ())]

    want = results()
    torch.set_default_dtype(dtype)
    try:
        got = results()
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
