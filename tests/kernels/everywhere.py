"""Tests that run on CPU tensors, blockwise and by the kernels in Triton's interpreter, and on a GPU; and ranks."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked import ended, spawn, start

try:
    import triton
except ImportError:
    triton = None

BROKEN = triton is not None and triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0"
MARKS = [
    pytest.mark.interpreter,
    pytest.mark.skipif(triton is None, reason="Triton is not installed"),
    pytest.mark.skipif(BROKEN, reason="Triton 3.6's interpreter fails with numpy 2.4"),
]
_ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
EXAMPLES = Path(__file__).resolve().parents[2] / "kernels" / "examples"
PLACES = {"cpu": ("cpu", []), "interpreter": ("cpu", MARKS), "cuda": ("cuda", _ON_GPU)}


def on(*places: str) -> pytest.MarkDecorator:
    """Parametrizes the test with `device`, at each of the places."""
    return pytest.mark.parametrize("device", [pytest.param(PLACES[x][0], marks=PLACES[x][1], id=x) for x in places])


devices, kernels = on("cpu", "interpreter", "cuda"), on("interpreter", "cuda")  # the second: the Triton kernels alone


def interpreted(test: Callable[..., Any]) -> Callable[..., Any]:
    """Runs the test in the interpreter alone."""
    for mark in MARKS:
        test = mark(test)
    return test


def devices_with(
    name: str, values: Sequence[Any], interpreted: Sequence[Any], on_gpu: Sequence[Any] = ()
) -> pytest.MarkDecorator:
    """`devices` crossed with `values` of a second parameter. A GPU takes those and `on_gpu`.

    The interpreter takes only `interpreted`, because it needs a second or more per case.
    """
    of_place = {"cpu": values, "interpreter": interpreted, "cuda": [*values, *on_gpu]}
    cases = [
        pytest.param(device, value, marks=marks, id=f"{place}-{_name(value)}")
        for place, (device, marks) in PLACES.items()
        for value in of_place[place]
    ]
    return pytest.mark.parametrize(("device", name), cases)


def load_example(name: str) -> Any:
    """A file of kernels/examples as a module of its own."""
    spec: Any = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_ranks(
    rank: Callable[..., None], arguments: Sequence[tuple], device: str = "cpu", seconds: float = 200
) -> list[int | None]:
    """Call a function in a process for each tuple of arguments. On another device than "cpu" processes are new.

    Returns:
        the exit codes; None for a process that has not ended within so many seconds.
    """
    if device == "cuda" and torch.cuda.device_count() < len(arguments):
        pytest.skip(f"needs {len(arguments)} GPUs")
    begin = start if device == "cpu" else spawn  # CUDA does not survive a fork
    return ended([begin(rank, *of_rank) for of_rank in arguments], seconds)


@contextmanager
def joined(rank: int, ranks: int, store: str, device: str, seconds: float = 60) -> Iterator[None]:
    """A process group of so many ranks, which meet at the file `store`. A rank waits for the others so long."""
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks,
        timeout=timedelta(seconds=seconds),
    )  # fmt: skip
    try:
        yield
    finally:
        dist.destroy_process_group()


def _name(value: Any) -> str:
    return "-".join(map(_name, value)) if isinstance(value, tuple) else str(value).removeprefix("torch.")
