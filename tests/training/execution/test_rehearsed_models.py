"""A rehearsal suits every model: new memory holds zeros, nothing of the run changes, and an error does not end the run.

A stand-in for a GPU notes which kernels Triton is asked to compile. Tensors stay on the CPU.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from fitting import fitted
from rank_process import curve
from torch import Tensor
from triton.backends.compiler import GPUTarget

from linrnn.config import load_config
from linrnn.core.errors import OutOfMemoryError, UnsupportedError
from linrnn.models import cpu_ops, tuning
from linrnn.runs.directory import LOG
from linrnn.training.execution import compilation
from linrnn.training.trainer import Trainer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
FAILED = "the step compiles its kernels one by one: compiling ahead failed"
# A few: tests/training/pairs has all of FLA's on a GPU. In nsa 16 queries share a key.
NO_CPU_FORM = {"rwkv7": {}, "nsa": {"num_heads": 16, "num_kv_heads": 1, "head_dim": 16, "window_size": 0}}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """From the call on, Triton sees a GPU. The returned list receives the names of the kernels to be compiled."""

    def begin() -> list[str]:
        names: list[str] = []
        target = GPUTarget("cuda", 90, 32)
        answers = {"get_current_target": target, "get_current_device": 0, "get_current_stream": 0}
        driver = SimpleNamespace(**{name: lambda *_, answer=answer: answer for name, answer in answers.items()})
        monkeypatch.setattr(triton.runtime.driver, "_active", driver)
        noted = "linrnn.models.tuning.compilation._compile"
        monkeypatch.setattr(noted, lambda kernels, threads: names.extend(kernel.__name__ for kernel, _ in kernels))
        return names

    return begin


def rehearse(run: Trainer) -> None:
    compilation.rehearse(run.replica, next(run.loader), run.ranks, run.precision, run.device)


def tensors(run: Trainer) -> dict[str, Tensor]:
    return {**dict(run.model.named_parameters()), **dict(run.model.named_buffers())}


@pytest.mark.parametrize("name", NO_CPU_FORM)
def test_a_model_without_a_cpu_form_is_rehearsed_and_nothing_changes(name, small, asked, monkeypatch):
    monkeypatch.setattr(cpu_ops, "check_model", lambda kind: None)
    more = [f"model.options.{key}={value}" for key, value in NO_CPU_FORM[name].items()]
    more += ["trainer.precision=bf16", "trainer.kernel_choices=first"]
    run = Trainer(load_config(small("model=fla", f"model.config={name}", *more)))
    run.ensure_weights()
    before = {key: value.clone() for key, value in tensors(run).items()}
    random = torch.get_rng_state()
    names = asked()
    with tuning.compile_ahead(1):
        rehearse(run)
    assert any("bwd" in kernel for kernel in names), names
    assert all(torch.equal(value, before[key]) for key, value in tensors(run).items())
    assert tensors(run).keys() == before.keys()
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in run.parameters)


def test_buffers_that_a_forward_pass_changes_keep_their_values(small):
    run = Trainer(load_config(small("trainer.precision=fp32")))
    block = run.model.blocks[0]
    block.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    block.register_buffer("total", torch.zeros(()))
    steps = block.steps

    def count(module: Any, *rest: Any) -> None:
        module.steps += 1
        module.total = module.total + 1

    block.register_forward_hook(count)
    rehearse(run)
    assert block.steps is steps
    assert (block.steps, block.total) == (0, 0)


@triton.jit
def choose_rows(rows, n: tl.constexpr):
    tl.store(rows + tl.arange(0, n), tl.arange(0, n) % 2)


class Allocating(torch.autograd.Function):
    """Returns what nothing has written, forward and backward, as a function does whose kernels do not run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy.new_empty(dy.shape)


@pytest.fixture
def spoiled() -> Iterator[None]:
    """New memory holds NaN, and integers that no index may have: torch fills it so to find what reads it."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("spoiled")
def test_new_memory_holds_zeros_while_kernels_are_compiled_ahead(asked):
    """In a backward pass as well, and as an index that a kernel should have written."""
    new = {
        "empty": lambda: torch.empty(2, 3),
        "empty_like": lambda: torch.empty_like(torch.ones(2, 3)),
        "empty_strided": lambda: torch.empty_strided((2, 3), (3, 1)),
        "empty_permuted": lambda: torch.empty_permuted((2, 3), (1, 0)),
        "new_empty": lambda: torch.ones(1).new_empty(2, 3),
        "new_empty_strided": lambda: torch.ones(1).new_empty_strided((2, 3), (3, 1), dtype=torch.int64),
    }
    x, table, names = torch.ones(4, requires_grad=True), torch.ones(2, 3, requires_grad=True), asked()
    with tuning.compile_ahead(1):
        for name, allocate in new.items():
            assert torch.equal(allocate(), torch.zeros(2, 3)), name
        Allocating.apply(x).backward(torch.ones(4))
        rows = torch.empty(8, dtype=torch.int64)
        choose_rows[(1,)](rows, 8)
        table[rows].sum().backward()
    assert torch.equal(x.grad, torch.zeros(4))
    assert names == ["choose_rows"]
    for name, allocate in new.items():
        assert not torch.equal(allocate(), torch.zeros(2, 3)), f"afterwards {name} leaves memory as it is"


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """From the call on, runs rehearse as on a GPU, and each rehearsal ends with this error."""

    def let(error: Exception) -> None:
        def rehearse(*args: Any) -> None:
            original(*args)
            raise error

        monkeypatch.setattr(compilation, "rehearse", rehearse)
        monkeypatch.setattr(compilation, "compiles_ahead", lambda config, device: True)

    original = compilation.rehearse
    return let


def test_a_rehearsal_that_fails_is_named_in_one_line_and_the_run_goes_on(small, failing, capsys):
    plain = fitted(small("group=plain"))
    failing(ValueError("a block has no keys\nmore"))
    run = fitted(small("group=failed"))
    assert capsys.readouterr().out.count(f"{FAILED} (ValueError: a block has no keys)\n") == 1
    assert (run.directory.path / LOG).read_text().count(FAILED) == 1
    assert "kernels" not in run.seconds_to
    assert curve(run.directory.path) == curve(plain.directory.path), "losses and gradient norms"


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (torch.OutOfMemoryError("out of memory. Tried to allocate 2 GiB."), OutOfMemoryError),
        (UnsupportedError("no such kernel", "use another model"), UnsupportedError),
    ],
    ids=["out of memory", "unsupported"],
)
def test_an_error_that_the_step_would_meet_ends_the_run(error, shown, small, failing, capsys):
    failing(error)
    with pytest.raises(shown):
        Trainer(load_config(small())).fit()
    assert FAILED not in capsys.readouterr().out
