"""Problems for the output layer, their fp64 truth, and how one call is measured.

Launches count, because the device is idle at first. On a GPU its own events give times, on a CPU the host's clock. A
CPU has no memory figures.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.other_losses import PaperVariant
from linrnn.config import nearest
from linrnn.core.errors import ConfigError
from linrnn.losses import LossBackend
from linrnn.losses.base import IGNORE_INDEX
from linrnn.losses.cce import CceKahan
from linrnn.training.runtime import synchronize

HALF_IGNORED = "half_ignored"
KINDS = ("flat", "peaked", HALF_IGNORED)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BLOCK_ELEMENTS = 2**26  # logits at a time
_ALIGNED = 64  # tokens of the vocabulary


@dataclass(frozen=True)
class Shape:
    """N tokens, D hidden dimensions, V vocabulary size."""

    name: str
    n: int
    d: int
    v: int


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("gemma2_2b", 8192, 2304, 256000),  # the table of the CCE paper (Wijmans et al., 2024)
        Shape("llama_1b3", 16384, 2048, 128256),
        Shape("mve", 16384, 256, 32000),
        Shape("lm_350m", 32768, 1024, 32000),
    )
}


def parse_shape(text: str) -> Shape:
    """A name of SHAPES, or `NxDxV`.

    Raises:
        ConfigError: the text is neither. The message offers the nearest names.
    """
    if text in SHAPES:
        return SHAPES[text]
    if match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text):
        n, d, v = map(int, match.groups())
        return Shape(text, n, d, v)
    near = ", ".join(nearest(text, [*SHAPES]))
    raise ConfigError(f"shapes: {text} is not a known shape", f"nearest: {near}; or give NxDxV")


@dataclass(frozen=True)
class Problem:
    """The three tensors of a loss. Hidden states and weight are leaves that require gradients.

    The leaves have the dtype of the wanted gradients. Their values are rounded to `compute_dtype`, the products' dtype.
    """

    hidden_ND: Tensor
    weight_VD: Tensor
    labels_N: Tensor
    compute_dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.labels_N.device

    @cached_property
    def n_counted(self) -> int:
        """The number of labels that are not ignored."""
        return int((self.labels_N != IGNORE_INDEX).sum())

    @property
    def gradient_bytes(self) -> int:
        return self.hidden_ND.nbytes + self.weight_VD.nbytes

    def clear_gradients(self) -> None:
        self.hidden_ND.grad = self.weight_VD.grad = None

    def gradients(self) -> tuple[Tensor, Tensor]:
        """(dE, dC) of the last backward pass."""
        assert self.hidden_ND.grad is not None
        assert self.weight_VD.grad is not None
        return self.hidden_ND.grad, self.weight_VD.grad


def make_problem(
    shape: Shape,
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    gradient_dtype: torch.dtype | None = None,
) -> Problem:
    """Random tensors whose labels follow Zipf's law over a vocabulary in random order.

    `flat` is an untrained model: hidden ~ N(0, 1), weight ~ N(0, 0.02²). `peaked` imitates a trained one. Rows of its
    weight have a norm of about 1 and carry half of log p_v along a common direction. A hidden state is the sum of twice
    that direction, 7.5 times its label's row and 6 times each of four random rows. At the named shapes the loss is then
    2.4 to 3.5 nats. Of a row, 100 to 220 entries exceed 2^-12, as in small trained models. `half_ignored` is `peaked`
    with about half of its labels ignored, as in fine-tuning on answers alone.

    Values are rounded to `dtype`. The leaves have `gradient_dtype` (default: `dtype`).
    """
    random = torch.Generator(device).manual_seed(seed)
    order = torch.randperm(shape.v, generator=random, device=device)
    p_V = (1 / torch.arange(1, shape.v + 1, device=device))[order]
    # The CPU adds in a fixed order and a GPU does not. A problem that is drawn again must have the same labels.
    below_V = p_V.double().cpu().cumsum(0).to(device)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, device=device)

    places = below_V[-1] * torch.rand(shape.n, generator=random, device=device, dtype=torch.float64)
    labels, hidden = torch.searchsorted(below_V, places, right=True), normal(shape.n, shape.d)
    weight = normal(shape.v, shape.d)
    if kind == "flat":
        weight *= 0.02
    else:
        common_D = F.normalize(normal(shape.d), dim=0)
        weight /= shape.d**0.5
        rows = F.normalize(weight - torch.outer(weight @ common_D, common_D), dim=1)
        weight += torch.outer(0.5 * (p_V.log() - p_V.log().mean()), common_D)
        hidden += 2 * common_D + 7.5 * rows[labels]
        for _ in range(4):
            hidden += 6 * rows[torch.randint(shape.v, (shape.n,), generator=random, device=device)]
    if kind == HALF_IGNORED:
        labels = labels.masked_fill(torch.rand(shape.n, generator=random, device=device) < 0.5, IGNORE_INDEX)
    leaves = [tensor.to(dtype).to(gradient_dtype or dtype).requires_grad_() for tensor in (hidden, weight)]
    return Problem(leaves[0], leaves[1], labels, dtype)


# ---------------------------------------------------------------------------------------------------------- truth
@dataclass(frozen=True)
class Solution:
    """A loss in nats and its gradients: dE, dC (all rows, or those that were asked for) and of a bias."""

    loss: float
    hidden_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None = None


def truth_of(problem: Problem) -> Solution:
    """The mean loss in fp64, from the problem's rounded tensors."""
    return solve(problem.hidden_ND, problem.weight_VD, problem.labels_N, _mean(problem), torch.float64)


def fp32_logits_of(problem: Problem) -> Solution:
    """The bar for exactness: true fp32 logits, and (softmax - onehot) rounded to the compute dtype for two products.

    Products are IEEE fp32 (no TF32). Gradients are rounded once, to the leaves' dtype.
    """
    tensors = problem.hidden_ND, problem.weight_VD, problem.labels_N, _mean(problem)
    with without_tf32():
        solved = solve(*tensors, torch.float32, problem.compute_dtype)
    dtype = problem.hidden_ND.dtype
    return Solution(solved.loss, solved.hidden_ND.to(dtype), solved.weight_VD.to(dtype))


def _mean(problem: Problem) -> Tensor:
    """Weights of the rows, (N,), for the mean over the labels that count."""
    if not problem.n_counted:
        raise ConfigError("every label of this shape is ignored", "use more tokens, or other logits=…")
    return (problem.labels_N != IGNORE_INDEX).double() / problem.n_counted


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Inside the block, products in fp32 round as fp32 on a GPU, too."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@torch.no_grad()
def solve(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    counts_N: Tensor,
    dtype: torch.dtype,
    operand: torch.dtype | None = None,
    *,
    bias_V: Tensor | None = None,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    lse_weight: float = 0.0,
    rows: Any = slice(None),
    entries: Any = slice(None),
) -> Solution:
    """The weighted sum of the rows' losses in `dtype`, a block of rows at a time.

    Args:
        counts_N: fp64, how much each row counts; 0 for an ignored label.
        operand: the dtype to which the gradient of the logits is rounded; None: not rounded.
        lse_weight: how much every row's log-sum-exp counts in addition.
        rows, entries: indices of the rows of dE and dC that are returned.
    """
    e, c = hidden_ND.to(dtype), weight_VD.to(dtype)
    loss, vocab, largest = 0.0, len(c), counts_N.max().to(dtype)
    grad_e, grad_c = torch.zeros_like(e), torch.zeros_like(c[entries])
    grad_bias = None if bias_V is None else torch.zeros(vocab, dtype=dtype, device=e.device)
    wanted, size = torch.zeros(len(e), dtype=torch.bool, device=e.device), max(1, BLOCK_ELEMENTS // vocab)
    wanted[rows] = True
    for first in range(0, len(e), size):
        block = slice(first, first + size)
        here = wanted[block]
        z = e[block] @ c.T
        if bias_V is not None:
            z += bias_V.to(dtype)
        if softcap:
            z = softcap * torch.tanh(z / softcap)
        lse, counts, place = z.logsumexp(dim=1), counts_N[block].to(dtype), labels_N[block].clamp(min=0)[:, None]
        nats = lse - (1 - label_smoothing) * z.gather(1, place)[:, 0] + z_loss * lse.square()
        if label_smoothing:
            nats -= label_smoothing * z.mean(dim=1)
        loss += ((counts.double() * nats.double()).sum() + lse_weight * lse.double().sum()).item()
        dz = (z - lse[:, None]).exp_().mul_((counts * (1 + 2 * z_loss * lse) + lse_weight)[:, None])
        dz -= (counts * label_smoothing / vocab)[:, None]
        dz.scatter_add_(1, place, -(1 - label_smoothing) * counts[:, None])
        if softcap:
            dz *= 1 - (z / softcap).square()
        if operand is not None:  # the factor of all rows is not part of the rounding: fp16 has no room for 1 / N
            dz = (dz / largest).to(operand).to(dtype) * largest
        grad_e[block][here] = dz[here] @ c
        grad_c += dz[:, entries].T @ e[block]
        if grad_bias is not None:
            grad_bias += dz.sum(dim=0)
    return Solution(loss, grad_e[rows], grad_c, grad_bias)


def relative_error(got: Tensor, true: Tensor) -> float:
    """Relative Frobenius error, a block of rows at a time."""
    squared = sum((g.double() - t).square().sum() for g, t in zip(got.split(2**14), true.split(2**14), strict=True))
    return float((squared / true.square().sum()) ** 0.5)


# ----------------------------------------------------------------------------------------------------- one call
def forward(loss: LossBackend, problem: Problem) -> torch.Tensor:
    """The mean loss in nats. Of fp32 tensors our kernels multiply as under autocast: they never round the gradients."""
    hidden_ND, weight_VD, dtype = problem.hidden_ND, problem.weight_VD, problem.compute_dtype
    if hidden_ND.dtype != dtype and isinstance(loss, CceKahan | PaperVariant):
        with torch.autocast(hidden_ND.device.type, dtype):
            sum_nats, _ = loss.compute(hidden_ND, weight_VD, problem.labels_N)
        (problem.labels_N != IGNORE_INDEX).sum()  # as a call of every other loss does, so that times are alike
    else:
        sum_nats = loss(hidden_ND.to(dtype), weight_VD.to(dtype), problem.labels_N).sum_nats
    return sum_nats.float() / problem.n_counted


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


def three_products(problem: Problem) -> Callable[[], None]:
    """The floor: cuBLAS's three products of a loss that stores N x V, into fixed buffers, and nothing between them.

    The logits stand for the logits' gradient in the second and third product: sizes and dtypes are the same. V is
    rounded up to _ALIGNED entries, because cuBLAS is several times slower on an odd V.
    """
    dtype = problem.compute_dtype
    weight_VD, hidden_ND = (leaf.detach().to(dtype) for leaf in (problem.weight_VD, problem.hidden_ND))
    weight_VD = torch.nn.functional.pad(weight_VD, (0, 0, 0, -len(weight_VD) % _ALIGNED))
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
    synchronize(device)
    if device.type == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        action()
        last.record()
        synchronize(device)
        return first.elapsed_time(last)
    begin = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - begin)


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


def extra_mib(action: Callable[[], object], problem: Problem) -> float | None:
    """The peak of a forward and backward pass beyond inputs and gradients; None on a CPU."""
    problem.clear_gradients()
    peak = peak_bytes(action, problem.device)
    return None if peak is None else (peak - problem.gradient_bytes) / 2**20


def fits_cache(problem: Problem) -> bool:
    """Whether the tensors may still lie in a GPU's L2 cache when the next call starts."""
    if problem.device.type != "cuda":
        return False
    return problem.gradient_bytes < 2 * torch.cuda.get_device_properties(problem.device).L2_cache_size
