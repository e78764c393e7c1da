"""A call that takes three products, with no logit computed again; other files try their own results on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cases import BF16, IGNORE
from torch import Tensor

HUGE = [40, -3]  # rows with large hidden states


@dataclass(frozen=True)
class Stored:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = BF16  # of the gradients
    lse: bool = False  # whether log-sum-exps get gradients
    metrics: bool = False
    rows: int = 384  # per chunk, of 300
    main_grad: bool = False
    weights: bool = False  # token_weights
    bias: bool = False
    dim: int = 40

    def __str__(self) -> str:
        return self.name


@contextmanager
def three_products(rows: int) -> Iterator[None]:
    """The planner chooses three products in chunks of `rows`, and no backward pass may take four. 0: its own choice."""
    if not rows:
        yield
        return
    from cce_kernels.backends import with_triton
    from cce_kernels.planner import Plan

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(with_triton, "plan", lambda *_: Plan(rows=rows, columns=256))
        monkeypatch.setattr(with_triton, "backward", None)
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
