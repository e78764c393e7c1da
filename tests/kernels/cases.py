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
from cce_kernels import WorkspaceTooSmall, linear_cross_entropy, planner, reference_linear_cross_entropy
from cce_kernels.runtime.interpreter import INTERPRETED
from quick_interpreter import patch_once
from torch import Tensor

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
    if case.ignored:
        targets[torch.rand(case.shape, generator=g) < case.ignored] = IGNORE
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
    """The option token_weights of a case, for the targets of `draw`. Those of ignored targets are NaN."""
    if not case.weights:
        return {}
    weights = torch.randn(case.shape, generator=torch.Generator().manual_seed(2))
    if case.options.get("reduction", "mean") == "mean":
        weights = weights.abs() + 0.1
    return {"token_weights": weights.to(targets.device).masked_fill_(targets == IGNORE, torch.nan)}


def torch_path(
    e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None, *, reduction: str = "mean", shift: int = 0,
    softcap: float | None = None, logit_scale: float = 1.0, label_smoothing: float = 0.0, z_loss: float = 0.0,
    token_weights: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """The loss as usually written in torch: logits in e's dtype, then fp32."""
    weights = torch.ones_like(targets) if token_weights is None else token_weights
    if shift:
        e, targets, weights = e[..., :-shift, :], targets[..., shift:], weights[..., shift:]
    common = torch.promote_types(e.dtype, c.dtype)
    z = F.linear(e.to(common), c.to(common), None if logit_scale != 1 or bias is None else bias.to(common))
    z = z.float() * logit_scale
    if logit_scale != 1 and bias is not None:
        z = z + bias
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z, flat = z.flatten(0, -2), targets.flatten()
    rows = F.cross_entropy(z, flat, ignore_index=IGNORE, reduction="none", label_smoothing=label_smoothing)
    weights = weights.flatten().masked_fill(flat == IGNORE, 0)
    rows = weights * (rows + (flat != IGNORE) * z_loss * z.logsumexp(dim=-1).square())
    if reduction == "none":
        return rows.reshape(targets.shape)
    return rows.sum() if reduction == "sum" else rows.sum() / weights.sum().clamp(min=1e-9)


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
    *, reduction: str = "mean", return_lse: bool = True, return_metrics: bool = True, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The inputs of the loss's custom operator."""
    from cce_kernels.arguments import checked

    inputs, call, _ = checked(
        e, c, targets, bias, weights, None, options, reduction=reduction, return_lse=return_lse,
        return_metrics=return_metrics, place=place,
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
    weights = weights_of(case, targets).get("token_weights", torch.ones_like(targets))
    if shift:
        e_at, targets, weights = e64[..., :-shift, :], targets[..., shift:], weights[..., shift:]
    kept, columns = targets != IGNORE, targets.clamp(min=0)
    weights = weights.masked_fill(~kept, 0)
    z = case.options.get("logit_scale", 1.0) * (e_at * c64[columns]).sum(dim=-1)
    if bias64 is not None:
        z = z + bias64[columns]

    def reduced(rows: Tensor) -> Tensor:
        rows, reduction = 2**-21 * weights * torch.where(kept, rows, 0), case.options.get("reduction", "mean")
        return (
            rows if reduction == "none" else rows.sum() / (1 if reduction == "sum" else weights.sum().clamp(min=1e-9))
        )

    return reduced(kept.double()), gradients(reduced(z), (e64, c64, bias64))


def _truth_options(case: Case) -> dict[str, Any]:
    return {k: v for k, v in case.options.items() if k not in ("workspace_mib", "accumulate")}


def check_sums(chunks: int, rows: int, device: str) -> None:
    """Over many vocabulary chunks "kahan" sums dE as well as "fp32", and "bf16" is clearly worse."""
    case = Case("sums", shape=(rows,), dim=128, vocab=256 * chunks, dtype=BF16, ignored=0)
    e, c, targets, _ = draw(case, device)
    e64, c64 = in_fp64(e, c)
    (truth,) = gradients(reference_linear_cross_entropy(e64, c64, targets)[0], (e64,))
    narrowest = (rows * 128 * 4 + 256 * (rows * 2 + rows // 32 + 4)) / 2**20
    errors = {}
    for accumulate in ("kahan", "fp32", "bf16"):
        loss = linear_cross_entropy(e, c, targets, accumulate=accumulate, workspace_mib=narrowest)
        errors[accumulate] = error(gradients(loss, (e,))[0], truth)
    assert errors["kahan"] <= 1.05 * errors["fp32"]
    assert errors["bf16"] > 1.3 * errors["fp32"]


def check_small_workspace(device: str, shape: tuple[int, int], vocab: int) -> None:
    """A workspace too small for one chunk is rejected before backward. The error names the smallest that fits."""
    e, c, targets, _ = draw(Case("workspace", shape=shape[:1], dim=shape[1], vocab=vocab, dtype=BF16), device)

    def loss(workspace_mib: int) -> Tensor:
        return linear_cross_entropy(e, c, targets, accumulate="fp32", filter_eps=0.1, workspace_mib=workspace_mib)

    with pytest.raises(WorkspaceTooSmall, match=r"^workspace_mib: 1 is too small") as refusal:
        loss(1)
    with pytest.raises(WorkspaceTooSmall):
        loss(refusal.value.least_mib - 1)
    gradients(loss(refusal.value.least_mib), (e, c))


@contextmanager
def launches_are_free(**constants: Any) -> Iterator[None]:
    """The planner stores exponentials even for small problems, in chunks of 128 rows. constants: others of its own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in {"LAUNCH_SECONDS": 0.0, "LEAST_ROWS": 128, **constants}.items():
            monkeypatch.setattr(planner, name, value)
        planner.plan.cache_clear()
        yield
    planner.plan.cache_clear()


STORED = {
    "bf16": (40, BF16, "kahan", False, {}),
    "fp32": (72, FP32, "kahan", False, {}),
    "fp32_sums": (40, BF16, "fp32", False, {"z_loss": 1e-3}),
    "main_grad": (40, BF16, "kahan", True, {}),
    "softcap": (40, BF16, "kahan", False, {"softcap": 30.0, "logit_scale": 1.4}),
    "wide": (1100, BF16, "kahan", False, {}),
}


def check_stored(device: str, dim: int, dtype: torch.dtype, accumulate: str, main_grad: bool, options: dict) -> None:
    """Stored exponentials over three chunks of rows, the last one short.

    Some rows have a huge loss (beyond what the offset allows), some are ignored, and many rows share a target.
    Gradients are within 1.05 of the error of fp32 logits with a 16-bit softmax − onehot.
    """
    from cce_kernels.options import Options
    from cce_kernels.runtime.tiles import aligned
    from cce_kernels.schemes import three_products

    g = torch.Generator().manual_seed(0)
    n_rows, vocab, rows = 300, 391, 128
    c = torch.randn(vocab, dim, generator=g) / dim**0.5
    targets = torch.randint(0, vocab, (n_rows,), generator=g)
    targets[torch.rand(n_rows, generator=g) < 0.3] = 5
    e = torch.randn(n_rows, dim, generator=g) + 8 * c[targets]
    e[40] *= 80
    e[-3] *= -60
    targets[[2, 131, -1]] = -1
    e, c, targets = aligned(e.to(device, BF16)), aligned(c.to(device, BF16)), targets.to(device)
    o = Options(accumulate=accumulate, **options)
    scale = torch.tensor(0.3, device=device)
    dtypes = (dtype, BF16 if main_grad else dtype, None)
    buffer = torch.randn(c.shape, generator=g).to(device) if main_grad else None
    before = None if buffer is None else buffer.clone()
    result, held, sums = three_products.forward(e, c, targets, rows, dtypes, True, o)
    three_products.backward(e, c, targets, scale, rows, held, sums, buffer, o)
    grad_e, grad_c = sums.grad_e.to(dtype), sums.grad_c.to(dtype)
    if buffer is not None and before is not None:
        grad_c = buffer - before

    e64, c64 = in_fp64(e, c)
    loss, truth_lse = reference_linear_cross_entropy(e64, c64, targets, ignore_index=-1, reduction="sum", **options)
    truth = gradients(0.3 * loss, (e64, c64))
    check_metrics(result.metrics, e64.detach(), c64.detach(), targets, o)
    assert error(result.lse, truth_lse) < 1e-5  # logits beyond a thousand
    plain = {**options, "z_loss": 0.0}
    of_rows, _ = reference_linear_cross_entropy(e64, c64, targets, ignore_index=-1, reduction="none", **plain)
    assert error(result.nll, of_rows) < 1e-5
    baseline = _rounded_gradients(e64, c64, targets, truth_lse.detach(), o)
    for got, base, want in zip((grad_e, grad_c), baseline, truth, strict=True):
        allowed = error((0.3 * base).to(got.dtype), want)
        assert torch.isfinite(got).all()
        assert error(got, want) <= 1.05 * allowed + 1e-7


# dtype of dE and dC, and whether dC is added to a buffer
APART = {"fp32": (FP32, FP32, False), "autocast": (BF16, FP32, False), "main_grad": (FP32, FP32, True)}


def check_targets_apart(device: str, dtype_e: torch.dtype, dtype_c: torch.dtype, main_grad: bool) -> None:
    """Four products for fp32 gradients on flat logits. The targets' entries, most of the gradient, are not rounded.

    dz's error is below a third of that of a 16-bit softmax − onehot, with ignored rows, several chunks and shared
    targets.
    """
    from cce_kernels.options import Options
    from cce_kernels.row_math import Operands, row_coefficients
    from cce_kernels.runtime.tiles import aligned
    from cce_kernels.schemes import four_products

    g = torch.Generator().manual_seed(0)
    n_rows, dim, vocab = 200, 72, 391
    targets = torch.randint(0, vocab, (n_rows,), generator=g)
    targets[torch.rand(n_rows, generator=g) < 0.3] = 5
    targets[[2, 131, -1]] = -1
    e, c = (aligned(torch.randn(n, dim, generator=g).to(device, BF16)) for n in (n_rows, vocab))
    e, targets = aligned(e * 0.05), targets.to(device)
    o = Options(z_loss=1e-3, logit_scale=1.2)
    e64, c64 = in_fp64(e, c)
    options = {"ignore_index": -1, "reduction": "sum", "z_loss": 1e-3, "logit_scale": 1.2}
    loss, lse = reference_linear_cross_entropy(e64, c64, targets, **options)
    truth = gradients(0.3 * loss, (e64, c64))
    a, b = row_coefficients(torch.tensor(0.3, device=device), None, lse.detach().float(), targets, o)
    buffer = torch.randn(vocab, dim, generator=g).to(device) if main_grad else None
    before = None if buffer is None else buffer.clone()
    operands = Operands(e, c, None, targets, lse.detach().float(), a, b)
    grad_e, grad_c, _ = four_products.gradients(
        operands, 256, o, (dtype_e, None if main_grad else dtype_c, None), buffer, None
    )
    if buffer is not None and before is not None:
        grad_c = buffer - before
    assert grad_e is not None
    assert grad_c is not None
    assert (grad_e.dtype, grad_c.dtype) == (dtype_e, dtype_c)
    baseline = _rounded_gradients(e64, c64, targets, lse.detach(), o)
    for got, base, want in zip((grad_e, grad_c), baseline, truth, strict=True):
        if got.dtype == FP32:
            assert error(got, want) <= error(0.3 * base, want) / 3
        else:  # one rounding of the whole
            assert error(got, want) <= 1.05 * error(want.to(got.dtype), want)


def check_metrics(metrics: Tensor, e: Tensor, c: Tensor, targets: Tensor, o: Any) -> None:
    """Accuracy and entropy of each row, from fp64 logits."""
    z = o.logit_scale * (e @ c.T)
    z = z if o.softcap is None else o.softcap * torch.tanh(z / o.softcap)
    p = torch.softmax(z, dim=1)
    at_target = targets.clamp(min=0)[:, None]
    ahead = z.gather(1, at_target).squeeze(1) - z.scatter(1, at_target, -torch.inf).amax(dim=1)
    clear = (targets >= 0) & (ahead.abs() > 1e-3)  # not for fp32's rounding to decide
    assert torch.equal(metrics[0][clear].bool(), ahead[clear] > 0)
    assert 0 < metrics[0][clear].mean() < 1
    entropy = torch.special.entr(p).sum(dim=1)
    torch.testing.assert_close(metrics[1].double(), entropy, rtol=1e-4, atol=1e-4)


def _rounded_gradients(e: Tensor, c: Tensor, targets: Tensor, lse: Tensor, o: Any) -> tuple[Tensor, Tensor]:
    """Gradients of the summed loss from exact logits and dL/dz rounded to bf16."""
    with torch.no_grad():
        z = o.logit_scale * (e @ c.T)
        slope = 1.0
        if o.softcap is not None:
            z = o.softcap * torch.tanh(z / o.softcap)
            slope = 1 - (z / o.softcap).square()
        dz = (1 + 2 * o.z_loss * lse)[:, None] * (z - lse[:, None]).exp()
        has_target = torch.nonzero(targets >= 0).squeeze(1)
        dz[has_target, targets[has_target]] -= 1
        dz *= slope
        dz[targets < 0] = 0
        dz = dz.to(BF16).double()
        return o.logit_scale * dz @ c, o.logit_scale * dz.T @ e


def check_stored_options(device: str, monkeypatch: pytest.MonkeyPatch, chunk: int = 512) -> None:
    """Through the public function, forced to store exponentials of two full chunks of rows and a short one.

    Options: gradients of only e or only c, main_grad, statistics.
    """
    from cce_kernels.backends import with_triton
    from cce_kernels.planner import Plan

    monkeypatch.setattr(with_triton, "plan", lambda *_: Plan(rows=chunk, columns=256))
    e, c, targets, _ = draw(Case("stored", shape=(2 * chunk + 6,), dim=64, vocab=500, dtype=BF16, peak=3), device)

    def loss(e: Tensor, c: Tensor, **options: Any) -> Tensor:
        return linear_cross_entropy(e, c, targets, **options)

    both = gradients(loss(e, c), (e, c))
    (alone_e,), (alone_c,) = gradients(loss(e, c.detach()), (e,)), gradients(loss(e.detach(), c), (c,))
    assert torch.equal(alone_e, both[0])
    assert torch.equal(alone_c, both[1])
    buffer = torch.zeros(c.shape, device=device)
    loss(e, c, main_grad_c=buffer).backward()
    assert c.grad is None
    assert torch.equal(buffer.to(BF16), both[1])
    with_stats, stats = loss(e, c, return_stats=True)
    gradients(with_stats, (e, c))
    assert [value.item() for value in stats.values()] == [1, 0, 0, 0, 1]  # nothing was dropped
    e.grad = None


def check_one_chunk(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk of rows writes both gradients once. Products one after the other lend scaled e and the parts of w C the
    gradients' memory: the bits are those of products side by side, and the errors those of bf16."""
    from cce_kernels import planner
    from cce_kernels.backends import with_triton
    from cce_kernels.schemes import last_chunk

    monkeypatch.setattr(with_triton, "plan", lambda *_: planner.Plan(rows=128, columns=256))
    e, c, targets, _ = draw(Case("one chunk", shape=(100,), dim=128, vocab=700, dtype=BF16, peak=3), device)
    wide = in_fp64(e, c)
    truth = gradients(reference_linear_cross_entropy(*wide, targets)[0], wide)
    beside = {1: [], 3: []}  # gradients of products side by side, by splits
    for splits, found in beside.items():
        monkeypatch.setattr(last_chunk, "splits_alone", lambda *_: 0)
        monkeypatch.setattr(last_chunk, "splits_beside", lambda *_, splits=splits: splits)
        found += gradients(linear_cross_entropy(e, c, targets), (e, c))
    for splits, lends in ((1, True), (3, True), (3, False)):
        monkeypatch.setattr(last_chunk, "splits_alone", lambda *_, splits=splits: splits)
        monkeypatch.setattr(last_chunk, "fits_vocab", lambda *_, lends=lends: lends)
        alone = gradients(linear_cross_entropy(e, c, targets), (e, c))
        for lent, own, true in zip(alone, beside[splits], truth, strict=True):
            assert torch.equal(lent, own)
            assert error(lent, true) < 3e-3


# share of ignored rows, rows of a chunk, parts of w C, options
SKIPPED_ROWS = {
    "half": (0.5, 512, 1, {"return_metrics": True}),
    "half_in_parts": (0.5, 512, 2, {"z_loss": 1e-2}),
    "half_side_by_side": (0.5, 512, 0, {}),
    "half_in_chunks": (0.5, 128, 1, {"softcap": 9.0}),
    "none": (0.0, 128, 1, {}),
    "all": (1.0, 512, 1, {}),
    "all_but_few": (0.98, 128, 1, {"reduction": "sum", "label_smoothing": 0.1}),
    "row_losses": (0.7, 512, 1, {"reduction": "none", "token_weights": True}),
    "main_grad": (0.4, 128, 1, {"main_grad_c": True}),
    "compiled": (0.5, 128, 1, {"compiled": True}),
}


def check_skipped_rows(
    device: str, monkeypatch: pytest.MonkeyPatch, share: float, rows: int, splits: int, options: dict[str, Any]
) -> None:
    """Ignored rows are left out of the products: losses and gradients are those of all rows, and repeat bit for bit."""
    from cce_kernels import planner
    from cce_kernels.backends import with_triton
    from cce_kernels.schemes import last_chunk

    monkeypatch.setattr(with_triton, "plan", lambda *_: planner.Plan(rows=rows, columns=256))
    monkeypatch.setattr(last_chunk, "splits_alone", lambda *_: splits)
    dim = 72 if rows == 128 else 128  # rows that straddle lines of 128 bytes, too
    e, c, targets, _ = draw(Case("skipped", shape=(300,), dim=dim, vocab=700, dtype=BF16, peak=3), device)
    g = torch.Generator().manual_seed(1)
    targets[(torch.rand(300, generator=g) < share).to(device)] = -100
    weights = torch.rand(300, generator=g).to(device) if options.get("token_weights") else None
    buffer = bool(options.get("main_grad_c"))
    upstream = torch.rand(300, generator=g).to(device) if options.get("reduction") == "none" else 1.0
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    function = compiled if options.get("compiled") else linear_cross_entropy
    options = {k: v for k, v in options.items() if k not in ("token_weights", "main_grad_c", "compiled")}

    def results(least: int) -> list[Tensor]:
        torch._dynamo.reset()  # a compiled graph would keep the other decision
        monkeypatch.setattr(planner, "LEAST_SKIPPED", least)
        main = torch.zeros(c.shape, device=device) if buffer else None
        found = function(e, c, targets, main_grad_c=main, token_weights=weights, **options)
        loss, *metrics = found if isinstance(found, tuple) else (found,)
        grads = torch.autograd.grad((loss * upstream).sum(), [e] if buffer else [e, c], allow_unused=True)
        return [loss, *grads, *([] if main is None else [main]), *(x for found in metrics for x in found.values())]

    skipped, again, every = results(0), results(0), results(2**60)
    for x, same, whole in zip(skipped, again, every, strict=True):
        assert torch.equal(x, same)
        assert torch.isfinite(x).all()
        assert error(x, whole.double()) < (1e-6 if x.numel() < 1000 else 3e-3)
    ignored = targets == -100
    assert not skipped[1][ignored].any()


DEFAULTED = {
    "plain": {"z_loss": 1e-2, "return_metrics": True},
    "sum": {"reduction": "sum", "label_smoothing": 0.1},
    "threshold": {"filter_eps": 1.1e-3},
    "softcap": {"filter_eps": 1.1e-3, "softcap": 9.0},
    "unbiased": {"filter_eps": 1.1e-3, "filter_unbiased": True, "filter_mass": 0.9},
}


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


def check_offloaded(function: Any, device: str, **options: Any) -> None:
    """Hooks that offload saved tensors hand back contiguous copies, which changes no bit of loss and gradients."""
    e, c, targets, _ = draw(Case("offloaded", shape=(40,), dim=12, vocab=70, dtype=BF16), device)

    def results() -> list[Tensor]:
        loss = function(e, c, targets, **options)
        return [loss.detach(), *gradients(loss, (e, c))]

    want = results()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.cpu().contiguous(), lambda x: x.to(device)):
        got = results()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
