"""Every kernel, as the launchers call it, compiles for Hopper (sm_90) within its resources. No GPU is needed.

Other architectures: test_architectures.py.
"""

import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from cases import BF16, FP32, Case, draw

pytest.importorskip("triton")

from cce_kernels.runtime.tiles import HOPPER
from compiling import EVERYTHING, LARGE, OF_THE_TABLE, PLAIN, Plan, check_resources, launch_all, launch_lists

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled there")
SHARED_MEMORY_BYTES = 227 * 1024  # of one multiprocessor, for one program


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


def entropies(dtype: torch.dtype, softcap: float | None) -> None:
    from cce_kernels.backends import with_triton
    from cce_kernels.options import Options
    from cce_kernels.row_math import Operands

    e, c, targets, _ = draw(Case("entropies", dtype=dtype, **PLAIN), "cpu")
    ones, entropy = torch.ones(len(e)), torch.ones(2, len(e))
    operands = Operands(e.detach(), c.detach(), None, targets, ones, ones, ones)
    with_triton.backward(operands, 512, Options(softcap=softcap), (dtype, dtype, None), None, None, entropy=entropy)


def shards(softcap: float | None, with_metrics: bool) -> None:
    from cce_kernels.backends import with_triton
    from cce_kernels.options import Options
    from cce_kernels.row_math import Rows
    from cce_kernels.triton.row_stats import Gradient

    x, metrics = torch.ones(256), torch.ones(2, 256) if with_metrics else None
    every, columns = torch.ones(4, 4 if with_metrics else 2, 256), torch.ones(256, dtype=torch.int64)
    rows, gradient = Rows(x, x, None, metrics), Gradient(x, x, x, weights=x if softcap else None)
    with_triton.settle(every, columns[:4], 1, columns, rows, gradient, Options(softcap=softcap))


# Together: every branch of every kernel, with every tile of Hopper's row.
CASES: dict[str, Callable[[], None]] = {
    **{f"recomputed {case}": partial(launch_all, case) for case in RECOMPUTED},
    "fp32 gradients": partial(launch_all, RECOMPUTED[0], dtypes=(FP32, FP32, None)),
    **{
        f"stored {dtype} {dim} {softcap}": partial(
            launch_all, small("stored", dim, options={"softcap": SOFTCAPS[softcap]}),
            dtypes=(DTYPES[dtype], DTYPES[dtype], None), rows=128,
        )
        for dtype in DTYPES for dim in (512, 2048) for softcap in SOFTCAPS
    },
    **{
        f"skipped {dim} {rows}": partial(launch_all, small("skipped", dim), rows=rows, skip=True)
        for dim in (512, 2048) for rows in (128, 256)  # several chunks, one chunk
    },
    **{
        f"rows {dim}": partial(
            launch_all, small("rows", dim, options={"label_smoothing": 0.1}), rows=256, with_lse=True, weighted=True
        )
        for dim in (512, 2048)  # dE's product in parts, and whole
    },
    **{
        f"bias {rows}": partial(launch_all, small("bias", bias=True, options={"label_smoothing": 0.1}), rows=rows)
        for rows in (128, 256)  # two chunks and one
    },
    **{
        f"entropies {dtype} {softcap}": partial(entropies, DTYPES[dtype], SOFTCAPS[softcap])
        for dtype in DTYPES for softcap in SOFTCAPS
    },
    **{
        f"apart {dtype}": partial(launch_all, small("apart"), dtypes=(DTYPES[dtype], FP32, None)) for dtype in DTYPES
    },
    **{
        f"shards {softcap} {with_metrics}": partial(shards, SOFTCAPS[softcap], with_metrics)
        for softcap in SOFTCAPS for with_metrics in (False, True)
    },
    **{
        f"lists {dtype} {rule}": partial(launch_lists, DTYPES[dtype], *LISTS[rule])
        for dtype in DTYPES for rule in LISTS
    },
    **{f"table {name}": launch for name, launch in OF_THE_TABLE.items()},
}  # fmt: skip


@cache
def plan() -> Plan:
    return Plan(90, CASES)


def launched(case: str) -> set[str]:
    """The names of the kernels that a case launches."""
    return {launch.name for launch in plan().launches[case]}


@pytest.mark.parametrize("case", CASES)
def test_kernels_compile_for_hopper_within_its_resources(case):
    for launch, kernel in plan().compile(case):
        name, ptx = launch.name, kernel.asm["ptx"]
        check_resources(launch, kernel, SHARED_MEMORY_BYTES, HOPPER)
        if name.removeprefix("hopper_") in LARGE:
            assert "cp.async.bulk.tensor" in ptx, f"{name}: operands do not come through TMA"
            assert ("wgmma" in ptx) != launch.full_precision, name
        if name == "select_kernel":
            assert "ld.global.v4.b32" in ptx, "exponentials are not read by vectors"


@pytest.mark.parametrize("case", RECOMPUTED, ids=str)
def test_kernels_of_the_recomputing_scheme(case):
    # Hopper's own kernels take plain operands of 16 bits; here has bias and filter.
    exponentials, gradient = ("exponentials_kernel", "gradient_kernel")
    if case.name == "bf16":
        exponentials, gradient = f"hopper_{exponentials}", f"hopper_{gradient}"
    assert launched(f"recomputed {case}") == {
        "columns_kernel", "target_logits_kernel", exponentials, "rows_kernel", "row_coefficients_kernel", "peak_kernel",
        gradient, "product_kernel", "figures_kernel", *(["copied_kernel"] if case.name == "bf16-ones" else []),
    }  # fmt: skip


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("dim", [512, 2048])  # narrow and wide tiles of logits
@pytest.mark.parametrize("dtype", DTYPES)  # of the gradients
def test_kernels_of_stored_exponentials(dtype, dim, softcap):
    exponentials = "hopper_exponentials_kernel" if softcap == "plain" else "exponentials_kernel"
    assert launched(f"stored {dtype} {dim} {softcap}") == {
        "columns_kernel",
        "target_logits_kernel",
        exponentials,
        "rows_kernel",
        "product_kernel",
        "hidden_kernel",
        "scaled_rows_kernel",
        "loss_sum_kernel",
        "mean_gradient_kernel",
        "target_order_kernel",
    }


@pytest.mark.parametrize("dim", [512, 2048])
@pytest.mark.parametrize("rows", [128, 256])
def test_kernels_that_leave_out_ignored_rows(dim, rows):
    names = launched(f"skipped {dim} {rows}")
    assert {"live_rows_kernel", "hopper_exponentials_kernel", "scaled_rows_kernel", "product_kernel"} <= names


@pytest.mark.parametrize("dim", [512, 2048])
def test_kernels_of_rows_with_gradients_of_their_own(dim):
    names = launched(f"rows {dim}")
    assert {"row_factors_kernel", "column_sum_kernel", "row_products_kernel", "hopper_exponentials_kernel"} <= names


@pytest.mark.parametrize("rows", [128, 256])
def test_kernels_of_a_bias_with_stored_exponentials(rows):
    assert {"bias_gradient_kernel", "column_sum_kernel", "exponentials_kernel"} <= launched(f"bias {rows}")


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_of_the_gradients_of_entropies(dtype, softcap):
    """Triton's, because Hopper's own knows no entropies."""
    assert {"gradient_kernel", "product_kernel"} <= launched(f"entropies {dtype} {softcap}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_of_targets_apart(dtype):
    assert {name for name in launched(f"apart {dtype}") if "target" in name} == {
        "target_logits_kernel",
        "target_rows_kernel",
        "targets_kernel",
        "spilled_targets_kernel",
        "target_order_kernel",
    }


@pytest.mark.parametrize("with_metrics", [False, True])
@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_rows_of_shards_take_one_launch(softcap, with_metrics):
    assert [launch.name for launch in plan().launches[f"shards {softcap} {with_metrics}"]] == ["settle_kernel"]


@pytest.mark.parametrize("rule", LISTS)
@pytest.mark.parametrize("dtype", DTYPES)  # of the gradients
def test_kernels_of_the_filters_lists(dtype, rule):
    unbiased, mass = LISTS[rule]
    lists = {
        "select_kernel",
        "collect_kernel",
        "kept_kernel",
        "coefficients_kernel",
        "by_column_kernel",
        "gather_kernel",
    }
    if unbiased:
        lists |= {"mean_kernel", "mean_logits_kernel", "rank_kernel", "head_operands_kernel", "drawn_rows_kernel"}
        lists |= {"seed_kernel", "columns_drawn_kernel", "places_kernel", "rows_drawn_kernel"}
    dense = {"hopper_exponentials_kernel", "rows_kernel", "peak_kernel", "product_kernel", "figures_kernel"}
    dense |= {"gradient_kernel"} if mass is None else set()  # the fallback's, with the rule
    dense |= {"hopper_gradient_kernel"} if unbiased or mass is not None else set()  # the tails', or without a rule
    assert launched(f"lists {dtype} {rule}") == {"target_logits_kernel"} | dense | lists


def test_fp32_parameters_under_autocast_get_fp32_gradients_from_bf16_products():
    products = [launch for launch in plan().launches["fp32 gradients"] if launch.name == "product_kernel"]
    assert products
    for launch in products:
        assert launch.value("out_ptr").dtype == FP32
        assert not launch.full_precision
