"""Hopper's own logit kernels against the Triton kernels that they replace, on an H100 or H200."""

import pytest
import torch
from cases import BF16, FP16
from torch import Tensor

pytest.importorskip("triton")

from cce_kernels.filter.rule import Rule
from cce_kernels.options import Options
from cce_kernels.triton import hopper
from cce_kernels.triton.logit_gradient import Filter, gradient_of_chunk
from cce_kernels.triton.logits import Sums, exponentials, target_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
    ),
]

# N, D, V: whole tiles; ragged in all; one row and the fewest dimensions and columns; several units a program
SHAPES = [(1024, 512, 4096), (1000, 328, 5003), (1, 193, 1), (5000, 256, 33000)]
OPTIONS = Options(logit_scale=0.7)


@pytest.fixture(autouse=True)
def any_triton(monkeypatch):
    """Use the installed Triton version, listed or not: a version must pass here before it is listed."""
    monkeypatch.setattr(hopper, "known_version", lambda: True)


def draw(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """e (N, D) and c (V, D), both readable by TMA, and targets, some of them ignored."""
    rows, dim, vocab = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(n: int, scale: float) -> Tensor:
        wide = scale * torch.randn(n, -(-dim // 8) * 8, device="cuda", generator=generator)
        return wide.to(dtype)[:, :dim]

    columns = torch.randint(-1, vocab, (rows,), device="cuda", generator=generator)
    return normal(rows, 1.0), normal(vocab, 0.1), columns


def matrix(shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """(N, V) of NaN, writable by TMA."""
    rows, _, vocab = shape
    return torch.full((rows, -(-vocab // 8) * 8), float("nan"), dtype=dtype, device="cuda")[:, :vocab]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exponentials_sums_and_metrics_are_those_of_the_triton_kernel(monkeypatch, shape, dtype):
    e, c, columns = draw(shape, dtype)
    assert hopper.fits(e)
    z_target = target_logits(e, c, None, columns, OPTIONS)

    def run(w: Tensor | None, with_metrics: bool = False) -> Sums:
        return exponentials(e, c, None, columns, z_target, w, with_metrics, OPTIONS)

    w, want_w, w_beside_metrics = (matrix(shape, BF16) for _ in range(3))
    sums, again, alone, measured = run(w), run(matrix(shape, BF16)), run(None), run(w_beside_metrics, True)
    monkeypatch.setattr(hopper, "fits", lambda e: False)
    want = run(want_w, True)
    total = want.w.sum(dim=0)
    torch.testing.assert_close(sums.w.sum(dim=0), total, rtol=2e-6, atol=0)
    assert torch.equal(sums.w, again.w)
    assert torch.equal(sums.w, alone.w)
    assert torch.equal(w, want_w)  # bit for bit: the products are added up in one order
    assert torch.equal(sums.w, measured.w)
    assert torch.equal(w, w_beside_metrics)
    torch.testing.assert_close(measured.metrics[0].amax(dim=0), want.metrics[0].amax(dim=0), rtol=2e-6, atol=0)
    difference = measured.metrics[1].sum(dim=0) - want.metrics[1].sum(dim=0)
    assert (difference.abs() <= 2e-5 * total).all()  # of an entropy, in bits


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_of_logits_are_those_of_the_triton_kernel(monkeypatch, shape, dtype):
    e, c, columns = draw(shape, dtype)
    lse = torch.logsumexp(0.7 * e.float() @ c.float().T, dim=1)
    a = torch.rand(shape[0], device="cuda")
    options = Options(logit_scale=0.7, label_smoothing=0.1)

    def run() -> Tensor:
        dz = matrix(shape, dtype)
        first = shape[2] // 3  # of a chunk in the middle of a vocabulary
        gradient_of_chunk(e, c, None, columns, lse, a, 0.5 * a, dz, first, 2 * shape[2], False, options, None, None)
        return dz

    dz = run()
    monkeypatch.setattr(hopper, "fits", lambda e: False)
    assert torch.equal(dz, run())


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_times", [False, True])
def test_gradients_of_the_tails_are_those_of_the_triton_kernel(monkeypatch, with_times, shape, dtype):
    (rows, _, vocab), (e, c, columns) = shape, draw(shape, dtype)
    lse = torch.logsumexp(0.7 * e.float() @ c.float().T, dim=1)
    a = torch.rand(rows, device="cuda")
    eps = torch.exp(-lse.mean()) + 2.0**-14  # some entries on either side
    times = torch.randint(0, 3, (vocab,), device="cuda").float() if with_times else None
    filtering = Filter(Rule(eps, None, None, None), times=times)

    def run() -> Tensor:
        dz = matrix(shape, dtype)
        gradient_of_chunk(e, c, None, columns, lse, a, a, dz, 0, vocab, False, OPTIONS, filtering, None)
        return dz

    dz = run()
    monkeypatch.setattr(hopper, "fits", lambda e: False)
    assert torch.equal(dz, run())
    assert vocab == 1 or 0.05 < (dz == 0).float().mean() < 0.95
