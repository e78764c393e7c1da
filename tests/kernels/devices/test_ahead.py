"""The kernels of a call are compiled before it launches the first of them. No GPU is needed.

A rehearsal, in which no kernel runs, needs nothing that a kernel would have written.
"""

import os
import warnings

import pytest
import torch

pytest.importorskip("triton")

from cce_kernels import backends, linear_cross_entropy
from cce_kernels.backends import with_triton
from cce_kernels.options import Call, Inputs, Options
from cce_kernels.runtime import ahead, launch, tiles
from cce_kernels.runtime.devices import ABSENT
from compiling import Driver
from triton.runtime import driver, jit

from linrnn.models.tuning.compilation import Zeroed

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled there")
GPU = torch.device("cuda:0")
REHEARSE = ahead._rehearse
CALL = Call(Options(), torch.bfloat16, -100, "mean", True, False, False, (True, True, False))


def step(n: int, device: str, vocab: int = 512, dim: int = 64, several: int = 0, **options) -> None:
    e = torch.zeros(n, dim, dtype=torch.bfloat16, device=device, requires_grad=True)
    c = torch.zeros(vocab, dim, dtype=torch.bfloat16, device=device, requires_grad=True)
    targets = torch.zeros((n, several) if several else n, dtype=torch.int64, device=device)
    options |= {"target_weights": targets.float()} if several else {}
    linear_cross_entropy(e, c, targets, **options).backward()


@pytest.fixture
def compiled(monkeypatch):
    """The names of the kernels that Triton is asked to compile for Hopper, in order. It compiles none."""
    names: list[str] = []

    def do_compile(kernel, key, signature, device, *rest):
        names.append(kernel.__name__)
        found = kernel.device_caches[device][0][key] = object()
        return found

    monkeypatch.setattr(jit.JITFunction, "_do_compile", do_compile)
    monkeypatch.setattr(driver, "_active", Driver(90))
    monkeypatch.setattr(driver.active, "get_current_device", lambda: id(names))  # for which no kernel is compiled yet
    return names


CASES = {
    "exact": {},
    "options": {"softcap": 20.0, "label_smoothing": 0.1, "reduction": "sum", "n": 700},
    "four products": {"workspace_mib": 0.5, "n": 1024, "vocab": 4096},
    "several": {"softcap": 20.0, "several": 2},
    "dropped": {"filter_eps": 2.0**-8},
    "lists": {"filter_eps": 2.0**-12, "filter_unbiased": True, "n": 3000, "vocab": 50_000},
}


@pytest.mark.parametrize("case", CASES)
def test_a_call_compiles_nothing_after_its_rehearsal(case, compiled, monkeypatch):
    with ahead.rehearsal(GPU) as found:
        assert tiles.device_of(torch.empty(1, device="meta")) == ABSENT
        step(**{"n": 256, "device": "meta", **CASES[case]})
    assert len(found) == len(compiled) >= 8
    rehearsed = list(compiled)
    run = jit.JITFunction.run
    monkeypatch.setattr(jit.JITFunction, "run", lambda *args, **options: run(*args, **options | {"warmup": True}))
    monkeypatch.setattr(
        launch.Quick, "_launch", lambda self, grid, *args, **options: self.kernel[grid](*args, **options)
    )
    monkeypatch.setattr(tiles, "target", lambda capability: ABSENT)
    monkeypatch.setattr(backends, "_backend_on", lambda device: with_triton)
    with Zeroed():  # nothing runs that would write indices
        step(**{"n": 256, "device": "cpu", **CASES[case]})
    assert compiled == rehearsed


@pytest.mark.parametrize(("n", "most"), [(6000, 1), (8191, 0), (5001, 1), (4097, 1), (3333, 2)])
@pytest.mark.parametrize("options", [{}, {"preset": "cce_filter"}, {"workspace_mib": 256}], ids=str)
def test_another_number_of_tokens_compiles_few_kernels(options, n, most, compiled):
    for tokens in (8192, n):
        before = len(compiled)
        with ahead.rehearsal(GPU):
            step(tokens, "meta", 128_256, 2048, **options)
    assert before >= 10
    assert len(compiled) - before <= most


@pytest.fixture
def rehearsed(monkeypatch):
    """The rows of the calls that `compile_kernels` rehearses. CPU tensors pass for a GPU's."""
    rows: list[int] = []
    monkeypatch.setattr(ahead, "_kinds", set())
    monkeypatch.setattr(ahead, "_rehearse", lambda loss, x, call: rows.append(len(x.e)))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return rows


def inputs(n: int, dim: int = 8) -> Inputs:
    return Inputs(torch.zeros(n, dim), torch.zeros(16, dim), torch.zeros(n, dtype=torch.int64), *[None] * 4)


def test_the_first_call_of_a_kind_is_rehearsed(rehearsed, monkeypatch):
    for n in (500, 400, 300, 500, 700, 600):
        ahead.compile_kernels(None, inputs(n), CALL)
    assert rehearsed == [500, 700]
    ahead.compile_kernels(None, inputs(500, dim=16), CALL)
    ahead.compile_kernels(None, inputs(500), CALL._replace(with_metrics=True))
    assert rehearsed == [500, 700, 500, 500]
    ahead.compile_kernels(None, inputs(9), CALL._replace(place=()))  # of several ranks
    with monkeypatch.context() as hooked:
        hooked.setattr(launch, "_hooked", lambda: True)
        ahead.compile_kernels(None, inputs(9), CALL)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    ahead.compile_kernels(None, inputs(9), CALL)
    monkeypatch.setattr(torch.Tensor, "is_cuda", False, raising=False)
    ahead.compile_kernels(None, inputs(9), CALL)
    assert len(rehearsed) == 4


def test_a_rehearsal_that_fails_is_told_once(rehearsed, monkeypatch):
    def fail(loss, x, call):
        rehearsed.append(len(x.e))
        raise RuntimeError("no threads")

    ahead._warn_once.cache_clear()
    monkeypatch.setattr(ahead, "_rehearse", fail)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for n in (2, 20, 200, 200):
            ahead.compile_kernels(None, inputs(n), CALL)
    assert rehearsed == [2, 20, 200]
    assert ["compiled ahead (RuntimeError: no threads)" in str(each.message) for each in told] == [True]
