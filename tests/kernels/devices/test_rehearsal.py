"""A call in which no kernel runs, for compiling all kernels ahead, needs nothing that a kernel would have written."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cce_kernels import backends, linear_cross_entropy
from cce_kernels.backends import with_triton
from cce_kernels.runtime.launch import through_triton
from compiling import pretend

from linrnn.models.tuning.new_memory import zeroed

HOPPER, AMPERE = 90, 80
SHAPES = {  # N, D, V
    "several chunks, sorted by torch": (9000, 128, 1024),
    "one chunk, one launch": (256, 512, 1000),
}


@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_the_exact_loss_depends_on_no_result_of_a_kernel(
    shape: tuple[int, int, int], capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New memory holds NaN, and integers that no index may have. Torch would refuse one of them as an index."""
    n, d, v = shape
    launches = pretend(monkeypatch, capability)
    monkeypatch.setattr(backends, "_backend_on", lambda device: with_triton)
    spoil_new_memory(monkeypatch)
    hidden = torch.randn(n, d).bfloat16().requires_grad_()
    weight = torch.randn(v, d).bfloat16().requires_grad_()
    labels = torch.randint(v, (n,)).index_fill(0, torch.arange(0, n, 7), -100)
    loss = linear_cross_entropy(hidden, weight, labels, reduction="sum", workspace_mib=4)
    forward = len(launches)
    loss.backward()
    assert forward > 0
    assert len(launches) > forward, "the backward pass launched kernels as well"
    assert hidden.grad is not None
    assert weight.grad is not None


@pytest.mark.parametrize(
    "options",
    [
        {"filter_unbiased": True},
        {"filter_unbiased": True, "workspace_mib": 64},
        {"filter_unbiased": True, "filter_mass": 0.3},
        {"filter_unbiased": True, "filter_c": False},
        {"filter_unbiased": True, "return_stats": True},
        {},
    ],
    ids=str,
)
def test_a_rehearsal_of_a_filter_indexes_by_zeros(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without zeros, an unbiased filter's indices are wrong ones. Afterwards new memory is what it was."""
    launches = pretend(monkeypatch, HOPPER)
    monkeypatch.setattr(backends, "_backend_on", lambda device: with_triton)
    spoil_new_memory(monkeypatch)
    hidden = torch.randn(3000, 64).bfloat16().requires_grad_()
    weight = torch.randn(50_000, 64).bfloat16().requires_grad_()
    labels = torch.randint(50_000, (3000,))

    def step() -> None:
        found = linear_cross_entropy(hidden, weight, labels, reduction="sum", filter_eps=2.0**-12, **options)
        (found[0] if isinstance(found, tuple) else found).backward()

    with through_triton(), zeroed():
        step()
    assert len({launch.name for launch in launches}) >= 10
    assert torch.empty(2).isnan().all()
    if options:
        with pytest.raises(IndexError):
            step()


def spoil_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        return tensor.fill_(torch.iinfo(tensor.dtype).max) if tensor.dtype != torch.bool else tensor

    empty, new_empty, empty_like = torch.empty, torch.Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **o: spoiled(empty(*a, **o)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **o: spoiled(empty_like(*a, **o)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **o: spoiled(new_empty(*a, **o)))
