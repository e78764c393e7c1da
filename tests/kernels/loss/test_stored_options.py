"""Three products with every option that they serve, by the kernels in Triton's interpreter and on a GPU."""

import pytest
import torch
from cases import gradients
from cce_kernels import linear_cross_entropy
from everywhere import PLACES
from stored_cases import STORED_OPTIONS, Stored, check, draw, three_products

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
