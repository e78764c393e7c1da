"""Options of a call that takes three products: every one against fp64, with no logit computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cases import BF16, FP32, IGNORE, error, gradients, in_fp64
from cce_kernels import linear_cross_entropy, reference, reference_linear_cross_entropy
from torch import Tensor

HUGE = [40, -3]  # rows with large hidden states


@dataclass(frozen=True)
class Stored:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = BF16  # of the gradients
    lse: bool = False  # whether log-sum-exps get gradients
    rows: int = 384  # per chunk, of 300
    main_grad: bool = False
    weights: bool = False  # token_weights
    bias: bool = False
    dim: int = 40

    def __str__(self) -> str:
        return self.name


STORED_OPTIONS = [
    Stored("row_losses", {"reduction": "none"}),
    Stored("row_losses-fp32", {"reduction": "none", "z_loss": 1e-3}, FP32),
    Stored("row_losses-main_grad", {"reduction": "none"}, main_grad=True),
    Stored("lse", {"reduction": "sum"}, lse=True),
    Stored("row_losses-lse", {"reduction": "none", "z_loss": 1e-3, "logit_scale": 1.4}, lse=True),
    Stored("row_losses-lse-softcap", {"reduction": "none", "softcap": 30.0}, lse=True),
    Stored("smoothed", {"label_smoothing": 0.1}),
    Stored("smoothed-chunks", {"label_smoothing": 0.1, "reduction": "sum"}, rows=128),
    Stored("smoothed-chunks-fp32", {"label_smoothing": 0.3}, FP32, rows=128),
    Stored("smoothed-main_grad", {"label_smoothing": 1.0, "logit_scale": 0.5}, rows=128, main_grad=True),
    Stored("smoothed-row_losses-lse", {"label_smoothing": 0.1, "reduction": "none", "logit_scale": 1.4}, lse=True),
    Stored("weights", weights=True),
    Stored("weights-chunks-fp32", {"reduction": "sum", "z_loss": 1e-3}, FP32, rows=128, weights=True),
    Stored("weights-main_grad-softcap", {"softcap": 30.0}, rows=128, main_grad=True, weights=True),
    Stored("weights-smoothed-chunks", {"label_smoothing": 0.3}, rows=128, weights=True),
    Stored("weights-row_losses-lse", {"label_smoothing": 0.1, "reduction": "none"}, lse=True, weights=True),
    Stored("bias", {"z_loss": 1e-3}, bias=True),
    Stored("bias-chunks-fp32", {"reduction": "sum", "logit_scale": 1.4}, FP32, rows=128, bias=True, weights=True),
    Stored("bias-softcap-main_grad", {"softcap": 30.0}, rows=128, main_grad=True, bias=True),
    Stored("bias-smoothed-chunks", {"label_smoothing": 0.3, "logit_scale": 0.5}, rows=128, bias=True),
    Stored("bias-row_losses-lse", {"reduction": "none", "z_loss": 1e-3}, lse=True, bias=True),
    Stored("bias-smoothed-row_losses", {"label_smoothing": 0.1, "reduction": "none"}, FP32, bias=True, weights=True),
    Stored("upright_tiles", dim=264),
    Stored("upright_tiles-bias-chunks-main_grad", rows=128, main_grad=True, bias=True, dim=264),
    Stored("shallow_tiles", dim=512),
]


@contextmanager
def three_products(rows: int) -> Iterator[None]:
    """The planner chooses three products in chunks of `rows`, and no backward pass may take four."""
    from cce_kernels.backends import with_triton
    from cce_kernels.planner import Plan

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(with_triton, "plan", lambda *_: Plan(rows=rows, columns=256))
        monkeypatch.setattr(with_triton, "backward", None)
        yield


@contextmanager
def rounded_logit_gradients() -> Iterator[None]:
    """The reference rounds dL/dlogits to bf16."""
    exact = reference._logits

    def logits(*inputs: Any) -> Tensor:
        z = exact(*inputs)
        if z.requires_grad:
            z.register_hook(lambda grad: grad.to(BF16).double())
        return z

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(reference, "_logits", logits)
        yield


def draw(case: Stored, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """e, c and targets. Some rows have a huge loss, some are ignored, and many share a target."""
    g = torch.Generator().manual_seed(0)
    n_rows, dim, vocab = 300, case.dim, 391
    c = torch.randn(vocab, dim, generator=g) / dim**0.5
    targets = torch.randint(0, vocab, (n_rows,), generator=g)
    targets[torch.rand(n_rows, generator=g) < 0.3] = 5
    e = torch.randn(n_rows, dim, generator=g) + 8 * c[targets]
    e[HUGE] *= torch.tensor([[80.0], [-60.0]])
    targets[[2, 131, -1]] = IGNORE
    e, c = (x.to(BF16).to(device, case.dtype).requires_grad_() for x in (e, c))
    return e, c, targets.to(device)


def bias_of(case: Stored, device: str) -> Tensor | None:
    """The bias of a case. Two of its entries nearly rule out tokens that are no target."""
    if not case.bias:
        return None
    bias = torch.randn(391, generator=torch.Generator().manual_seed(4))
    bias[[3, 380]] = -300.0
    return bias.to(BF16).to(device, case.dtype).requires_grad_()


def weights_of(case: Stored, targets: Tensor) -> dict[str, Tensor]:
    """The option token_weights. Those of ignored targets are NaN."""
    if not case.weights:
        return {}
    weights = torch.rand(len(targets), generator=torch.Generator().manual_seed(2)) + 0.1
    if case.options.get("reduction") in ("sum", "none"):
        weights[::2] *= -1
    weights[HUGE] = 1  # as in `upstream`
    return {"token_weights": weights.to(targets.device).masked_fill_(targets == IGNORE, torch.nan)}


def upstream(case: Stored, device: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of loss and LSE, with another gradient for each row."""
    g = torch.Generator().manual_seed(1)
    of_rows, of_lse = torch.randn(2, 300, generator=g)
    of_rows[HUGE], of_lse[HUGE] = 1, -0.5  # else the rounding of two numbers would decide dC's error
    of_rows, of_lse = of_rows.to(device), of_lse.to(device)

    def total(loss: Tensor, lse: Tensor) -> Tensor:
        whole = (loss * of_rows).sum() if loss.dim() else 0.3 * loss
        return whole + (lse * of_lse).sum() if case.lse else whole

    return total


def check(case: Stored, device: str) -> None:
    """Loss and gradients of all inputs.

    Gradients are within 1.05 of the error of exact logits whose gradient is rounded to bf16.
    """
    e, c, targets = draw(case, device)
    total = upstream(case, device)
    bias = bias_of(case, device)
    if bias is not None:
        targets = targets.masked_fill((targets == 3) | (targets == 380), 5)
    wide = in_fp64(e, c, bias)
    options = case.options | weights_of(case, targets)
    truth, truth_lse = reference_linear_cross_entropy(*wide[:2], targets, bias=wide[2], **options)
    want = gradients(total(truth, truth_lse), wide)
    with rounded_logit_gradients():
        found = reference_linear_cross_entropy(*wide[:2], targets, bias=wide[2], **options)
        rounded = gradients(total(*found), wide)
    buffer = torch.zeros(c.shape, device=device) if case.main_grad else None
    with three_products(case.rows):
        with torch.autocast(e.device.type, BF16):
            found = linear_cross_entropy(
                e, c, targets, bias=bias, return_lse=case.lse, main_grad_c=buffer, **options
            )  # fmt: skip
        loss, lse = found if case.lse else (found, truth_lse)
        total(loss, lse).backward()
    assert error(loss, truth) < 1e-5
    assert error(lse, truth_lse) < 1e-5
    grads = [e.grad, c.grad if buffer is None else buffer, *([] if bias is None else [bias.grad])]
    for got, base, true in zip(grads, rounded, want, strict=True):
        assert torch.isfinite(got).all()
        assert error(got, true) <= 1.05 * error(base.to(got.dtype), true) + 1e-7
