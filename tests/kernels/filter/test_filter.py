"""The filter: gradients and statistics are those of its rule, in torch, by the kernels in the interpreter, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import cases
import pytest
import torch
from cases import BF16, FP16, FP32, IGNORE, Case, draw, error, gradients, in_fp64, torch_path
from cce_kernels import PRESETS, linear_cross_entropy, reference_linear_cross_entropy
from cce_kernels.filter import rule as filter_rule
from cce_kernels.filter.rule import Rule
from cce_kernels.options import Options
from cce_kernels.runtime.interpreter import INTERPRETED
from everywhere import devices, devices_with, interpreted, on
from torch import Tensor

SMALL = (20, 24, 500)  # rows, dimensions, vocabulary: half of the rows, where their number is not what is tested
BAND = 2.0**-8  # lists decide on probabilities of 8 bits


# Small blocks of rows and chunks of columns, so that there are several
BLOCKS = {"rule.TILE_ROWS": 16, "rule.TWO_WAVES": 1, "sample.tail_width": lambda *_: 16}


@dataclass(frozen=True)
class Filtered:
    """A call with a filter. overflows: the lists, if there are any, are too short for it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, int, int] = (40, 24, 500)  # rows, dimensions, vocabulary
    peak: float = 9.0
    bias: bool = False
    overflows: bool = False

    def __str__(self) -> str:
        return self.name


UNBIASED = {"filter_unbiased": True}
SHORT = UNBIASED | {"filter_eps": 2.0**-9.5, "workspace_mib": 0.14, "accumulate": "fp32"}
FILTERED = [
    Filtered("threshold"),
    Filtered("threshold_bias", bias=True),
    Filtered("threshold_softcap", {"softcap": 9.0}),
    Filtered("threshold_e_only", {"filter_c": False}),
    Filtered("threshold_c_only", {"filter_e": False}),
    Filtered("threshold_sparse", peak=40),
    Filtered("unbiased", UNBIASED),
    Filtered("unbiased_bias", UNBIASED, bias=True),
    Filtered("unbiased_e_only", UNBIASED | {"filter_c": False}),
    Filtered("unbiased_scaled", UNBIASED | {"logit_scale": 0.7, "z_loss": 1e-2}),
    Filtered("unbiased_wide", UNBIASED, shape=(20, 1100, 500)),
    Filtered("unbiased_many_segments", UNBIASED, shape=(9, 16, 17000)),
    Filtered("mass", {"filter_mass": 0.2}),
    Filtered("mass_unbiased", UNBIASED | {"filter_mass": 0.1}),
    Filtered("mass_never_reached", UNBIASED | {"filter_mass": 0.999}),
    Filtered("short_lists", SHORT, peak=0, overflows=True),
    Filtered("short_lists_kahan", SHORT | {"accumulate": "kahan"}, peak=0, overflows=True),
    Filtered("short_slots", {"filter_eps": 2.0**-16}, shape=(5, 16, 9001), peak=0, overflows=True),
]


INTERPRETED_CASES = (
    "threshold", "threshold_e_only", "unbiased", "unbiased_scaled", "mass_unbiased", "short_lists", "short_lists_kahan",
)  # fmt: skip


@devices_with(
    "case", list(product(FILTERED, (BF16, FP32))),
    [(case, BF16) for case in FILTERED if case.name in INTERPRETED_CASES], on_gpu=list(product(FILTERED, (FP16,))),
)  # fmt: skip
def test_gradients_and_statistics_are_those_of_the_rule(case, device):
    check_filtered(*case, device)


def check_filtered(case: Filtered, dtype: torch.dtype, device: str) -> None:
    """Gradients agree with the fp64 reference with the same filter, and statistics with its numbers.

    Entries within 2^-8 of the threshold may be kept or dropped; the tolerance allows for them.
    """
    e, c, targets, bias = drawn(case, dtype, device)
    options = {"filter_eps": 2.0**-8} | case.options
    eps = options["filter_eps"]
    loss, stats = linear_cross_entropy(e, c, targets, bias=bias, return_stats=True, **options)
    assert all(value.isnan() for value in stats.values())
    grads = gradients(loss, (e, c, bias))
    if case.overflows and dtype == BF16:
        assert overflown(e, c, targets, options) is not False

    inputs = in_fp64(e, c, bias)
    plain = {k: v for k, v in case.options.items() if not k.startswith("filter")}
    exact = gradients(reference(inputs, targets, plain)[0], inputs)
    base = gradients(torch_path(e, c, targets, bias, **plain), (e, c, bias))
    wanted = [
        gradients(reference(inputs, targets, options | {"filter_eps": x})[0], inputs)
        for x in (eps, eps * (1 + BAND), eps * (1 - BAND))
    ]
    for name, grad, want, more, less, unfiltered, torchs in zip(
        ("e", "c", "bias"), grads, *wanted, exact, base, strict=False
    ):
        band = ((more - less).norm() / want.norm()).item()
        assert error(grad, want) <= 2 * error(torchs, unfiltered) + band + 1e-6, name

    dropped = figures(inputs, targets, options)[1]
    least, most = (figures(inputs, targets, options | {"filter_eps": eps * x})[0] for x in (1 + BAND, 1 - BAND))
    assert least.mean() * 0.999 - 1e-6 <= stats["entries_kept"].item() <= most.mean() * 1.001 + 1e-6
    assert abs(stats["dropped_mass_mean"].item() - dropped.mean().item()) < 4e-3
    assert abs(stats["dropped_mass_max"].item() - dropped.max().item()) < 2e-2
    assert stats["dropped_mass_mean"] <= stats["dropped_mass_p99"] <= stats["dropped_mass_max"]
    if "filter_mass" in options:
        assert stats["dropped_mass_max"] <= options["filter_mass"]
        assert stats["exact"] == (options["filter_mass"] < 0.9)


def drawn(case: Filtered, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    n_rows, dim, vocab = case.shape
    wide = Case("filtered", shape=(n_rows,), dim=dim, vocab=vocab, peak=case.peak, bias=case.bias, dtype=dtype)
    e, c, targets, bias = draw(wide, device)
    targets[::2] = targets[::2].roll(1)  # improbable targets
    return e, c, targets, bias


def reference(inputs: list[Any], targets: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    e, c, bias = inputs
    known = {k: v for k, v in options.items() if k not in ("workspace_mib", "accumulate")}
    return reference_linear_cross_entropy(e, c, targets, bias=bias, **known)


def figures(inputs: list[Any], targets: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Share of kept entries, and dropped mass of each row that counts, in fp64."""
    e, c, bias = (None if x is None else x.detach() for x in inputs)
    o = Options(**{k: v for k, v in options.items() if k != "workspace_mib"})
    z = o.logit_scale * (e @ c.T) + (0 if bias is None else bias)
    p = torch.softmax(z if o.softcap is None else o.softcap * torch.tanh(z / o.softcap), dim=1)
    entries = torch.arange(c.shape[0], device=c.device)
    columns = torch.where(targets == IGNORE, -1, targets)
    stays = Rule.of(columns, filter_rule.mean_logits(e, c, bias, columns, o), o).keeps(p, entries)
    stays |= targets[:, None] == entries
    dropped = torch.where(stays, 0, p).sum(dim=1)
    counts = targets != IGNORE
    if o.filter_mass is not None and (dropped[counts] > o.filter_mass).any():
        stays[:], dropped[:] = True, 0
    return stays[counts].double().mean(dim=1), dropped[counts]


def overflown(e: Tensor, c: Tensor, targets: Tensor, options: dict[str, Any]) -> bool | None:
    """Whether the lists of a call are too short; None if it uses no lists."""
    if not e.is_cuda and not INTERPRETED:
        return None
    from cce_kernels.backends import with_triton
    from cce_kernels.filter import select
    from cce_kernels.planner import Problem

    o = Options(**options)
    problem = Problem(e.shape[0], e.shape[1], c.shape[0], BF16, BF16, BF16, False, True, False)
    capacity = with_triton.plan(problem, e, o).capacity
    assert capacity
    columns = torch.where(targets == IGNORE, -1, targets)
    _, state = select.forward(
        with_triton.prepare(e.detach(), e.dtype), with_triton.prepare(c.detach(), c.dtype), columns, capacity, False, o
    )
    return bool(select.Lists.of(state).void)


@devices
@pytest.mark.parametrize("unbiased", [False, True])
def test_adversarial_rows(unbiased, device):
    """All mass on one entry (target or not), uniform rows, two ties, logits of ±1e4, and one NaN row alone."""
    dim, vocab = 32, 600
    c = torch.zeros(vocab, dim)
    c[torch.arange(vocab), torch.arange(vocab) % (dim - 2)] = 1.0
    c[7, dim - 2], c[[8, 9], dim - 1] = 100.0, 100.0
    e = torch.zeros(8, dim)
    e[0, dim - 2] = e[1, dim - 2] = 1.0  # entry 7 has it all: the target of row 0, not of row 1
    e[2, dim - 1] = 1.0  # entries 8 and 9 share it
    e[3, dim - 2], e[4, dim - 2] = 100.0, -100.0  # logits ±1e4; rows 5 and 6 uniform
    e[7] = torch.nan
    targets = torch.tensor([7, 3, 8, 3, 7, 0, IGNORE, 1])
    leaves = [x.to(device, BF16).requires_grad_() for x in (e, c)]
    rows = linear_cross_entropy(*leaves, targets.to(device), filter_eps=2.0**-6, filter_unbiased=unbiased,
                                reduction="none")  # fmt: skip
    assert rows.isnan().tolist() == [False] * 7 + [True]
    grads = gradients(rows[:7].sum(), tuple(leaves))
    whole = in_fp64(*(x.detach().nan_to_num() for x in leaves))
    options = {"filter_eps": 2.0**-6, "filter_unbiased": unbiased, "reduction": "none"}
    want = gradients(reference_linear_cross_entropy(*whole, targets.to(device), **options)[0][:7].sum(), tuple(whole))
    torch.testing.assert_close(grads[0][:7].double(), want[0][:7], rtol=2e-2, atol=2e-2)
    if not grads[1].isnan().any():  # 0 · NaN is NaN in a product over rows, as in any other loss
        torch.testing.assert_close(grads[1].double(), want[1], rtol=2e-2, atol=2e-2)


@devices
def test_no_mass_may_be_dropped(device):
    e, c, targets, _ = drawn(Filtered("exact"), BF16, device)
    with_filter = linear_cross_entropy(e, c, targets, filter_eps=2.0**-6, filter_mass=0)
    without = linear_cross_entropy(e, c, targets)
    assert torch.equal(with_filter, without)
    for a, b in zip(gradients(with_filter, (e, c)), gradients(without, (e, c)), strict=True):
        assert torch.equal(a, b)


IF_FASTER: dict[str, dict[str, Any]] = {
    "preset": {"preset": "cce_filter"},
    "mass": PRESETS["cce_filter"] | {"filter_mass": 0.9},
    "dropped": PRESETS["paper/cce_kahan"] | {"filter_if_faster": True},
}


@devices_with("with_bias", [False, True], [False])
def test_a_filter_that_would_not_be_faster_is_left_out(with_bias, device):
    """On a problem too small for a filter, each of them has the bits of cce_kahan and says that it is exact.

    This holds for a second backward pass, too. Without filter_if_faster the call filters.
    """
    e, c, targets, bias = drawn(Filtered("small", shape=SMALL, bias=with_bias), BF16, device)
    inputs = (e, c) if bias is None else (e, c, bias)

    def results(**options: Any) -> tuple[list[Tensor], dict[str, float]]:
        loss, stats = linear_cross_entropy(e, c, targets, bias=bias, return_stats=True, **options)
        grads = torch.autograd.grad(loss, inputs, retain_graph=True)
        return [loss.detach(), *grads, *torch.autograd.grad(loss, inputs)], {k: v.item() for k, v in stats.items()}

    exact, _ = results(preset="cce_kahan")
    for options in [IF_FASTER["preset"]] if INTERPRETED else IF_FASTER.values():
        found, stats = results(**options)
        assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))
        assert list(stats.values()) == [1, 0, 0, 0, 1]
    always, stats = results(**PRESETS["cce_filter"] | {"filter_if_faster": False, "filter_eps": 2.0**-6})
    assert not torch.equal(always[1], exact[1])
    assert stats["exact"] == 0
    assert stats["entries_kept"] < 1


@on("cpu", "cuda")
def test_the_unbiased_rule_is_right_on_average(device):
    """Gradients averaged over draws, the same rows at different places, approach the exact ones; a threshold's do
    not."""
    n_rows, draws = 16, 256 if device == "cuda" else 64
    e, c, targets, _ = draw(Case("unbiased", shape=(n_rows,), dim=24, vocab=900, peak=3, dtype=FP32, ignored=0), device)
    e, c = (x.detach().to(BF16).requires_grad_() for x in (e, c))
    (exact,) = gradients(linear_cross_entropy(e, c, targets, reduction="sum"), (c,))
    many = [x.repeat(draws, *[1] * (x.dim() - 1)) for x in (e.detach(), targets)]

    def error_of(**options: Any) -> float:
        loss = linear_cross_entropy(many[0].requires_grad_(), c, many[1], reduction="sum", **options)
        return error(gradients(loss, (c,))[0].float() / draws, exact)

    one = linear_cross_entropy(e, c, targets, reduction="sum", filter_eps=2.0**-5, filter_unbiased=True)
    of_one = error(gradients(one, (c,))[0], exact)
    of_many = error_of(filter_eps=2.0**-5, filter_unbiased=True)
    assert of_many < 2 * of_one / draws**0.5 + 3e-3
    assert error_of(filter_eps=2.0**-5) > of_many  # which more draws make smaller still


@devices_with("dtype", [BF16, FP32], [BF16, FP32])
def test_likely_entries_are_drawn_from_smaller_groups(dtype, device, monkeypatch):
    monkeypatch.setattr(filter_rule, "MOST_HEAD", 16)
    shape = (300, 96, 3000) if device == "cuda" else (70, 24, 1100) if INTERPRETED else (90, 24, 1500)
    check_filtered(Filtered("likely", UNBIASED, shape, bias=not INTERPRETED), dtype, device)


# What is changed in cce_kernels.filter, and a case that then takes a way of its own.
ALTERED: dict[str, tuple[dict[str, Any], Filtered]] = {
    "blocks of rows and chunks of columns": (BLOCKS, Filtered("blocks", UNBIASED, SMALL)),
    "blocks, fp32 sums": (BLOCKS, Filtered("blocks", UNBIASED | {"accumulate": "fp32", "z_loss": 1e-2}, SMALL)),
    "several segments": ({"select.EIGHTS": 32, "select.FOUND": 64}, Filtered("segments", UNBIASED, (20, 16, 610))),
    "lists sorted in parts": ({"gather.ListMemory.parts": lambda _: 4}, Filtered("parts", UNBIASED, (10, 300, 330))),
    "too few slots": ({"select.SLOTS": 8}, Filtered("slots", UNBIASED, (20, 16, 610), overflows=True)),
}


@interpreted
@pytest.mark.parametrize("name", ALTERED)
def test_ways_that_small_problems_do_not_take(name, monkeypatch):
    altered, case = ALTERED[name]
    for place, value in altered.items():
        monkeypatch.setattr(f"cce_kernels.filter.{place}", value)
    check_filtered(case, BF16, "cpu")


@interpreted
def test_the_operator_returns_what_its_fake_kernel_says_of_lists_and_samples():
    e, c, targets, _ = drawn(Filtered("operator", shape=(20, 16, 300)), BF16, "cpu")
    arguments = cases.of_operator(e, c, targets, return_metrics=False, filter_eps=2.0**-6, filter_unbiased=True)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.cce_kernels_interpreted.cross_entropy.default, arguments, test_utils=checks)


@interpreted
def test_a_default_dtype_of_few_bits_rounds_no_threshold():
    eps = 2.0**-8 * (1 + 0.98 * 2.0**-8)  # 2^-8 in bf16
    cases.check_default_dtype({"filter_eps": eps, "filter_unbiased": True}, BF16, "cpu", rows=24)
