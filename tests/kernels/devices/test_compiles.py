"""Every kernel, as the launchers call it, compiles for every architecture within its resources. No GPU is needed.

For Hopper (9.0) every branch of every kernel, with every tile of Hopper's row.
"""

import os
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from cases import BF16, FP32, Case

pytest.importorskip("triton")

from cce_kernels.runtime.devices import SHARED_KIB
from cce_kernels.runtime.tiles import HOPPER, row_for, target
from compiling import EVERYTHING, LARGE, OF_TABLE, PLAIN, SHORT_ROWS, Plan, check_resources, launch_all, launch_lists

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled there")
# Bytes of shared memory that one program may have (CUDA C++ Programming Guide, technical specifications by compute
# capability).
SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


def small(name: str, dim: int = 512, **more: Any) -> Case:
    return Case(name, dtype=BF16, **PLAIN | {"dim": dim}, **more)


# Of the recomputing scheme. Operands of 16 and 32 bits (fp16 takes bf16's path), sizes of 1.
RECOMPUTED = [
    small("bf16", options={"workspace_mib": 1.5}),
    small("bf16-everything", bias=True, options=EVERYTHING),
    small("bf16-filter_e", bias=True, options={"filter_eps": 2**-8, "filter_c": False}),
    Case("bf16-ones", shape=(1,), dim=1, vocab=1, ignored=0, dtype=BF16),
    Case("fp32-filter", dtype=FP32, bias=True, **PLAIN, options={"softcap": 9.0, "filter_eps": 2**-8}),
]
SOFTCAPS = {"plain": None, "softcap": 20.0}
DTYPES = {"bf16": BF16, "fp32": FP32}
LISTS = {"threshold": (False, None), "unbiased": (True, None), "mass": (True, 0.1)}


def shards(softcap: float | None, with_metrics: bool) -> None:
    from cce_kernels.backends import with_triton
    from cce_kernels.options import Options
    from cce_kernels.row_math import Rows
    from cce_kernels.triton.row_stats import Gradient

    x, metrics = torch.ones(256), torch.ones(2, 256) if with_metrics else None
    every, columns = torch.ones(4, 4 if with_metrics else 2, 256), torch.ones(256, dtype=torch.int64)
    rows, gradient = Rows(x, x, None, metrics), Gradient(x, x, x, weights=x if softcap else None)
    with_triton.settle(every, columns[:4], 1, columns, rows, gradient, Options(softcap=softcap))


ON_HOPPER: dict[str, Callable[[], None]] = {
    **{f"recomputed {case}": partial(launch_all, case) for case in RECOMPUTED},
    "fp32 gradients": partial(launch_all, RECOMPUTED[0], dtypes=(FP32, FP32)),
    **{
        f"stored {dtype} {dim} {softcap}": partial(
            launch_all, small("stored", dim, options={"softcap": SOFTCAPS[softcap]}),
            dtypes=(DTYPES[dtype], DTYPES[dtype]), rows=128,
        )
        for dtype in DTYPES for dim in (512, 2048) for softcap in SOFTCAPS
    },
    **{
        f"skipped {dim} {rows}": partial(launch_all, small("skipped", dim), rows=rows, skip=True)
        for dim in (512, 2048) for rows in (128, 256)  # several chunks, one chunk
    },
    **{
        f"rows {dim}": partial(
            launch_all, small("rows", dim, options={"label_smoothing": 0.1}), rows=256, return_metrics=True,
            return_lse=True, unweighted=False,
        )
        for dim in (512, 2048)  # dE's product in parts, and whole
    },
    **{
        f"bias {rows}": partial(launch_all, small("bias", bias=True, options={"label_smoothing": 0.1}), rows=rows)
        for rows in (128, 256)  # two chunks and one
    },
    **{
        f"several {dim} {rows}": partial(launch_all, small("several", dim, several=3, bias=not rows), rows=rows)
        for dim in (512, 2048) for rows in (0, 128, 256)  # four products, two chunks and one
    },
    **{
        f"entropies {dtype} {softcap}": partial(
            launch_all, Case("entropies", dtype=DTYPES[dtype], **PLAIN), entropies=True, softcap=SOFTCAPS[softcap]
        )
        for dtype in DTYPES for softcap in SOFTCAPS
    },
    **{
        f"apart {dtype}": partial(launch_all, small("apart"), dtypes=(DTYPES[dtype], FP32)) for dtype in DTYPES
    },
    **{
        f"shards {softcap} {with_metrics}": partial(shards, SOFTCAPS[softcap], with_metrics)
        for softcap in SOFTCAPS for with_metrics in (False, True)
    },
    **{
        f"lists {dtype} {rule}": partial(launch_lists, DTYPES[dtype], *LISTS[rule])
        for dtype in DTYPES for rule in LISTS
    },
    **{f"table {name}": launch for name, launch in OF_TABLE.items()},
}  # fmt: skip


# The others are the same everywhere: with pointers and with TMA is enough.
ELSEWHERE: dict[str, Callable[[], None]] = OF_TABLE | {
    "lists": partial(launch_lists, BF16, unbiased=True, mass=None),
    "fp32": partial(launch_all, RECOMPUTED[-1]),
    "stored-rows": partial(launch_all, SHORT_ROWS, rows=256, return_lse=True),
}
CASES = {80: ELSEWHERE, 90: ON_HOPPER, 100: OF_TABLE, 120: ELSEWHERE}


@cache
def plan(capability: int) -> Plan:
    return Plan(capability, CASES[capability], LARGE if capability == 100 else None)


@pytest.mark.parametrize(("capability", "case"), [(target, case) for target, cases in CASES.items() for case in cases])
def test_kernels_compile_and_fit(capability, case):
    # Triton writes the same PTX for 8.0, 8.6 and 8.9. So one compilation must fit the least memory of the three.
    shared = min(SHARED_BYTES[c] for c in ((80, 86, 89) if capability == 80 else (capability,)))
    for launch, kernel in plan(capability).compile(case):
        name, ptx = launch.name, kernel.asm["ptx"]
        check_resources(launch, kernel, shared, row_for(target(capability)))
        if capability < 90:  # Triton turns descriptors into pointers
            assert "cp.async.bulk" not in ptx, name
        if capability != 90:
            continue
        if name.removeprefix("hopper_") in LARGE:
            assert "cp.async.bulk.tensor" in ptx, f"{name}: operands do not come through TMA"
            assert ("wgmma" in ptx) != launch.full_precision, name
        if name == "select_kernel":
            assert "ld.global.v4.b32" in ptx, "exponentials are not read by vectors"


# What a case launches, without the suffix _kernel: names that must be among them, and names that must not.
HOPPERS = "hopper_exponentials", "hopper_gradient"  # for plain operands of 16 bits
TRITONS = "exponentials", "gradient"
DRAWN = "mean", "mean_logits", "rank", "head_operands", "seed", "columns_drawn", "places", "rows_drawn", "drawn_rows"
LAUNCHED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "recomputed bf16": ((*HOPPERS, "row_coefficients", "peak", "product"), TRITONS),
    "recomputed bf16-everything": (TRITONS, HOPPERS),
    "recomputed bf16-ones": (("scaled_rows", *TRITONS), HOPPERS),
    "recomputed fp32-filter": (TRITONS, HOPPERS),
    "stored bf16 512 plain": (("hopper_exponentials", "scaled_rows", "hidden", "target_order"), ("gradient",)),
    "stored fp32 2048 softcap": (("exponentials", "loss_sum", "mean_gradient"), HOPPERS),
    "skipped 512 128": (("live_rows", "hopper_exponentials", "scaled_rows"), ("exponentials",)),
    "rows 2048": (("row_factors", "column_sum", "row_products", HOPPERS[0]), ("hopper_gradient", "exponentials")),
    "bias 256": (("bias_gradient", "column_sum", "exponentials"), HOPPERS),
    "several 512 0": (("added", "targets", "target_logits"), ()),
    "several 2048 256": (("product", "target_order", "target_logits"), ()),
    "entropies bf16 plain": (("gradient", "product"), ("hopper_gradient",)),
    "apart fp32": (("target_rows", "targets", "spilled_targets", "target_order"), ()),
    "shards softcap True": (("settle",), HOPPERS),
    "lists bf16 threshold": (("select", "collect", "kept", "gather", "gradient"), ("hopper_gradient", *DRAWN)),
    "lists bf16 unbiased": (("select", "collect", "gather", "gradient", "hopper_gradient", *DRAWN), ()),
    "lists fp32 mass": (("select", "by_column", "coefficients", "hopper_gradient", *DRAWN), ("gradient",)),
}


@pytest.mark.parametrize("case", LAUNCHED)
def test_a_case_launches_the_kernels_that_are_meant_for_it(case):
    among, absent = ({f"{name}_kernel" for name in names} for names in LAUNCHED[case])
    launched = {launch.name for launch in plan(90).launches[case]}
    assert among <= launched
    assert not absent & launched


def test_fp32_parameters_under_autocast_get_fp32_gradients_from_bf16_products():
    products = [launch for launch in plan(90).launches["fp32 gradients"] if launch.name == "product_kernel"]
    assert products
    for launch in products:
        assert launch.value("out_ptr").dtype == FP32
        assert not launch.full_precision


# They read and write 8 or 16 bytes at a time, also where D is a multiple of 8 and not of 16.
WIDE = {"target_logits_kernel", "product_kernel", "scaled_rows_kernel", "hidden_kernel"}


@pytest.mark.parametrize("rows", [256, 128], ids=["one chunk", "two chunks"])
@pytest.mark.parametrize("dim", [1000, 1024])
def test_no_kernel_moves_single_numbers_of_16_bits(dim, rows):
    """At D = 1000 every gradient was read and written 2 bytes at a time, and its rounding error 1 byte at a time."""
    case = Case("wide", shape=(200,), dim=dim, vocab=1024, dtype=BF16)
    compiled = Plan(90, {"wide": partial(launch_all, case, rows=rows)}, WIDE).compile("wide")
    assert {launch.name for launch, _ in compiled} >= WIDE - {"hidden_kernel"}
    narrow = r"(?:ld|st)\.global\.b(?:8|16)\b"
    found = [(launch.name, seen) for launch, kernel in compiled if (seen := re.findall(narrow, kernel.asm["ptx"]))]
    assert found == []


@pytest.mark.parametrize("capability", [80, 100, 120])
def test_what_is_compiled_takes_every_path_that_is_launched(capability):
    candidates, chosen = plan(capability).candidates, plan(capability).chosen
    assert {p for launch in chosen for p in launch.paths()} == {p for launch in candidates for p in launch.paths()}
    assert {launch.name for launch in candidates} >= set(LARGE)
    assert 10 < len(chosen) < 0.6 * len(candidates)


def test_the_table_goes_by_the_shared_memory_that_devices_have():
    assert {capability: SHARED_KIB[capability] * 1024 for capability in SHARED_BYTES} == SHARED_BYTES


def test_a_device_of_a_known_kind_with_less_shared_memory_gets_smaller_tiles():
    large = target(100)
    assert row_for(large._replace(shared_memory=100_000)) == row_for(target(120))
    assert row_for(target(90)) is HOPPER
    assert row_for(large) != HOPPER
