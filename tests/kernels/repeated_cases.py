"""Calls that repeat an earlier one from its program: the same bits as a call that runs as usual."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cases import BF16, FP32, IGNORE
from cce_kernels import linear_cross_entropy
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Repeated:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    rows: int = 384  # per chunk of three products, of 200 rows; 0: four products
    forward: bool = True  # whether forward and backward pass are repeatable
    backward: bool = True
    weights: bool = False
    main_grad: bool = False
    bias: bool = False
    of: tuple[bool, bool] = (True, True)  # whether e and c get gradients
    vocab: int = 400
    dim: int = 64
    dtype: torch.dtype = BF16  # of c
    autocast: bool = False

    def __str__(self) -> str:
        return self.name


REPEATED = [
    Repeated("one chunk"),
    Repeated("chunks", rows=128),
    Repeated("an odd vocabulary", vocab=399),
    Repeated("sum", {"reduction": "sum"}),
    Repeated("z_loss", {"z_loss": 1e-3}, forward=False, backward=False),
    Repeated("row losses", {"reduction": "none"}, backward=False),
    Repeated("lse", {"return_lse": True}),
    Repeated("weights, chunks", rows=128, weights=True),
    Repeated("main_grad, chunks", rows=128, main_grad=True),
    Repeated("bias", bias=True, backward=False),
    Repeated("softcap, chunks", {"softcap": 30.0}, rows=128),
    Repeated("fp32 sums, chunks", {"accumulate": "fp32"}, rows=128),
    Repeated("metrics", {"return_metrics": True}, forward=False, backward=False),
    Repeated("smoothed", {"label_smoothing": 0.1}, forward=False, backward=False),
    Repeated("statistics", {"return_stats": True}),
    Repeated("only e", of=(True, False)),
    Repeated("only c, chunks", rows=128, of=(False, True)),
    Repeated("padded rows", dim=60),
    Repeated("fp32 weights under autocast, chunks", rows=128, dtype=FP32, autocast=True),
    Repeated("padded fp32 weights under autocast", dim=40, dtype=FP32, autocast=True),
    Repeated("four products", rows=0, backward=False),
]


def check_repeated(device: str, monkeypatch: pytest.MonkeyPatch, case: Repeated) -> None:
    """Six calls with new values, and in turns with new addresses. The third forward pass is a repetition, and the
    fourth backward pass. The last loss has a second backward pass, which recomputes the logits."""
    from cce_kernels.backends import with_triton
    from cce_kernels.planner import Plan
    from cce_kernels.runtime import program

    monkeypatch.setattr(program, "MOST_TRIES", 6)  # a kernel's compilation spoils a recording
    monkeypatch.setattr(with_triton, "plan", lambda *_: Plan(rows=case.rows, columns=256))
    runs = count_runs(monkeypatch)
    counts = []
    held = []  # so that other addresses are given out
    for step in range(6):
        inputs = drawn(case, step, device)
        held += inputs[:1] if step % 2 else []
        before = len(runs)
        upstream = -0.5 if step % 3 else 1.0
        found = call(case, *inputs, upstream, again=step == 5)
        counts.append(len(runs) - before)
        with monkeypatch.context() as patched:
            patched.setattr(program, "watched", lambda: True)  # every pass runs as usual
            usual = call(case, *inputs, upstream, again=step == 5)
        assert len(runs) - before == counts[-1]
        assert len(found) == len(usual)
        for one, other in zip(found, usual, strict=True):
            assert torch.equal(one, other), f"step {step}"
    assert counts[:2] == [0, 0]
    assert counts[-1] == case.forward + case.backward


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each run of a program."""
    from cce_kernels.runtime.program import Program

    runs: list[int] = []
    run = Program.run

    def counted(*args: Any) -> Any:
        runs.append(1)
        return run(*args)

    monkeypatch.setattr(Program, "run", counted)
    return runs


def drawn(case: Repeated, seed: int, device: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    e, c = torch.randn(200, case.dim, generator=g), torch.randn(case.vocab, case.dim, generator=g) / 4
    targets = torch.randint(0, case.vocab, (200,), generator=g)
    targets[::5] = IGNORE
    extras = {}
    if case.weights:
        extras["token_weights"] = torch.rand(200, generator=g).to(device)
    if case.main_grad:
        extras["main_grad_c"] = torch.randn(case.vocab, case.dim, generator=g).to(device)
    if case.bias:
        extras["bias"] = torch.randn(case.vocab, generator=g).to(device, BF16).requires_grad_()
    e, c = e.to(device, BF16).requires_grad_(case.of[0]), c.to(device, case.dtype).requires_grad_(case.of[1])
    return e, c, targets.to(device), extras


def call(
    case: Repeated, e: Tensor, c: Tensor, targets: Tensor, extras: dict[str, Tensor], upstream: float, again: bool
) -> list[Tensor]:
    """Loss, other results and gradients; with `again` those of a second backward pass, too."""
    extras = dict(extras)
    if case.main_grad:
        extras["main_grad_c"] = extras["main_grad_c"].clone()
    with torch.autocast(e.device.type, BF16, enabled=case.autocast):
        found = linear_cross_entropy(e, c, targets, **extras, **case.options)
    loss, *others = found if isinstance(found, tuple) else (found,)
    leaves = [x for x in (e, c, extras.get("bias")) if x is not None and x.requires_grad]
    results = [loss.detach()]
    for retain in (True, False) if again else (False,):
        (loss.sum() * upstream).backward(retain_graph=retain)
        results += [x.grad for x in leaves if x.grad is not None]
        for x in leaves:
            x.grad = None
    results += [x.detach() for x in others if isinstance(x, Tensor)]
    results += [value for x in others if isinstance(x, dict) for value in x.values()]
    return results + ([extras["main_grad_c"]] if case.main_grad else [])


def check_hooks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks of saved tensors: offloading, and checkpointing, which compares what two forward passes have saved."""
    from cce_kernels.backends import with_triton
    from cce_kernels.planner import Plan
    from cce_kernels.runtime import program

    case = Repeated("hooks")
    monkeypatch.setattr(program, "MOST_TRIES", 6)
    monkeypatch.setattr(with_triton, "plan", lambda *_: Plan(rows=384, columns=256))
    runs = count_runs(monkeypatch)

    def step(seed: int, how: str) -> list[Tensor]:
        e, c, targets, _ = drawn(case, seed, device)
        wide = torch.cat((e.detach(), e.detach()), dim=1).requires_grad_()
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.contiguous().clone())

        def loss() -> Tensor:
            return linear_cross_entropy(wide[:, :64], c, targets)

        with hooks if how == "copied" else nullcontext():
            found = checkpoint(loss, use_reentrant=False) if how == "checkpointed" else loss()
        return [found.detach(), *torch.autograd.grad(found, (wide, c))]

    for seed in range(9):
        before = len(runs)
        found = step(seed, ("copied", "plain", "checkpointed")[seed % 3])
        repeated = len(runs) - before
        with monkeypatch.context() as patched:
            patched.setattr(program, "watched", lambda: True)
            usual = step(seed, "plain")
        assert all(torch.equal(one, other) for one, other in zip(found, usual, strict=True)), seed
        assert bool(repeated) == (seed == 7), "the third plain call"


def check_changed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss may be changed in place: loss /= steps. That a forward pass is repeated must not forbid this.

    A repeated pass with gradients allocates five times: loss, exponentials, both gradients and all small tensors.
    """
    from cce_kernels.backends import with_triton
    from cce_kernels.planner import Plan
    from cce_kernels.runtime import program

    case = Repeated("changed")
    monkeypatch.setattr(program, "MOST_TRIES", 6)
    monkeypatch.setattr(with_triton, "plan", lambda *_: Plan(rows=384, columns=256))
    made: list[int] = []
    run = program.Program.run

    def counted(*args: Any) -> Any:
        found = run(*args)
        made.append(len(found))
        return found

    monkeypatch.setattr(program.Program, "run", counted)
    e, c, targets, _ = drawn(case, 0, device)
    expected = None
    for _ in range(7):
        loss = linear_cross_entropy(e, c, targets)
        loss /= 4
        found = torch.autograd.grad(loss, (e, c))
        expected = expected or found
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert made[-2:] == [5, 0]


def check_evaluation(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass alone, in fp32, and then with gradients: two kinds of calls."""
    from cce_kernels.runtime import program

    monkeypatch.setattr(program, "MOST_TRIES", 6)
    runs = count_runs(monkeypatch)
    g = torch.Generator().manual_seed(0)
    e, c = (torch.randn(n, 32, generator=g).to(device, FP32) for n in (40, 90))
    targets = torch.randint(0, 90, (40,), generator=g).to(device)
    losses = [linear_cross_entropy(e, c, targets) for _ in range(5)]
    assert all(torch.equal(losses[0], loss) for loss in losses)
    assert len(runs) >= 1
    assert linear_cross_entropy(e.requires_grad_(), c, targets).requires_grad
