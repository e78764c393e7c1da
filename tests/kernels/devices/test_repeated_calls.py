"""Calls that repeat an earlier one from its program, without its Python: the same bits as a call that runs as usual.

In Triton's interpreter, and on a GPU, launched one by one and from a CUDA graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from cases import BF16, FP32, IGNORE
from cce_kernels import linear_cross_entropy
from everywhere import devices_with, kernels
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Repeated:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    rows: int = 128  # per chunk of three products, of 70 rows; 0: four products
    forward: bool = True  # whether forward and backward pass are repeatable
    backward: bool = True
    weights: bool = False
    main_grad: bool = False
    bias: bool = False
    of: tuple[bool, bool] = (True, True)  # whether e and c get gradients
    vocab: int = 200
    dim: int = 64
    dtype: torch.dtype = BF16  # of c
    autocast: bool = False

    def __str__(self) -> str:
        return self.name


REPEATED = [
    Repeated("one chunk"),
    Repeated("chunks", rows=64),
    Repeated("an odd vocabulary", vocab=199),
    Repeated("sum", {"reduction": "sum"}),
    Repeated("z_loss", {"z_loss": 1e-3}, forward=False, backward=False),
    Repeated("row losses", {"reduction": "none"}, backward=False),
    Repeated("lse", {"return_lse": True}),
    Repeated("weights, main_grad, chunks", rows=64, weights=True, main_grad=True),
    Repeated("bias", bias=True, backward=False),
    Repeated("softcap, chunks", {"softcap": 30.0}, rows=64),
    Repeated("fp32 sums, chunks", {"accumulate": "fp32"}, rows=64),
    Repeated("metrics", {"return_metrics": True}, forward=False, backward=False),
    Repeated("smoothed", {"label_smoothing": 0.1}, forward=False, backward=False),
    Repeated("statistics", {"return_stats": True}),
    Repeated("only e", of=(True, False)),
    Repeated("only c, chunks", rows=64, of=(False, True)),
    Repeated("padded rows", dim=60),
    Repeated("fp32 weights under autocast, chunks", rows=64, dtype=FP32, autocast=True),
    Repeated("padded fp32 weights under autocast", dim=40, dtype=FP32, autocast=True),
    Repeated("four products", rows=0, backward=False),
]


class OpenInInterpreter(NamedTuple):
    """What `launch.Open` is to a GPU: a launch whose addresses are open."""

    run: Any
    grid: tuple[int, ...]
    args: tuple
    options: dict[str, Any]
    spots: tuple[tuple[int, torch.dtype, torch.Size, tuple[int, ...]], ...]  # index, and what lies at the address

    def at(self, addresses: list[int]) -> tuple[Any, tuple, tuple]:
        """The launch with these addresses, one for each spot: a function of (*grid, stream, *rest), grid and rest."""
        args = list(self.args)
        for (index, dtype, shape, stride), address in zip(self.spots, addresses, strict=True):
            extent = (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))) * dtype.itemsize
            there = torch.frombuffer((ctypes.c_char * extent).from_address(address), dtype=dtype)
            args[index] = described(args[index], there.as_strided(shape, stride))

        def launch(*values: Any) -> None:
            self.run(*values[len(self.grid) + 1 :], grid=self.grid, **self.options)

        return launch, self.grid, tuple(args)


def described(x: Any, base: Any) -> Any:
    """A copy of descriptor x with another tensor; the tensor itself where x is None."""
    if x is None:
        return base
    x = copy(x)
    x.base = base
    return x


def record_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on tapes hear of the interpreter's launches, which it does not compile."""
    from cce_kernels.runtime.launch import RECORDING
    from triton.runtime.interpreter import InterpretedFunction

    own = InterpretedFunction.run

    def run(self: Any, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        if RECORDING.tape is not None:
            of_args = [(i, x if isinstance(x, Tensor) else getattr(x, "base", None)) for i, x in enumerate(args)]
            tensors = [(i, x) for i, x in of_args if x is not None]
            without = [
                None if x is args[i] else described(args[i], None) if x is not None else args[i] for i, x in of_args
            ]
            spots = tuple((i, x.dtype, x.shape, x.stride()) for i, x in tensors)
            opened = OpenInInterpreter(own.__get__(self), grid, tuple(without), options, spots)
            RECORDING.tape.add((opened, [x for _, x in tensors]))
        with _disable_current_modes():  # the interpreter copies tensors with operators of torch
            own(self, *args, grid=grid, **options)

    monkeypatch.setattr(InterpretedFunction, "run", run)


def begun(device: str, monkeypatch: pytest.MonkeyPatch, rows: int | None = 128) -> list[int]:
    """A list that grows with each run of a program, once calls are repeated. rows: per chunk of three products."""
    from cce_kernels.backends import with_triton
    from cce_kernels.planner import Plan
    from cce_kernels.runtime import program

    if device == "cpu":
        record_interpreted(monkeypatch)
    monkeypatch.setattr(program, "MOST_TRIES", 6)  # a kernel's compilation spoils a recording
    if rows is not None:
        monkeypatch.setattr(with_triton, "plan", lambda *_: Plan(rows=rows, columns=256))
    runs: list[int] = []
    run = program.Program.run

    def counted(*args: Any) -> Any:
        found = run(*args)
        runs.append(len(found))
        return found

    monkeypatch.setattr(program.Program, "run", counted)
    return runs


@contextmanager
def as_usual() -> Iterator[None]:
    """Every pass runs as usual."""
    from cce_kernels.runtime import program

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(program, "watched", lambda: True)
        yield


INTERPRETED = ("weights, main_grad, chunks", "bias", "only e", "metrics", "padded fp32 weights under autocast",
               "four products")  # fmt: skip


@devices_with("case", [], [case for case in REPEATED if case.name in INTERPRETED], on_gpu=REPEATED)
def test_a_repeated_call_gives_the_bits_of_a_usual_one(case, device, monkeypatch):
    """Six calls with new values, and in turns with new addresses. The third forward pass is a repetition, and the
    fourth backward pass. The last loss has a second backward pass, which recomputes the logits."""
    runs = begun(device, monkeypatch, case.rows)
    counts = []
    held = []  # so that other addresses are given out
    for step in range(6):
        inputs = drawn(case, step, device)
        held += inputs[:1] if step % 2 else []
        before = len(runs)
        upstream = -0.5 if step % 3 else 1.0
        found = call(case, *inputs, upstream, again=step == 5)
        counts.append(len(runs) - before)
        if step < 2:  # ran as usual
            continue
        with as_usual():
            usual = call(case, *inputs, upstream, again=step == 5)
        assert len(runs) - before == counts[-1]
        assert len(found) == len(usual)
        for one, other in zip(found, usual, strict=True):
            assert torch.equal(one, other), f"step {step}"
    assert counts[:2] == [0, 0]
    assert counts[-1] == case.forward + case.backward


def drawn(case: Repeated, seed: int, device: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    e, c = torch.randn(70, case.dim, generator=g), torch.randn(case.vocab, case.dim, generator=g) / 4
    targets = torch.randint(0, case.vocab, (70,), generator=g)
    targets[::5] = IGNORE
    extras = {}
    if case.weights:
        extras["token_weights"] = torch.rand(70, generator=g).to(device)
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


@kernels
def test_hooks_of_saved_tensors_see_usual_calls(device, monkeypatch):
    """Offloading, and checkpointing, which compares what two forward passes have saved."""
    case, runs = Repeated("hooks"), begun(device, monkeypatch)

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
        with as_usual():
            usual = step(seed, "plain")
        assert all(torch.equal(one, other) for one, other in zip(found, usual, strict=True)), seed
        assert bool(repeated) == (seed == 7), "the third plain call"


@kernels
def test_a_loss_may_be_changed_in_place(device, monkeypatch):
    """loss /= steps. That a forward pass is repeated must not forbid this.

    A repeated pass with gradients allocates five times: loss, exponentials, both gradients and all small tensors.
    """
    runs = begun(device, monkeypatch)
    e, c, targets, _ = drawn(Repeated("changed"), 0, device)
    expected = None
    for _ in range(7):
        loss = linear_cross_entropy(e, c, targets)
        loss /= 4
        found = torch.autograd.grad(loss, (e, c))
        expected = expected or found
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert runs[-2:] == [5, 0]


@kernels
def test_evaluation_and_training_are_two_kinds_of_calls(device, monkeypatch):
    runs = begun(device, monkeypatch, rows=None)
    g = torch.Generator().manual_seed(0)
    e, c = (torch.randn(n, 32, generator=g).to(device, FP32) for n in (40, 90))
    targets = torch.randint(0, 90, (40,), generator=g).to(device)
    losses = [linear_cross_entropy(e, c, targets) for _ in range(5)]
    assert all(torch.equal(losses[0], loss) for loss in losses)
    assert len(runs) >= 1
    assert linear_cross_entropy(e.requires_grad_(), c, targets).requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 512, 50304), (16384, 256, 32000), (512, 1024, 32001)])
def test_a_call_at_full_size_takes_no_more_memory_and_gives_the_same_bits(shape, monkeypatch):
    n_rows, dim, vocab = shape
    e = torch.randn(n_rows, dim, dtype=torch.bfloat16, device="cuda").requires_grad_()
    c = (torch.randn(vocab, dim, dtype=torch.bfloat16, device="cuda") / dim**0.5).requires_grad_()
    targets = torch.randint(0, vocab, (n_rows,), device="cuda")

    def step() -> tuple[list[Tensor], int]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = linear_cross_entropy(e, c, targets)
        found = [loss.detach(), *torch.autograd.grad(loss, (e, c))]
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        return [x.cpu() for x in found], peak

    usual, peak = [step() for _ in range(3)][-1]
    runs = begun("cuda", monkeypatch, rows=None)
    steps = [step() for _ in range(7)]
    assert len(runs) > 5
    for found, peak_again in steps[-2:]:
        assert all(torch.equal(one, other) for one, other in zip(found, usual, strict=True))
        assert peak_again <= peak + 2**20


@pytest.mark.gpu
def test_a_cuda_graph_captures_repeated_calls(monkeypatch):
    runs = begun("cuda", monkeypatch, rows=None)
    # Large enough for three products: of four products the forward pass alone is repeated.
    e = torch.randn(1024, 512, dtype=torch.bfloat16, device="cuda").requires_grad_()
    c = (torch.randn(50304, 512, dtype=torch.bfloat16, device="cuda") / 16).requires_grad_()
    targets = torch.randint(0, 50304, (1024,), device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(7):
            expected = torch.autograd.grad(linear_cross_entropy(e, c, targets), (e, c))
    torch.cuda.current_stream().wait_stream(side)
    graph, before = torch.cuda.CUDAGraph(), len(runs)
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(linear_cross_entropy(e, c, targets), (e, c))
    assert len(runs) == before + 2
    for x in captured:
        x.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(captured, expected, strict=True))
