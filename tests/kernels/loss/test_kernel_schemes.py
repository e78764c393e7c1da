"""The schemes with three and with four products in Triton, interpreted and on a GPU: stored exponentials, sums."""

import pytest
import torch
from cases import (
    APART,
    SKIPPED_ROWS,
    STORED,
    check_one_chunk,
    check_skipped_rows,
    check_small_workspace,
    check_stored,
    check_stored_options,
    check_sums,
    check_targets_apart,
)
from cce_kernels import linear_cross_entropy
from everywhere import kernels
from triton_interpreter import MARKS


def interpreted(test):
    """Runs the test in the interpreter alone."""
    for mark in MARKS:
        test = mark(test)
    return test


@kernels
def test_kahan_sums_over_many_chunks_as_well_as_fp32(device):
    chunks, rows = (256, 512) if device == "cuda" else (8, 32)
    check_sums(chunks=chunks, rows=rows, device=device)


@kernels
def test_a_workspace_too_small_is_refused_before_backward_with_the_least_that_will_do(device):
    check_small_workspace(device, (4096, 16), 600)


@kernels
@pytest.mark.parametrize("arguments", STORED.values(), ids=STORED)
def test_stored_exponentials_are_as_exact_as_fp32_logits(device, arguments):
    check_stored(device, *arguments)


@kernels
def test_stored_exponentials_through_the_public_function(device, monkeypatch):
    check_stored_options(device, monkeypatch, chunk=512 if device == "cuda" else 128)


@kernels
def test_one_chunk_needs_no_memory_for_scaled_rows(device, monkeypatch):
    check_one_chunk(device, monkeypatch)


@kernels
@pytest.mark.parametrize("arguments", SKIPPED_ROWS.values(), ids=SKIPPED_ROWS)
def test_ignored_rows_are_left_out_of_the_products(device, arguments, monkeypatch):
    check_skipped_rows(device, monkeypatch, *arguments)


@kernels
@pytest.mark.parametrize("arguments", APART.values(), ids=APART)
def test_fp32_gradients_from_recomputed_logits_do_not_round_the_targets(device, arguments):
    check_targets_apart(device, *arguments)


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


@interpreted
def test_casts_to_bf16_round_also_after_the_types_hash_has_changed(monkeypatch):
    """quick_interpreter.py changes it, before or after the interpreter is mended."""
    pytest.importorskip("cce_kernels.runtime.tiles")  # mends it
    core, interpreter = pytest.importorskip("triton.language").core, pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(core.dtype, "__hash__", lambda self: hash((self.name, "anew")))
    up = torch.tensor([1 + 2**-8 + 2**-12])  # rounds to 1 + 2^-7; truncated it is 1
    bits = interpreter._convert_float(up.numpy(), core.float32, core.bfloat16, None)
    assert torch.equal(torch.from_numpy(bits.view("int16")).view(torch.bfloat16), up.bfloat16())


@interpreted
@pytest.mark.parametrize(("n_rows", "vocab", "of_c"), [(64, 512, [False, True]), (512, 256, [True, False])])
def test_of_two_products_side_by_side_the_one_with_longer_tiles_is_launched_first(n_rows, vocab, of_c, monkeypatch):
    """A tile of dC sums over rows, one of dE over columns. fp16 takes four products, here in one chunk."""
    from cce_kernels.schemes import four_products

    seen = []

    def recorded(*arguments, **named):
        seen.append((named.get("transpose_a", False), named["beside"]))
        product(*arguments, **named)

    product = four_products.product
    monkeypatch.setattr(four_products, "product", recorded)
    g = torch.Generator().manual_seed(0)
    e, c = (torch.randn(rows, 16, generator=g).half().requires_grad_() for rows in (n_rows, vocab))
    linear_cross_entropy(e, c, torch.randint(vocab, (n_rows,), generator=g)).backward()
    assert seen == list(zip(of_c, [False, True], strict=True))
