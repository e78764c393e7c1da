"""On a GPU: calls that repeat an earlier one without its Python; launched one by one and from a CUDA graph."""

import pytest
import torch
from cce_kernels import linear_cross_entropy
from repeated_cases import REPEATED, check_changed, check_evaluation, check_hooks, check_repeated, count_runs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_a_repeated_call_gives_the_bits_of_a_usual_one(case, monkeypatch):
    check_repeated("cuda", monkeypatch, case)


@pytest.mark.parametrize("check", [check_evaluation, check_changed, check_hooks])
def test_what_a_repeated_call_leaves_to_its_caller(check, monkeypatch):
    check("cuda", monkeypatch)


@pytest.mark.parametrize("shape", [(1024, 512, 50304), (16384, 256, 32000), (512, 1024, 32001)])
def test_a_call_at_full_size_takes_no_more_memory_and_gives_the_same_bits(shape, monkeypatch):
    from cce_kernels.runtime import program

    n_rows, dim, vocab = shape
    e = torch.randn(n_rows, dim, dtype=torch.bfloat16, device="cuda").requires_grad_()
    c = (torch.randn(vocab, dim, dtype=torch.bfloat16, device="cuda") / dim**0.5).requires_grad_()
    targets = torch.randint(0, vocab, (n_rows,), device="cuda")

    def step() -> tuple[list[torch.Tensor], int]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = linear_cross_entropy(e, c, targets)
        found = [loss.detach(), *torch.autograd.grad(loss, (e, c))]
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        return [x.cpu() for x in found], peak

    usual, peak = [step() for _ in range(3)][-1]
    monkeypatch.setattr(program, "MOST_TRIES", 6)
    runs = count_runs(monkeypatch)
    steps = [step() for _ in range(7)]
    assert len(runs) > 5
    for found, peak_again in steps[-2:]:
        assert all(torch.equal(one, other) for one, other in zip(found, usual, strict=True))
        assert peak_again <= peak + 2**20


def test_a_cuda_graph_captures_repeated_calls(monkeypatch):
    from cce_kernels.runtime import program

    monkeypatch.setattr(program, "MOST_TRIES", 6)
    runs = count_runs(monkeypatch)
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
