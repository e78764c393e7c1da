"""Three products with every option that they serve, by the kernels in Triton's interpreter and on a GPU."""

import pytest
import torch
from cases import gradients
from cce_kernels import linear_cross_entropy
from everywhere import PLACES
from stored_cases import STORED_OPTIONS, Stored, bias_of, check, draw, three_products

devices = pytest.mark.parametrize(
    "device",
    [pytest.param(device, marks=marks, id=place) for place, (device, marks) in PLACES.items() if place != "cpu"],
)


@devices
@pytest.mark.parametrize("case", STORED_OPTIONS, ids=str)
def test_options_take_three_products_and_are_as_exact_as_fp32_logits(case, device):
    check(case, device)


@devices
def test_an_ignored_rows_upstream_gradient_may_be_nan(device):
    """As with four products, and with torch.nn.functional.cross_entropy."""
    e, c, targets = draw(Stored("ignored"), device)
    weights = torch.where(targets < 0, torch.nan, 0.5)
    with three_products(384):
        loss = linear_cross_entropy(e, c, targets, reduction="none")
        found = torch.autograd.grad(loss, (e, c), weights)
        want = gradients(0.5 * linear_cross_entropy(e, c, targets, reduction="sum"), (e, c))
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert not found[0][targets < 0].any()


@devices
def test_row_losses_of_a_compiled_program_get_gradients_of_their_own(device):
    e, c, targets = draw(Stored("compiled"), device)
    upstream = torch.linspace(-1, 1, len(targets), device=device)

    def program(e, c):
        rows, lse = linear_cross_entropy(2 * e, c, targets, reduction="none", return_lse=True)
        return (rows * upstream).sum() + (lse * upstream.flip(0)).sum()

    torch._dynamo.reset()
    with three_products(384):
        backend = "inductor" if device == "cuda" else "aot_eager"
        found = gradients(torch.compile(program, backend=backend, fullgraph=True)(e, c), (e, c))
        want = gradients(program(e, c), (e, c))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)


@devices
@pytest.mark.parametrize("rows", [128, 384])  # several chunks, and one
def test_a_bias_gets_the_same_bits_alone_and_again(rows, device):
    case = Stored("alone", bias=True)
    e, c, targets = draw(case, device)
    bias = bias_of(case, device)
    targets = targets.masked_fill((targets == 3) | (targets == 380), 5)
    with three_products(rows):
        both = [gradients(linear_cross_entropy(e, c, targets, bias=bias), (e, c, bias)) for _ in range(2)]
        (alone,) = gradients(linear_cross_entropy(e.detach(), c.detach(), targets, bias=bias), (bias,))
        frozen = gradients(linear_cross_entropy(e, c, targets, bias=bias.detach()), (e, c))
    for first, again in zip(*both, strict=True):
        assert torch.equal(first, again)
    assert torch.equal(alone, both[0][2])
    assert all(torch.equal(a, b) for a, b in zip(frozen, both[0], strict=False))


@devices
def test_a_bias_of_a_compiled_program(device):
    case = Stored("compiled", {"label_smoothing": 0.1}, bias=True)
    e, c, targets = draw(case, device)
    bias = bias_of(case, device).detach().clamp(min=-9).requires_grad_()

    def program(e, c, bias):
        return 3 * linear_cross_entropy(2 * e, c, targets, bias=bias, **case.options)

    torch._dynamo.reset()
    with three_products(128):
        backend = "inductor" if device == "cuda" else "aot_eager"
        found = gradients(torch.compile(program, backend=backend, fullgraph=True)(e, c, bias), (e, c, bias))
        want = gradients(program(e, c, bias), (e, c, bias))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)


@devices
def test_a_shard_that_a_bias_masks_gets_no_gradient(device):
    """Every entry of this rank's shard is ruled out; another rank holds the targets."""
    from cce_kernels.backends import with_triton
    from cce_kernels.options import Options
    from cce_kernels.runtime.tiles import aligned
    from cce_kernels.schemes import three_products as scheme

    e, c, _ = (x.detach() for x in draw(Stored("masked"), device))
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
