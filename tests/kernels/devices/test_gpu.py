"""What only a GPU can show of the Triton kernels. The other files run their cases there as well (-m gpu)."""

import pytest
import torch
import torch.nn.functional as F
from cases import BF16, Case, draw, error, gradients
from cce_kernels import PRESETS, linear_cross_entropy
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MIB = 2**20
ALWAYS = PRESETS["cce_filter"] | {"filter_if_faster": False}
CALLS = {name: {"preset": name} for name in PRESETS} | {"always": ALWAYS}
FITS = {"filter_eps": 2.0**-14, "filter_unbiased": True}  # lists hold peaked rows of 8,192 entries, not uniform ones


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_runs_are_identical_bit_for_bit(options):
    e, c, targets, bias = draw(
        Case("repeat", shape=(4099,), dim=320, vocab=20011, dtype=BF16, bias=True, peak=8), "cuda"
    )

    def run():
        loss = linear_cross_entropy(e, c, targets, bias=bias, workspace_mib=32, **options)
        return [loss.detach(), *gradients(loss, (e, c, bias))]

    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize("name", [*CALLS, "several targets"])
@pytest.mark.parametrize("workspace_mib", [48, 200])
def test_extra_memory_stays_within_the_workspace(name, workspace_mib):
    extra = extra_mib(8192, 512, 50257, workspace_mib, CALLS.get(name, {}), several=0 if name in CALLS else 8)
    assert extra <= 2 * workspace_mib + 8  # bf16 logits: 785 MiB


@pytest.mark.parametrize("shape", [(8192, 1024, 131072), (16384, 512, 50257)])
@pytest.mark.parametrize("workspace_mib", [100, 256])
def test_the_filters_lists_stay_within_the_workspace_together_with_all_else(shape, workspace_mib):
    assert extra_mib(*shape, workspace_mib, ALWAYS) <= workspace_mib + 4  # small vectors


def test_a_filter_that_is_faster_is_taken_and_says_so():
    """16384 x 2048 x 128256 takes 0.6 of the exact time: lists hold every row, and the statistics say what was kept."""
    e = torch.randn(16384, 2048, device="cuda", dtype=BF16, requires_grad=True)
    c = torch.randn(128256, 2048, device="cuda").mul_(0.02).to(BF16).requires_grad_()
    targets = torch.randint(0, len(c), (len(e),), device="cuda")
    results = []
    for options in ({"preset": "cce_filter"}, ALWAYS):
        loss, stats = linear_cross_entropy(e, c, targets, return_stats=True, **options)
        results.append([loss.detach(), *gradients(loss, (e, c)), *stats.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert stats["exact"] == 0
    assert stats["entries_kept"] < 0.1


def extra_mib(n_rows: int, dim: int, vocab: int, workspace_mib: float, options: dict, several: int = 0) -> float:
    """Peak of forward and backward pass beyond inputs and gradients, MiB."""
    e = torch.randn(n_rows, dim, device="cuda", dtype=BF16, requires_grad=True)
    c = (torch.randn(vocab, dim, device="cuda") / dim**0.5).to(BF16).requires_grad_()
    targets = torch.randint(0, vocab, (n_rows, several) if several else (n_rows,), device="cuda")
    if several:
        options = options | {"target_weights": torch.rand(targets.shape, device="cuda")}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(e, c, targets, workspace_mib=workspace_mib, **options).backward()
    extra = torch.cuda.max_memory_allocated() - before
    return (extra - 2 * (e.numel() + c.numel())) / MIB


def test_more_logits_than_32_bits_count():
    """N V = 2.6e9. Loss and gradients agree with fp32 products over chunks of rows."""
    n_rows, dim, vocab = 20000, 64, 128256
    generator = torch.Generator("cuda").manual_seed(0)
    e = torch.randn(n_rows, dim, device="cuda", generator=generator).to(BF16).requires_grad_()
    c = (torch.randn(vocab, dim, device="cuda", generator=generator) / 8).to(BF16).requires_grad_()
    targets = torch.randint(0, vocab, (n_rows,), device="cuda", generator=generator)
    loss = linear_cross_entropy(e, c, targets, reduction="sum", workspace_mib=8192)
    grads = gradients(loss, (e, c))

    e32, c32 = e.detach().float(), c.detach().float().requires_grad_()
    total, grad_e = 0.0, []
    for rows in range(0, n_rows, 2000):
        part = e32[rows : rows + 2000].requires_grad_()
        rows_loss = F.cross_entropy(part @ c32.T, targets[rows : rows + 2000], reduction="sum")
        rows_loss.backward()
        grad_e.append(part.grad)
        total += rows_loss.item()
    assert abs(loss.item() - total) <= 2e-6 * total
    for grad, want in zip(grads, (torch.cat(grad_e), c32.grad), strict=True):
        rounding = error(want.to(BF16), want)
        assert error(grad, want) <= 2 * rounding  # of the entries of dz, of the result


@pytest.mark.parametrize("with_bias", [False, True])
def test_nothing_waits_for_the_device(with_bias):
    e, c, targets, bias = draw(Case("sync", shape=(1024,), dim=128, vocab=5000, bias=True, dtype=BF16), "cuda")
    bias = bias if with_bias else None
    for options in ({"preset": "cce_kahan"}, {"preset": "cce_filter"}, ALWAYS):
        linear_cross_entropy(e, c, targets, bias=bias, **options).backward()  # compile first
        torch.cuda.set_sync_debug_mode("error")
        try:
            linear_cross_entropy(e, c, targets, bias=bias, **options).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_inside_a_compiled_and_checkpointed_program():
    e, c, targets, _ = draw(Case("compiled", shape=(512,), dim=128, vocab=3000, dtype=BF16), "cuda")

    def program(e, c):
        return checkpoint(linear_cross_entropy, torch.tanh(e), c, targets, use_reentrant=False)

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True)(e, c)
    want = program(e, c)
    torch.testing.assert_close(compiled, want)
    torch.testing.assert_close(gradients(compiled, (e, c)), gradients(want, (e, c)), atol=1e-5, rtol=2e-2)


@pytest.mark.parametrize("options", [{}, {"workspace_mib": 16}, FITS], ids=["stored", "recomputed", "filtered"])
def test_replayed_from_a_cuda_graph(options):
    """Also with other inputs, for which the filter's lists are too short."""
    e, c, targets, _ = draw(Case("graph", shape=(4096,), dim=256, vocab=8192, dtype=BF16, peak=14), "cuda")

    def step():
        e.grad = c.grad = None
        linear_cross_entropy(e, c, targets, **options).backward()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    grads = e.grad, c.grad
    for scale in (1.0, 0.0):
        e.data *= scale  # uniform rows
        graph.replay()
        found = [x.clone() for x in grads]
        step()
        assert torch.equal(e.grad, found[0])
        assert torch.equal(c.grad, found[1])


@pytest.mark.parametrize("peak", [14, 0])  # lists that do, and that overflow
def test_what_the_host_knows_of_the_lists_changes_nothing_else(monkeypatch, peak):
    from cce_kernels.filter import gather

    e, c, targets, _ = draw(Case("known", shape=(2048,), dim=256, vocab=8192, dtype=BF16, peak=peak), "cuda")
    launched, real = [], gather.gradients

    def spy(*args, **kwargs):
        launched.append(True)
        return real(*args, **kwargs)

    monkeypatch.setattr(gather, "gradients", spy)
    monkeypatch.setattr(gather, "_launched", set())

    def run(ahead: bool):
        launched.clear()
        torch.cuda.synchronize()
        loss = linear_cross_entropy(e, c, targets, **FITS)
        torch.cuda.synchronize()
        if ahead:
            torch.cuda._sleep(1_000_000_000)
        return gradients(loss, (e, c)), bool(launched)

    assert run(False)[1], "the first call loads all kernels, as a CUDA graph's capture cannot"
    (unknown, both_ways), (known, fallback) = run(True), run(False)
    assert both_ways
    assert fallback == (peak == 0)
    assert all(torch.equal(a, b) for a, b in zip(unknown, known, strict=True))


@pytest.mark.parametrize("dim", [256, 1000, 2048])
def test_repeated_launches_give_the_bits_of_tritons_own(monkeypatch, dim):
    """Steps that repeat the addresses of an earlier step, with other values; and the same steps launched by Triton."""
    from cce_kernels.runtime import launch

    e, c, targets, _ = draw(Case("repeated", shape=(700,), dim=dim, vocab=5000, dtype=BF16), "cuda")
    expanded, real = [], launch.opened

    def steps():
        found = []
        for scale in (1.0, -0.5, 2.0):
            with torch.no_grad():
                e.mul_(scale)
            for _ in range(3):
                grads = gradients(linear_cross_entropy(e, c, targets), (e, c))
                found.append([grad.cpu() for grad in grads])  # the next step gets the same memory
        with torch.no_grad():
            e.mul_(-1.0)
        return found

    def count(*args):
        expanded.append(True)
        return real(*args)

    monkeypatch.setattr(launch, "opened", count)
    ours = steps()
    if launch.known_version():
        assert 0 < len(expanded) < 40, "9 steps of about 8 launches each; later steps repeat those of the first two"
    monkeypatch.setattr(launch, "_hooked", lambda: True)  # every launch then goes through Triton's launcher
    for one, other in zip(ours, steps(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
