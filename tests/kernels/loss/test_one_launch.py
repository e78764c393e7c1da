"""Kernels that do in one launch what torch does in several: the rows in the order of their targets, the mean loss."""

import cases  # noqa: F401 (patches the interpreter before a kernel runs)
import pytest
import torch
from cce_kernels import backends
from cce_kernels.row_math import reduce_loss
from cce_kernels.runtime.interpreter import INTERPRETED
from cce_kernels.triton.targets import order as target_order
from everywhere import devices
from torch import Tensor

SIZES = {"one row": (1, 5, 4), "few rows": (100, 77, 16), "many rows": (700, 5000, 128), "few entries": (600, 3, 128)}


def ordered(columns: Tensor, vocab: int, tile: int) -> list[Tensor]:
    """The three tensors that `order_by_target` writes."""
    keys, order = torch.full_like(columns, -9, dtype=torch.int32), torch.full_like(columns, -9)
    bounds = torch.full((-(-vocab // tile) + 1,), -9, dtype=torch.int32, device=columns.device)
    target_order.order_by_target(columns, keys, order, bounds, tile)
    return [keys, order, bounds]


@devices
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_rows_are_ordered_by_target_as_torch_sorts_them(sizes, device, monkeypatch):
    n_rows, vocab, tile = sizes
    if device == "cpu" and not INTERPRETED:
        monkeypatch.setattr(target_order, "MOST_COUNTED", 0)  # as for more rows: without the kernel
    columns = torch.randint(-2, vocab, (n_rows,), generator=torch.Generator().manual_seed(0)).to(device)
    keys, order = columns.to(torch.int32).sort(stable=True)
    edges = torch.arange(0, (-(-vocab // tile) + 1) * tile, tile, device=device)
    bounds = (keys[:, None] < edges[None, :]).sum(dim=0, dtype=torch.int32)
    for found, expected in zip(ordered(columns, vocab, tile), (keys, order, bounds), strict=True):
        assert torch.equal(found, expected)


@devices
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("n_rows", [1, 1000, 9000])  # one step and two of the kernel's one program
def test_the_loss_of_a_call_is_torchs_sum_and_mean(reduction, n_rows, weighted, device):
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(n_rows, generator=g)
    columns = torch.randint(-2, 3, (n_rows,), generator=g)
    rows[columns == -1] = 0.0
    weights = None
    if weighted:
        weights = torch.rand(n_rows, generator=g).masked_fill_(columns == -1, torch.nan)
    expected, counted = reduce_loss(rows.double(), columns, reduction, weights)
    backend = backends.backend_of(rows.to(device))
    weights = None if weights is None else weights.to(device)
    loss, divisor = backend.reduce_loss(rows.to(device), columns.to(device), reduction, weights)
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-6, atol=1e-6)
    assert (divisor is None) == (counted is None)
    assert divisor is None or divisor.item() == pytest.approx(counted.item(), rel=1e-6)
    assert weighted or divisor is None or divisor.item() == counted.item()


@devices
def test_the_gradient_of_a_mean_has_the_bits_of_torchs_quotient(device):
    backend = backends.backend_of(torch.zeros((), device=device))
    numerators = (1.0, -0.5, 3e38, 1e-39, 0.0, torch.inf, torch.nan)
    divisors = [torch.tensor(n) for n in (1, 3, 160, 2**24 + 1, 2**31 + 3, 0.7, -1e-3, torch.inf)]
    for grad in (torch.tensor(x, device=device) for x in numerators):
        for divisor in (x.to(device) for x in divisors):
            found, expected = backend.mean_gradient(grad, divisor), grad / divisor
            assert found.dtype == torch.float32
            assert found.shape == ()
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32)) or (
                found.isnan() and expected.isnan()
            )


@devices
def test_the_mean_of_ignored_rows_alone_is_0(device):
    columns = torch.full((70,), -1, device=device)
    rows = torch.zeros(70, device=device)
    loss, divisor = backends.backend_of(rows).reduce_loss(rows, columns, "mean")
    assert loss.item() == 0
    assert divisor.item() == 1
