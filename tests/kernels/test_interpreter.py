"""The Triton kernels themselves, on CPU tensors in Triton's interpreter.

The interpreter is switched on when Triton is first imported, so a process of its own runs the tests below;
under TRITON_INTERPRET=1 they run in place.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from cases import (
    APART,
    BF16,
    CASES,
    DEFAULTED,
    STORED,
    Case,
    check,
    check_default_dtype,
    check_small_workspace,
    check_stored,
    check_stored_options,
    check_sums,
    check_targets_apart,
    draw,
    gradients,
)
from cce_kernels import linear_cross_entropy
from cce_kernels.options import Options
from filter_cases import (
    FILTERED,
    SHORT,
    Filtered,
    check_adversarial_rows,
    check_draws,
    check_exact_at_no_mass,
    check_figures,
    check_filtered,
    check_monotone,
    check_order_of_the_vocabulary,
    check_row_coefficients,
    drawn,
)
from hypothesis import given, settings
from random_cases import random_cases

triton = pytest.importorskip("triton")

HERE = os.environ.get("TRITON_INTERPRET") == "1"
BROKEN = triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0"
in_interpreter = pytest.mark.skipif(not HERE, reason="runs in the process that test_interpreter starts")
pytestmark = pytest.mark.skipif(BROKEN, reason="Triton 3.6's interpreter fails with numpy 2.4")


@pytest.mark.skipif(HERE, reason="the interpreter is on: the tests below run in place")
def test_kernels_are_right_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}  # more only wait for Python
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


# The interpreter is slow: in bf16 every case but those that differ before or after the kernels alone (these
# run in test_blockwise), and in the other dtypes what differs there (tiles, rounding).
OUTSIDE = ("no_ignored", "leading_dimensions", "sum", "row_losses", "shift", "mixed-bf16_fp16")
OTHERS = ("one_row", "everything", "many_chunks_kahan", "mixed-fp32_bf16")
FILTERED_HERE = (
    "threshold", "threshold_e_only", "unbiased", "unbiased_scaled", "mass_unbiased", "short_lists", "short_lists_kahan",
)  # fmt: skip
INTERPRETED_CASES = [
    case for case in CASES if (case.dtype == BF16 or case.name.startswith(OTHERS)) and not case.name.startswith(OUTSIDE)
]


@in_interpreter
@pytest.mark.parametrize("case", INTERPRETED_CASES, ids=str)
def test_loss_and_gradients_are_within_twice_torchs_error(case):
    check(case, "cpu")


@in_interpreter
@pytest.mark.parametrize("case", [case for case in FILTERED if case.name in FILTERED_HERE], ids=str)
def test_filtered_gradients_and_statistics_are_those_of_the_rule(case):
    check_filtered(case, BF16, "cpu")


@in_interpreter
def test_lists_of_several_segments_and_blocks(monkeypatch):
    monkeypatch.setattr("cce_kernels.entries.EIGHTS", 32)
    monkeypatch.setattr("cce_kernels.entries.FOUND", 64)
    check_filtered(Filtered("segments", {"filter_unbiased": True}, shape=(20, 16, 610)), BF16, "cpu")


@in_interpreter
def test_kernels_draw_what_the_rule_says():
    check_draws("cpu")


@in_interpreter
def test_kernels_report_what_the_filter_did():
    check_figures("cpu")


@in_interpreter
def test_kernels_find_the_rows_coefficients():
    check_row_coefficients("cpu")


@in_interpreter
def test_likely_entries_are_drawn_from_smaller_groups(monkeypatch):
    monkeypatch.setattr("cce_kernels.filtered.MOST_HEAD", 16)
    check_filtered(Filtered("likely", {"filter_unbiased": True}, shape=(70, 24, 1100)), BF16, "cpu")


@in_interpreter
@pytest.mark.parametrize("options", [{}, {"accumulate": "fp32", "z_loss": 1e-2}], ids=str)
def test_samples_of_several_blocks_of_rows_and_chunks_of_columns(monkeypatch, options):
    monkeypatch.setattr("cce_kernels.filtered.TILE_ROWS", 16)
    monkeypatch.setattr("cce_kernels.filtered.TWO_WAVES", 1)
    monkeypatch.setattr("cce_kernels.tail.tail_width", lambda *_: 16)
    check_filtered(Filtered("blocks", {"filter_unbiased": True} | options), BF16, "cpu")


@in_interpreter
def test_the_operator_returns_what_its_fake_kernel_says_of_lists_and_samples():
    e, c, targets, _ = drawn(Filtered("operator", shape=(20, 16, 300)), BF16, "cpu")
    o = Options(filter_eps=2.0**-6, filter_unbiased=True)
    arguments = (e, c, targets, None, None, None, -100, BF16, "mean", True, False, [True, True, False], *o.values())
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.cce_kernels.cross_entropy.default, arguments, test_utils=checks)


@in_interpreter
def test_the_way_around_the_lists_is_launched_at_first_and_then_as_needed(monkeypatch):
    """On CPU tensors nothing is ever known of the lists: here all is."""
    from cce_kernels import gather

    class Known:
        def __init__(self, flag):
            self.is_zero = lambda: flag.item() == 0

    launched, real = [], gather.gradients
    monkeypatch.setattr(gather, "gradients", lambda *args: launched.append(True) or real(*args))
    monkeypatch.setattr(gather, "Glance", Known)
    monkeypatch.setattr(gather, "_launched", set())
    e, c, targets, _ = drawn(Filtered("known"), BF16, "cpu")

    def run(e):
        launched.clear()
        loss, stats = linear_cross_entropy(e, c, targets, return_stats=True, **SHORT)
        grads = gradients(loss, (e, c))
        return bool(launched), [*grads, *stats.values()]

    (at_first, found), (again, same) = run(e), run(e)
    assert (at_first, again) == (True, False)
    assert all(torch.equal(x, y) for x, y in zip(found, same, strict=True))
    assert run((e * 0).detach().requires_grad_())[0]  # uniform rows: the lists overflow


@in_interpreter
def test_lists_sorted_in_parts(monkeypatch):
    monkeypatch.setattr("cce_kernels.gather.list_parts", lambda *_: 4)
    check_filtered(Filtered("parts", {"filter_unbiased": True}, shape=(20, 300, 610)), BF16, "cpu")


@in_interpreter
@pytest.mark.parametrize("case", [case for case in FILTERED if case.name in ("unbiased", "short_lists_kahan")], ids=str)
def test_another_backward_pass_through_lists_finds_the_same(case):
    e, c, targets, _ = drawn(case, BF16, "cpu")
    loss = linear_cross_entropy(e, c, targets, **{"filter_eps": 2.0**-8} | case.options)
    loss.backward(retain_graph=True)
    first, e.grad, c.grad = (e.grad, c.grad), None, None
    loss.backward()
    assert torch.equal(e.grad, first[0])
    assert torch.equal(c.grad, first[1])


@in_interpreter
def test_lists_too_long_for_their_slots(monkeypatch):
    monkeypatch.setattr("cce_kernels.entries.SLOTS", 8)
    check_filtered(Filtered("slots", {"filter_unbiased": True}, (20, 16, 610), overflows=True), BF16, "cpu")


@in_interpreter
@pytest.mark.parametrize("unbiased", [False, True])
def test_properties_of_the_filter(unbiased):
    check_adversarial_rows(unbiased, "cpu")
    check_monotone(unbiased, "cpu")


@in_interpreter
def test_more_properties_of_the_filter():
    check_exact_at_no_mass("cpu")
    check_order_of_the_vocabulary("cpu")


@in_interpreter
def test_the_filter_at_a_logit_scale_of_0_drops_all_but_the_target():
    e, c, targets, _ = drawn(Filtered("scale_0"), BF16, "cpu")
    loss, stats = linear_cross_entropy(e, c, targets, logit_scale=0.0, filter_eps=2.0**-6, return_stats=True)
    assert not any(grad.any() for grad in gradients(loss, (e, c)))
    share = 1 / c.shape[0]
    assert stats["entries_kept"].item() == pytest.approx(share)
    assert stats["dropped_mass_mean"].item() == pytest.approx(1 - share)


@in_interpreter
@pytest.mark.parametrize("options", [DEFAULTED["plain"], DEFAULTED["threshold"]], ids=["plain", "threshold"])
def test_the_default_dtype_changes_nothing(options):
    check_default_dtype(options, torch.float64, "cpu")


@in_interpreter
def test_a_default_dtype_of_few_bits_rounds_no_threshold():
    eps = 2.0**-8 * (1 + 0.98 * 2.0**-8)  # 2^-8 in bf16
    check_default_dtype({"filter_eps": eps, "filter_unbiased": True}, BF16, "cpu")


@in_interpreter
def test_kahan_sums_over_many_chunks_as_well_as_fp32():
    check_sums(chunks=8, rows=32, device="cpu")


@in_interpreter
def test_a_workspace_too_small_is_refused_before_backward_with_the_least_that_will_do():
    check_small_workspace("cpu", (4096, 16), 600)


@in_interpreter
def test_evaluation_needs_no_workspace():
    e, c, targets, _ = draw(Case("evaluation", shape=(5,), ignored=0), "cpu")
    want = linear_cross_entropy(e, c, targets).detach()
    with torch.no_grad():
        assert linear_cross_entropy(e, c, targets, workspace_mib=1e-6) == want


@in_interpreter
def test_a_target_outside_the_vocabulary_makes_the_loss_nan():
    """On a GPU nothing may wait for the targets: the row shows it. CPU calls raise instead."""
    from dataclasses import astuple

    from cce_kernels.operators import cross_entropy

    e, c, targets, _ = draw(Case("outside", shape=(6,), ignored=0), "cpu")
    targets[2], targets[4] = c.shape[0], -1
    nothing = (False, False, False)
    rows, lse, _ = cross_entropy(
        e, c, targets, None, None, None, -100, e.dtype, "none", False, False, nothing, *astuple(Options())
    )
    assert rows.isnan().tolist() == [False, False, True, False, True, False]
    assert lse.isfinite().all()


@in_interpreter
def test_a_bias_of_minus_infinity_masks_whole_tiles():
    e, c, _, bias = draw(Case("masked", bias=True, vocab=1300), "cpu")
    allowed = slice(700, 720)
    masked = torch.full_like(bias, -torch.inf)
    masked[allowed] = bias.detach()[allowed]
    targets = torch.randint(0, 20, e.shape[:1])
    loss = linear_cross_entropy(e, c, targets + 700, bias=masked)
    want = linear_cross_entropy(e, c[allowed], targets, bias=bias[allowed])
    torch.testing.assert_close(loss, want)
    for grad, wanted in zip(gradients(loss, (e, c)), gradients(want, (e, c)), strict=True):
        torch.testing.assert_close(grad, wanted)


@in_interpreter
@pytest.mark.parametrize("arguments", STORED.values(), ids=STORED)
def test_stored_exponentials_are_as_exact_as_fp32_logits(arguments):
    check_stored("cpu", *arguments)


@in_interpreter
def test_stored_exponentials_through_the_public_function(monkeypatch):
    check_stored_options("cpu", monkeypatch)


@in_interpreter
@pytest.mark.parametrize("arguments", APART.values(), ids=APART)
def test_fp32_gradients_from_recomputed_logits_do_not_round_the_targets(arguments):
    check_targets_apart("cpu", *arguments)


# Few draws: the interpreter is slow. test_linear_cross_entropy draws many more on the torch path.
@in_interpreter
@settings(max_examples=12, deadline=None, derandomize=True)
@given(random_cases)
def test_any_combination_of_options(case):
    check(case, "cpu", floor=1e-5)
