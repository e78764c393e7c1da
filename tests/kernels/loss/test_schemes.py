"""The planner's choices, from shapes and dtypes alone: no Triton, no GPU."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median

import pytest
import torch
from cce_kernels import planner
from cce_kernels.options import DEFAULT_WORKSPACE_MIB, MIB, Options
from cce_kernels.planner import MOST_DEFAULT_MIB, ROW_MULTIPLE, SLOWER, Plan, Problem, plan, stored_bytes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [
    (131072, 4096, 262144), (65536, 2048, 151936), (8192, 2304, 256000), (32768, 1024, 32000), (4096, 8192, 500000),
    (2048, 4096, 128256), (600, 64, 500),
]  # fmt: skip


def chosen(
    shape: tuple[int, int, int], grad_e=BF16, grad_c=BF16, main_grad=False, dtype=BF16, uniform=True, bias=False,
    sharded=False, **options,
) -> Plan:  # fmt: skip
    problem = Problem(*shape, dtype, grad_e, grad_c, main_grad, uniform, has_bias=bias, sharded=sharded)
    return plan(problem, 132, Options(**options))


def stored(shape: tuple[int, int, int], rows: int, main_grad=False, bias=False) -> tuple[int, int]:
    problem = Problem(*shape, BF16, BF16, BF16, main_grad, uniform=True, has_bias=bias)
    return stored_bytes(problem, rows, 132, Options())


def products(shape: tuple[int, int, int], rows: int) -> float:
    return 3 + planner.CHUNK_COST * (-(-shape[0] // rows) - 1) / shape[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_default_takes_no_more_memory_than_the_logits_and_at_most_two_gib(shape):
    n_rows, dim, vocab = shape
    found = chosen(shape)
    if found.rows:
        exponentials, beside = stored(shape, found.rows)
        small = 2 * n_rows * dim if found.rows >= n_rows else 0  # one chunk's e times its factors
        assert exponentials + beside <= 2 * n_rows * vocab + small
        assert exponentials <= MOST_DEFAULT_MIB * MIB
    else:
        assert 2 * n_rows * found.columns <= max(DEFAULT_WORKSPACE_MIB * MIB, 2 * n_rows * 256)


def test_the_default_is_close_to_the_fastest_and_takes_less_memory_where_that_costs_little():
    for shape in ((4096, 4096, 128256), (2048, 2048, 32000), (8192, 5120, 32000)):  # few rows: chunks cost much
        assert chosen(shape).rows >= shape[0]
    shape = (131072, 512, 32000)
    rows = chosen(shape).rows
    assert products(shape, rows) <= SLOWER * 3 < products(shape, rows - 2 * ROW_MULTIPLE)
    shape = (16384, 2048, 128256)  # 4 GiB of logits
    assert chosen(shape).rows == 8192
    assert products(shape, 8192) <= SLOWER * 3 < products(shape, 5504)
    shape = (8192, 2304, 256000)
    assert chosen(shape).rows == 4096  # the fastest that the limit of 2 GiB allows
    assert 0.9 * MOST_DEFAULT_MIB <= 2 * 4096 * shape[2] / MIB <= MOST_DEFAULT_MIB


def test_the_default_takes_no_more_memory_than_the_logits_where_operands_are_copied():
    shape = (n_rows, dim, vocab) = (5120, 1000, 50304)
    copies = 2 * (n_rows + vocab) * 1024
    one, rows = sum(stored(shape, n_rows)) + copies, chosen(shape).rows
    assert one > 1.2 * 2 * n_rows * vocab
    assert rows == n_rows // 2
    assert sum(stored(shape, rows)) + copies <= 2 * n_rows * vocab
    assert products(shape, rows) <= planner.SLOWER_WITH_COPIES * 3
    assert chosen((3001, dim, vocab)).rows >= 3001  # two chunks would be larger than the logits as well
    assert chosen((n_rows, 1024, vocab)).rows == n_rows  # nothing is copied


def test_one_chunk_holds_its_exponentials_and_nothing_beside_them_but_for_short_or_odd_rows():
    n_rows, dim, vocab = shape = (4096, 4096, 128256)
    assert stored(shape, n_rows) == (2 * n_rows * vocab, 0)
    assert stored((512, 4096, 128256), 512) == (2 * 512 * 128256, 2 * 512 * 4096)  # two splits of w C lie in dC
    assert stored((512, 4096, 1024), 512)[1] == 2 * 512 * 4096 + 2 * 4 * 512 * 4096  # dC is too small for them
    assert stored((n_rows, 1000, vocab), n_rows)[1] == 2 * n_rows * 1024  # no rows of whole lines
    assert stored(shape, n_rows, main_grad=True)[1] == 2 * vocab * dim
    assert stored(shape, n_rows, bias=True)[1] == 4 * vocab  # its gradient's sum


@pytest.mark.parametrize(("grad_e", "grad_c"), product((None, BF16, FP16, FP32), repeat=2), ids=str)
@pytest.mark.parametrize("main_grad", [False, True])
def test_exponentials_are_stored_only_for_gradients_that_can_hold_their_sums(grad_e, grad_c, main_grad):
    found = chosen(SHAPES[2], grad_e, grad_c, main_grad)
    holds_c = grad_c != FP16 or main_grad  # a buffer is added to from a sum in bf16
    assert bool(found.rows) == (grad_e != FP16 and holds_c)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("workspace_mib", [None, 4096, 2**17])
def test_rows_with_gradients_of_their_own_take_three_products_where_one_chunk_fits(shape, workspace_mib):
    n_rows, _, vocab = shape
    found = chosen(shape, uniform=False, workspace_mib=workspace_mib)
    fits = 2 * n_rows * vocab <= (workspace_mib or MOST_DEFAULT_MIB) * MIB
    small = shape == SHAPES[-1]  # launches decide
    assert found.rows == (-(-n_rows // ROW_MULTIPLE) * ROW_MULTIPLE if fits and not small else 0)


@pytest.mark.parametrize(
    ("options", "stores"),
    [
        ({"label_smoothing": 0.1}, True),
        ({"label_smoothing": 0.1, "softcap": 30.0}, False),
        ({"sharded": True}, True),
        ({"sharded": True, "label_smoothing": 0.1}, False),
        ({"bias": True}, True),
        ({"bias": True, "logit_scale": 0.0}, False),  # its gradient is divided by the scale
        ({"bias": True, "dtype": FP32}, False),
    ],
    ids=str,
)
def test_which_options_take_three_products(options, stores):
    assert bool(chosen(SHAPES[2], **options).rows) == stores
    assert options.keys() != {"label_smoothing"} or chosen(SHAPES[2], **options) == chosen(SHAPES[2])


# ------------------------------------------------------------------------------------------------- filter_if_faster
FILTER = {"filter_eps": 2.0**-12, "filter_unbiased": True}
# Shapes whose rows differ most between logits and GPUs, of which the planner sees neither: 0.61 to 0.82. On logits of a
# model after 512 steps the filter took 0.75, and 0.81 without a sample.
TRAINED = "pilot-gla-350m-cce_kahan-text-v131072-tokenizer_0c254b0c-path_1ddf398a-5d6322eb-s0-step_512-16384"
BEYOND = ("4096x7168x129280", "4096x8192x128256", TRAINED)
ROWS = sorted((Path(__file__).parents[3] / "results" / "bench_loss").glob("*/rows.jsonl"))


def if_faster(shape: tuple[int, int, int], **options) -> Plan:
    """The plan of a filter that need be faster, after a check that it is one of the two plans that it chooses from."""
    found = chosen(shape, **FILTER | {"filter_if_faster": True} | options)
    rest = {name: value for name, value in options.items() if not name.startswith("filter")}
    assert found == (replace(chosen(shape, **rest), exact=True) if found.exact else chosen(shape, **FILTER | options))
    assert bool(found.capacity) != found.exact
    return found


LARGE = [(8192, 2304, 256000), (16384, 2048, 128256), (4096, 4096, 128256), (16384, 2048, 65536)]
SMALL = [(16384, 256, 32000), (32768, 1024, 32000), (2048, 2048, 32000), (512, 4096, 128256), (600, 64, 500)]
FILTERS = ({}, {"filter_unbiased": False}, {"workspace_mib": 256}, {"grad_c": None, "main_grad": True})
EXACT = (  # long lists, no lists, what lists do not serve, a gradient that nobody wants
    {"filter_eps": 2.0**-15}, {"filter_c": False}, {"softcap": 30.0}, {"dtype": FP32}, {"dtype": FP16},
    {"grad_e": None}, {"grad_c": None},
)  # fmt: skip


@pytest.mark.parametrize("shape", [*LARGE, *SMALL], ids=str)
def test_a_filter_that_need_be_faster_is_taken_on_large_vocabularies_alone(shape):
    assert all(if_faster(shape, **options).exact == (shape in SMALL) for options in FILTERS)
    assert all(if_faster(shape, **options).exact for options in EXACT)
    assert not chosen(shape, **FILTER).exact


def test_more_rows_never_leave_out_a_filter_until_its_lists_fill_the_workspace():
    for dim, vocab in ((2048, 128256), (1024, 256000), (4096, 65536)):
        left_out = [if_faster((rows, dim, vocab)).exact for rows in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)]
        assert left_out == sorted(left_out, reverse=True)
        assert len(set(left_out)) == 2


def test_no_committed_row_is_slower_with_a_filter_that_need_be_faster():
    """The filter beside the exact loss of the same run, round by round. Rows that were exact themselves say nothing."""
    pairs = []
    for path in ROWS:
        rows = map(json.loads, path.read_text().splitlines())
        rows = [row for row in rows if row["forward_backward_ms"] and row["gradients"] == "bf16"]
        exact = {
            (r["shape"], r["logits"], r["set"], r["run"]): r
            for r in rows
            if r["backend"] == "cce_kahan" and r["workspace_mib"] is None
        }
        for row in rows:
            words = row["backend"].split()
            against = exact.get((row["shape"], row["logits"], row["set"], row["run"]))
            if words[0] != "cce_filter" or against is None or "filter_mass" in row["backend"]:
                continue
            given = {name: json.loads(value) for name, value in (word.split("=") for word in words[1:])}
            found = if_faster((row["n"], row["d"], row["v"]), **given)
            times = [r["rounds_ms"] or [r["forward_backward_ms"]] for r in (row, against)]  # some hold the median alone
            ratio = median(own / other for own, other in zip(*times, strict=True))
            if row["shape"] in BEYOND:
                assert not found.exact
                assert ratio < 1 - planner.FILTER_SAVES, "what the rule promises"
            else:
                pairs.append((found.exact, ratio))
    taken, left_out = ([ratio for exact, ratio in pairs if exact == kind] for kind in (False, True))
    assert len(taken) > 30
    assert max(taken) < 0.75
    assert len(left_out) > 15
    assert min(left_out) > 0.75
