"""Measures one call of a loss: its time from an idle device, its peak memory, CUDA graphs.

Launches count, because the device is idle at first. On a GPU its own events give times, on a CPU the host's clock. A
CPU has no memory figures.
"""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from benchmarks.problems import Problem, relative_error
from linrnn.losses import LossBackend
from linrnn.training.runtime import synchronize

PRODUCT_ROWS = 4096  # rows of the hidden states in one cuBLAS call of :func:`one_product`
ALIGNED = 64  # entries of the vocabulary
_GRAPH_WARMUP = 2
_GRAPH_TOLERANCE = 1e-2  # between the gradients of a replay and of a call


# ----------------------------------------------------------------------------------------------------- one call
def forward(loss: LossBackend, problem: Problem) -> torch.Tensor:
    """The mean loss in nats."""
    tensors = problem.hidden_ND, problem.weight_VD, problem.labels_N
    same = problem.hidden_ND.dtype == problem.compute_dtype
    output = loss(*tensors) if same else loss.mixed(*tensors, problem.compute_dtype)
    return output.sum_nats / problem.n_counted


def evaluate(loss: LossBackend, problem: Problem) -> None:
    """The forward pass alone, as in evaluation: under no_grad."""
    with torch.no_grad():
        forward(loss, problem)


def step(loss: LossBackend, problem: Problem) -> torch.Tensor:
    """Forward and backward pass into new gradients; returns the mean loss."""
    problem.clear_gradients()
    mean_nats = forward(loss, problem)
    mean_nats.backward()
    return mean_nats.detach()


def one_product(problem: Problem) -> Callable[[], None]:
    """The unit of a forward pass: cuBLAS's product N x D x V (logits), in blocks of 4096 rows into a fixed buffer."""
    dtype = problem.compute_dtype
    weight_VD = problem.weight_VD.detach().to(dtype)
    blocks = problem.hidden_ND.detach().to(dtype).split(PRODUCT_ROWS)
    logits = blocks[0].new_empty(len(blocks[0]), len(weight_VD))

    def run() -> None:
        for hidden in blocks:
            torch.mm(hidden, weight_VD.T, out=logits[: len(hidden)])

    return run


def three_products(problem: Problem) -> Callable[[], None]:
    """The floor: cuBLAS's three products of a loss that stores N x V, into fixed buffers, and nothing between them.

    The logits stand for the logits' gradient in the second and third product: sizes and dtypes are the same. V is
    rounded up to ALIGNED entries, because cuBLAS is several times slower on an odd V.
    """
    dtype = problem.compute_dtype
    weight_VD, hidden_ND = (leaf.detach().to(dtype) for leaf in (problem.weight_VD, problem.hidden_ND))
    weight_VD = torch.nn.functional.pad(weight_VD, (0, 0, 0, -len(weight_VD) % ALIGNED))
    logits_NV = hidden_ND.new_empty(len(hidden_ND), len(weight_VD))
    grad_hidden_ND, grad_weight_VD = torch.empty_like(hidden_ND), torch.empty_like(weight_VD)

    def run() -> None:
        torch.mm(hidden_ND, weight_VD.T, out=logits_NV)
        torch.mm(logits_NV, weight_VD, out=grad_hidden_ND)
        torch.mm(logits_NV.T, hidden_ND, out=grad_weight_VD)

    return run


# ------------------------------------------------------------------------------------------------------ measuring
def time_ms(action: Callable[[], object], device: torch.device) -> float:
    """How long `action` takes. The device is idle before and after."""
    return _times_ms([action], device)[0]


def time_step_ms(loss: LossBackend, problem: Problem) -> tuple[float, float]:
    """How long :func:`step` takes, and its backward pass alone. The device is idle before and after."""
    outputs: list[torch.Tensor] = []
    problem.clear_gradients()
    actions = [lambda: outputs.append(forward(loss, problem)), lambda: outputs[0].backward()]
    forward_ms, backward_ms = _times_ms(actions, problem.device)
    return forward_ms + backward_ms, backward_ms


def host_ms(loss: LossBackend, problem: Problem) -> tuple[float, float]:
    """What the host takes to launch the forward and the backward pass of :func:`step`, from an idle device.

    The host's clock, without waiting for a GPU. (On a CPU the host also computes.)
    """
    problem.clear_gradients()
    synchronize(problem.device)
    times = [time.perf_counter()]
    mean_nats = forward(loss, problem)
    times.append(time.perf_counter())
    mean_nats.backward()
    times.append(time.perf_counter())
    synchronize(problem.device)
    return 1e3 * (times[1] - times[0]), 1e3 * (times[2] - times[1])


class _HostEvent:
    """What a torch.cuda.Event does, on a CPU."""

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, later: "_HostEvent") -> float:
        return 1e3 * (later._seconds - self._seconds)


def _times_ms(actions: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """How long each of `actions` takes, one right after another."""
    events: list[Any] = [
        torch.cuda.Event(enable_timing=True) if device.type == "cuda" else _HostEvent() for _ in range(len(actions) + 1)
    ]
    synchronize(device)
    events[0].record()
    for action, event in zip(actions, events[1:], strict=True):
        action()
        event.record()
    synchronize(device)
    return [first.elapsed_time(last) for first, last in pairwise(events)]


def peak_bytes(action: Callable[[], object], device: torch.device) -> int | None:
    """Most memory allocated at once during `action`, above what was allocated before; None on a CPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    action()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def fits_cache(problem: Problem) -> bool:
    """Whether the tensors may still lie in a GPU's L2 cache when the next call starts."""
    if problem.device.type != "cuda":
        return False
    return problem.gradient_bytes < 2 * torch.cuda.get_device_properties(problem.device).L2_cache_size


def capture(loss: LossBackend, problem: Problem) -> torch.cuda.CUDAGraph:
    """A CUDA graph of :func:`step`, replayed once and compared with a call outside of it.

    Raises:
        RuntimeError: the pass cannot be captured, or its replay gives other gradients.
    """
    stream = torch.cuda.Stream(problem.device)
    stream.wait_stream(torch.cuda.current_stream(problem.device))
    with torch.cuda.stream(stream):
        for _ in range(_GRAPH_WARMUP):
            step(loss, problem)
    torch.cuda.current_stream(problem.device).wait_stream(stream)
    expected = [gradient.clone() for gradient in problem.gradients()]
    problem.clear_gradients()
    graph = torch.cuda.CUDAGraph()
    # A capture that fails leaves its own stream as the current one; the outer block takes this one back.
    with torch.cuda.stream(torch.cuda.current_stream(problem.device)), torch.cuda.graph(graph):
        step(loss, problem)
    captured = problem.gradients()
    for gradient in captured:
        gradient.fill_(torch.nan)
    graph.replay()
    for got, wanted in zip(captured, expected, strict=True):
        if not relative_error(got, wanted.double()) < _GRAPH_TOLERANCE:
            raise RuntimeError("the replay of the CUDA graph gives other gradients than a call")
    return graph
