"""The schemes with three products (stored exponentials) and with four, by the kernels, interpreted and on a GPU.

Every option that three products serve is checked against fp64, with no logit computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import BF16, FP32, IGNORE, Case, draw, error, gradients, in_fp64
from cce_kernels import linear_cross_entropy, planner, reference, reference_linear_cross_entropy
from cce_kernels.runtime.interpreter import INTERPRETED
from everywhere import devices_with, interpreted, kernels
from stored_cases import HUGE, Stored, three_products
from stored_cases import draw as draw_stored
from torch import Tensor

OPTIONS = [
    Stored("chunks-metrics-wide", {"reduction": "sum"}, rows=128, dim=1100, metrics=True),
    Stored("fp32_sums-chunks", {"accumulate": "fp32", "z_loss": 1e-3}, rows=128),
    Stored("softcap-chunks-metrics", {"softcap": 30.0, "logit_scale": 1.4}, rows=128, metrics=True),
    Stored("row_losses-fp32", {"reduction": "none", "z_loss": 1e-3}, FP32),
    Stored("row_losses-main_grad", {"reduction": "none"}, main_grad=True),
    Stored("lse", {"reduction": "sum"}, lse=True),
    Stored("smoothed-chunks", {"label_smoothing": 0.1, "reduction": "sum"}, rows=128),
    Stored("smoothed-main_grad", {"label_smoothing": 1.0, "logit_scale": 0.5}, rows=128, main_grad=True),
    Stored("smoothed-row_losses-lse", {"label_smoothing": 0.1, "reduction": "none", "logit_scale": 1.4}, lse=True),
    Stored("weights-chunks-fp32", {"reduction": "sum", "z_loss": 1e-3}, FP32, rows=128, weights=True),
    Stored("weights-main_grad-softcap", {"softcap": 30.0}, rows=128, main_grad=True, weights=True),
    Stored("bias", {"z_loss": 1e-3}, bias=True),
    Stored("bias-chunks-fp32", {"reduction": "sum", "logit_scale": 1.4}, FP32, rows=128, bias=True, weights=True),
    Stored("bias-softcap-main_grad", {"softcap": 30.0}, rows=128, main_grad=True, bias=True),
    Stored("bias-row_losses-lse", {"reduction": "none", "z_loss": 1e-3}, lse=True, bias=True),
    Stored("upright_tiles-bias-chunks-main_grad", rows=128, main_grad=True, bias=True, dim=264),
    Stored("shallow_tiles", dim=512),
]


@contextmanager
def rounded_logit_gradients() -> Iterator[None]:
    """The reference rounds dL/dlogits to bf16."""
    exact = reference._logits

    def logits(*inputs: Any) -> Tensor:
        z = exact(*inputs)
        if z.requires_grad:
            z.register_hook(lambda grad: grad.to(BF16).double())
        return z

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(reference, "_logits", logits)
        yield


def bias_of(case: Stored, device: str) -> Tensor | None:
    """The bias of a case. Two of its entries nearly rule out tokens that are no target."""
    if not case.bias:
        return None
    bias = torch.randn(391, generator=torch.Generator().manual_seed(4))
    bias[[3, 380]] = -300.0
    return bias.to(BF16).to(device, case.dtype).requires_grad_()


def weights_of(case: Stored, targets: Tensor) -> dict[str, Tensor]:
    """The option token_weights. Those of ignored targets are NaN."""
    if not case.weights:
        return {}
    weights = torch.rand(len(targets), generator=torch.Generator().manual_seed(2)) + 0.1
    if case.options.get("reduction") in ("sum", "none"):
        weights[::2] *= -1
    weights[HUGE] = 1  # as in `upstream`
    return {"token_weights": weights.to(targets.device).masked_fill_(targets == IGNORE, torch.nan)}


def upstream(case: Stored, device: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of loss and LSE, with another gradient for each row."""
    g = torch.Generator().manual_seed(1)
    of_rows, of_lse = torch.randn(2, 300, generator=g)
    of_rows[HUGE], of_lse[HUGE] = 1, -0.5  # else the rounding of two numbers would decide dC's error
    of_rows, of_lse = of_rows.to(device), of_lse.to(device)

    def total(loss: Tensor, lse: Tensor) -> Tensor:
        whole = (loss * of_rows).sum() if loss.dim() else 0.3 * loss
        return whole + (lse * of_lse).sum() if case.lse else whole

    return total


@kernels
@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_options_take_three_products_and_are_as_exact_as_fp32_logits(case, device):
    """Loss, metrics and the gradients of all inputs.

    Gradients are within 1.05 of the error of exact logits whose gradient is rounded to bf16.
    """
    e, c, targets = draw_stored(case, device)
    total = upstream(case, device)
    bias = bias_of(case, device)
    if bias is not None:
        targets = targets.masked_fill((targets == 3) | (targets == 380), 5)
    wide = in_fp64(e, c, bias)
    options = case.options | weights_of(case, targets)
    exact = {name: x for name, x in options.items() if name != "accumulate"}
    truth, truth_lse = reference_linear_cross_entropy(*wide[:2], targets, bias=wide[2], **exact)
    want = gradients(total(truth, truth_lse), wide)
    with rounded_logit_gradients():
        found = reference_linear_cross_entropy(*wide[:2], targets, bias=wide[2], **exact)
        rounded = gradients(total(*found), wide)
    buffer = torch.zeros(c.shape, device=device) if case.main_grad else None
    with three_products(case.rows):
        with torch.autocast(e.device.type, BF16):
            found = linear_cross_entropy(
                e, c, targets, bias=bias, return_lse=case.lse, return_metrics=case.metrics, main_grad_c=buffer,
                **options,
            )  # fmt: skip
        loss, *others = found if isinstance(found, tuple) else (found,)
        total(loss, others[0] if case.lse else truth_lse).backward()
    assert error(loss, truth) < 1e-5
    if case.lse:
        assert error(others[0], truth_lse) < 1e-5
    if case.metrics:
        check_metrics(others[-1], *wide[:2], targets, case.options)
    grads = [e.grad, c.grad if buffer is None else buffer, *([] if bias is None else [bias.grad])]
    for got, base, true in zip(grads, rounded, want, strict=True):
        assert torch.isfinite(got).all()
        assert error(got, true) <= 1.05 * error(base.to(got.dtype), true) + 1e-7


def check_metrics(metrics: dict[str, Tensor], e: Tensor, c: Tensor, targets: Tensor, options: dict[str, Any]) -> None:
    """Accuracy and entropy, from fp64 logits."""
    kept = targets != IGNORE
    z = options.get("logit_scale", 1.0) * (e @ c.T)[kept].detach()
    z = options["softcap"] * torch.tanh(z / options["softcap"]) if "softcap" in options else z
    at_target = targets[kept, None]
    ahead = z.gather(1, at_target).squeeze(1) - z.scatter(1, at_target, -torch.inf).amax(dim=1)
    least, most = ((ahead > x).double().mean().item() for x in (1e-3, -1e-3))  # closer ones: for rounding to decide
    assert 0 < least - 1e-6 <= metrics["accuracy"].item() <= most + 1e-6 < 1
    entropy = torch.special.entr(torch.softmax(z, dim=1)).sum(dim=1).mean()
    assert metrics["entropy"].item() == pytest.approx(entropy.item(), rel=1e-4)


@kernels
@pytest.mark.parametrize("rows", [128, 384], ids=["several chunks", "one chunk"])
def test_every_input_gets_the_same_bits_alone_and_again(rows, device):
    case = Stored("alone", bias=True)
    e, c, targets = draw_stored(case, device)
    bias = bias_of(case, device)
    targets = targets.masked_fill((targets == 3) | (targets == 380), 5)

    def found(*inputs: Any) -> list[Tensor]:
        loss = linear_cross_entropy(*inputs[:2], targets, bias=inputs[2])
        return gradients(loss, tuple(x for x in inputs if x is not None and x.requires_grad))

    with three_products(rows):
        both = found(e, c, bias)
        alone = [*found(e, c.detach(), bias.detach()), *found(e.detach(), c, bias.detach())]
        alone += found(e.detach(), c.detach(), bias)
        buffer = torch.zeros(c.shape, device=device)
        linear_cross_entropy(e, c, targets, main_grad_c=buffer).backward()
        plain = found(e, c, None)
        loss, stats = linear_cross_entropy(e, c, targets, bias=bias, return_stats=True)
        again = gradients(loss, (e, c, bias))
    assert [value.item() for value in stats.values()] == [1, 0, 0, 0, 1]  # nothing was dropped
    for others in (again, alone):
        assert all(torch.equal(a, b) for a, b in zip(others, both, strict=True))
    assert c.grad is None
    assert torch.equal(buffer.to(BF16), plain[1])


# share of ignored rows, rows of a chunk, parts of w C, options
SKIPPED_ROWS = {
    "half": (0.5, 512, 1, {"return_metrics": True}),
    "half_in_parts": (0.5, 512, 2, {"z_loss": 1e-2}),
    "half_side_by_side": (0.5, 512, 0, {}),
    "half_in_chunks": (0.5, 128, 1, {"softcap": 9.0, "return_metrics": True}),
    "all": (1.0, 512, 1, {}),
    "row_losses": (0.7, 512, 1, {"reduction": "none", "token_weights": True}),
    "main_grad": (0.4, 128, 1, {"main_grad_c": True}),
    "compiled": (0.5, 128, 1, {"compiled": True}),
}
INTERPRETED_SKIPS = ("half_in_parts", "half_in_chunks", "all", "row_losses", "main_grad")


@devices_with("name", [], INTERPRETED_SKIPS, on_gpu=SKIPPED_ROWS)
def test_ignored_rows_are_left_out_of_the_products(name, device, monkeypatch):
    from cce_kernels.backends import with_triton
    from cce_kernels.schemes import last_chunk

    share, rows, splits, options = SKIPPED_ROWS[name]
    monkeypatch.setattr(with_triton, "plan", lambda *_: planner.Plan(rows=rows, columns=256))
    monkeypatch.setattr(last_chunk, "splits_alone", lambda *_: splits)
    dim = 72 if rows == 128 else 128  # rows that straddle lines of 128 bytes, too
    n_rows, vocab = (200, 391) if INTERPRETED else (300, 700)
    e, c, targets, _ = draw(Case("skipped", shape=(n_rows,), dim=dim, vocab=vocab, dtype=BF16, peak=3), device)
    g = torch.Generator().manual_seed(1)
    targets[(torch.rand(n_rows, generator=g) < share).to(device)] = -100
    weights = torch.rand(n_rows, generator=g).to(device) if options.get("token_weights") else None
    buffer = bool(options.get("main_grad_c"))
    upstream = torch.rand(n_rows, generator=g).to(device) if options.get("reduction") == "none" else 1.0
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    function = compiled if options.get("compiled") else linear_cross_entropy
    options = {k: v for k, v in options.items() if k not in ("token_weights", "main_grad_c", "compiled")}

    def results(least: int) -> list[Tensor]:
        if function is compiled:
            torch._dynamo.reset()  # a compiled graph would keep the other decision
        monkeypatch.setattr(planner, "LEAST_SKIPPED", least)
        main = torch.zeros(c.shape, device=device) if buffer else None
        found = function(e, c, targets, main_grad_c=main, token_weights=weights, **options)
        loss, *metrics = found if isinstance(found, tuple) else (found,)
        grads = torch.autograd.grad((loss * upstream).sum(), [e] if buffer else [e, c], allow_unused=True)
        return [loss, *grads, *([] if main is None else [main]), *(x for found in metrics for x in found.values())]

    skipped, again, every = results(0), results(0), results(2**60)
    for x, same, whole in zip(skipped, again, every, strict=True):
        assert torch.equal(x, same)
        assert torch.isfinite(x).all()
        assert error(x, whole.double()) < (1e-6 if x.numel() < 1000 else 3e-3)
    ignored = targets == -100
    assert not skipped[1][ignored].any()


# dtype of dE and dC, and whether dC is added to a buffer
APART = {"fp32": (FP32, FP32, False), "autocast": (BF16, FP32, False), "main_grad": (FP32, FP32, True)}


@kernels
@pytest.mark.parametrize("name", APART)
def test_fp32_gradients_from_recomputed_logits_do_not_round_the_targets(name, device, monkeypatch):
    """Four products on flat logits, with ignored rows, several chunks and shared targets.

    The targets' entries are most of the gradient. Its error is below a third of that of a 16-bit softmax − onehot.
    """
    from cce_kernels.backends import with_triton

    dtype_e, dtype_c, main_grad = APART[name]
    monkeypatch.setattr(with_triton, "plan", lambda *_: planner.Plan(rows=0, columns=256))
    e, c, targets = draw_stored(Stored("flat", dim=72), device)
    e = (0.05 * torch.randn(e.shape, generator=torch.Generator().manual_seed(0))).to(BF16)
    e, c = e.to(device, dtype_e).requires_grad_(), c.detach().to(dtype_c).requires_grad_()
    options = {"reduction": "sum", "z_loss": 1e-3, "logit_scale": 1.2}
    wide = in_fp64(e, c)
    want = gradients(0.3 * reference_linear_cross_entropy(*wide, targets, **options)[0], wide)
    with rounded_logit_gradients():
        rounded = gradients(0.3 * reference_linear_cross_entropy(*wide, targets, **options)[0], wide)
    buffer = torch.ones(c.shape, device=device) if main_grad else None
    with torch.autocast(e.device.type, BF16):
        loss = linear_cross_entropy(e, c, targets, main_grad_c=buffer, **options)
    (0.3 * loss).backward()
    for got, base, true in zip((e.grad, c.grad if buffer is None else buffer - 1), rounded, want, strict=True):
        if got.dtype == FP32:
            assert error(got, true) <= error(base, true) / 3
        else:  # one rounding of the whole
            assert error(got, true) <= 1.05 * error(true.to(got.dtype), true)


@interpreted
@pytest.mark.parametrize("depth", [32 * 100, 32 * 256 - 5])  # steps of 32 terms, in series of 16
@pytest.mark.parametrize("transposed", [False, True])
def test_long_sums_in_fp32_err_less_than_terms_added_one_after_another(depth, transposed):
    from cce_kernels.runtime.tiles import aligned
    from cce_kernels.triton.matmul import product

    g = torch.Generator().manual_seed(0)
    a, b = torch.rand(64, depth, generator=g), torch.rand(depth, 64, generator=g)
    found, truth = torch.empty(64, 64), a.double() @ b.double()
    product(aligned(a.T.contiguous() if transposed else a), aligned(b), found, transpose_a=transposed)
    one_sum = torch.zeros(64, 64)
    for first in range(0, depth, 32):
        one_sum += a[:, first : first + 32] @ b[first : first + 32]
    error, error_of_one = ((x.double() - truth).norm() / truth.norm() for x in (found, one_sum))
    assert error < 0.6 * error_of_one


@kernels
def test_an_ignored_rows_upstream_gradient_may_be_nan(device):
    """As with four products, and with torch.nn.functional.cross_entropy."""
    e, c, targets = draw_stored(Stored("ignored"), device)
    weights = torch.where(targets < 0, torch.nan, 0.5)
    with three_products(384):
        loss = linear_cross_entropy(e, c, targets, reduction="none")
        found = torch.autograd.grad(loss, (e, c), weights)
        want = gradients(0.5 * linear_cross_entropy(e, c, targets, reduction="sum"), (e, c))
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert not found[0][targets < 0].any()


@kernels
def test_a_shard_that_a_bias_masks_gets_no_gradient(device):
    """Every entry of this rank's shard is ruled out; another rank holds the targets."""
    from cce_kernels.backends import with_triton
    from cce_kernels.options import Options
    from cce_kernels.runtime.tiles import aligned
    from cce_kernels.schemes import three_products as scheme

    e, c, _ = (x.detach() for x in draw_stored(Stored("masked"), device))
    e, c = aligned(e[:70].contiguous()), aligned(c[:96].contiguous())
    bias = torch.full((96,), -torch.inf, device=device)
    columns = torch.arange(96, 166, device=device)  # of the other rank
    ends = torch.tensor([96, 391], device=device)
    found = []

    def settle(chunk, rows, gradient):
        other = torch.stack((torch.full_like(rows.lse, 2.0), torch.full_like(rows.lse, 0.5)))
        every = torch.stack((torch.stack((rows.lse, rows.nll)), other))
        with_triton.settle(every, ends, 0, columns[chunk], rows, gradient, Options())
        found.append((rows.lse.clone(), rows.nll.clone(), gradient.factor.clone(), gradient.coefficient.clone()))

    dtypes = (torch.float32, torch.float32, torch.float32)
    standing = torch.arange(70, device=device)
    _, held, sums = scheme.forward(e, c, standing, 384, dtypes, False, Options(), settle, bias=bias)
    scheme.backward(e, c, standing, torch.ones((), device=device), 384, held, sums, None, Options())
    [(lse, nll, factor, coefficient)] = found
    torch.testing.assert_close(lse, torch.full_like(lse, 2.0))
    torch.testing.assert_close(nll, torch.full_like(nll, 0.5))
    assert not factor.any()
    assert not coefficient.any()
    assert not any(x.any() for x in (sums.grad_e, sums.grad_c, sums.grad_bias))
