"""Every kernel, as the launchers call it, compiles for Hopper (sm_90) within its resources. No GPU is needed.

Other architectures: test_architectures.py.
"""

import os

import pytest
import torch
from cases import BF16, FP32, Case, draw

pytest.importorskip("triton")

from compiling import EVERYTHING, PLAIN, compile_only, launch_all, launch_lists

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled there")
SHARED_MEMORY_BYTES = 227 * 1024  # of one multiprocessor, for one program


@pytest.fixture
def compiled(monkeypatch):
    """What launches compiled for Hopper instead of running: a list of (name, CompiledKernel)."""
    return compile_only(monkeypatch, 90)


# Together: every branch of every kernel, operands of 16 and 32 bits (fp16 takes bf16's path), sizes of 1.
LAUNCHES = [
    Case("bf16", dtype=BF16, **PLAIN, options={"workspace_mib": 1.5}),
    Case("bf16-everything", dtype=BF16, bias=True, **PLAIN, options=EVERYTHING),
    Case("bf16-filter_e", dtype=BF16, bias=True, **PLAIN, options={"filter_eps": 2**-8, "filter_c": False}),
    Case("bf16-ones", shape=(1,), dim=1, vocab=1, ignored=0, dtype=BF16),
    Case("fp32-filter", dtype=FP32, bias=True, **PLAIN, options={"softcap": 9.0, "filter_eps": 2**-8}),
]


@pytest.mark.parametrize("case", LAUNCHES, ids=str)
def test_every_kernel_compiles_for_hopper_within_its_shared_memory(compiled, case):
    launch_all(case)
    names = {name for name, _ in compiled}
    # Hopper's own kernels take plain operands of 16 bits; here has bias and filter.
    exponentials, gradient = ("exponentials_kernel", "gradient_kernel")
    if case.name == "bf16":
        exponentials, gradient = f"hopper_{exponentials}", f"hopper_{gradient}"
    assert names == {
        "columns_kernel", "target_logits_kernel", exponentials, "rows_kernel", "row_coefficients_kernel", "peak_kernel",
        gradient, "product_kernel", "figures_kernel",
    }  # fmt: skip
    for name, kernel in compiled:
        check_resources(name, kernel, case.dtype)


def check_resources(name, kernel, dtype) -> None:
    assert kernel.asm["cubin"], name
    assert kernel.metadata.shared <= SHARED_MEMORY_BYTES, (name, kernel.metadata.shared)
    if name.removeprefix("hopper_") in ("exponentials_kernel", "gradient_kernel", "product_kernel"):
        assert "cp.async.bulk.tensor" in kernel.asm["ptx"], f"{name}: operands do not come through TMA"
        assert ("wgmma" in kernel.asm["ptx"]) == (dtype != FP32), name


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("dim", [512, 2048])  # narrow and wide tiles of logits
@pytest.mark.parametrize("dtype", [BF16, FP32])  # of the gradients
def test_stored_exponentials_compile_for_hopper_within_its_shared_memory(compiled, dtype, dim, softcap):
    case = Case("stored", dtype=BF16, **PLAIN | {"dim": dim}, options={"softcap": softcap})
    launch_all(case, dtypes=(dtype, dtype, None), rows=128)
    names = {name for name, _ in compiled}
    exponentials = "hopper_exponentials_kernel" if softcap is None else "exponentials_kernel"
    expected = {
        "columns_kernel",
        "target_logits_kernel",
        exponentials,
        "rows_kernel",
        "product_kernel",
        "hidden_kernel",
        "scaled_rows_kernel",
        "loss_sum_kernel",
        "target_order_kernel",
    }
    assert names == expected
    for name, kernel in compiled:
        check_resources(name, kernel, BF16)


@pytest.mark.parametrize("dim", [512, 2048])
@pytest.mark.parametrize("rows", [128, 256])  # several chunks, one chunk
def test_kernels_that_leave_out_ignored_rows_compile_for_hopper(compiled, dim, rows):
    launch_all(Case("skipped", dtype=BF16, **PLAIN | {"dim": dim}), rows=rows, skip=True)
    names = {name for name, _ in compiled}
    assert {"live_rows_kernel", "hopper_exponentials_kernel", "scaled_rows_kernel", "product_kernel"} <= names
    for name, kernel in compiled:
        check_resources(name, kernel, BF16)


@pytest.mark.parametrize("dim", [512, 2048])  # dE's product in parts, and whole
def test_rows_with_gradients_of_their_own_compile_for_hopper(compiled, dim):
    smoothed = {"label_smoothing": 0.1}
    case = Case("rows", dtype=BF16, **PLAIN | {"dim": dim}, options=smoothed)
    launch_all(case, rows=256, with_lse=True, weighted=True)
    names = {name for name, _ in compiled}
    assert {"row_factors_kernel", "column_sum_kernel", "row_products_kernel", "hopper_exponentials_kernel"} <= names
    for name, kernel in compiled:
        check_resources(name, kernel, BF16)


@pytest.mark.parametrize("rows", [128, 256])  # two chunks and one
def test_a_bias_with_stored_exponentials_compiles_for_hopper(compiled, rows):
    launch_all(Case("bias", dtype=BF16, bias=True, **PLAIN, options={"label_smoothing": 0.1}), rows=rows)
    names = {name for name, _ in compiled}
    assert {"bias_gradient_kernel", "column_sum_kernel", "exponentials_kernel"} <= names
    for name, kernel in compiled:
        check_resources(name, kernel, BF16)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_gradients_of_entropies_compile_for_hopper(compiled, dtype, softcap):
    """By Triton's kernel: Hopper's own knows no entropies."""
    from cce_kernels.backends import with_triton
    from cce_kernels.options import Options

    e, c, targets, _ = draw(Case("entropies", dtype=dtype, **PLAIN), "cpu")
    ones, entropy = torch.ones(len(e)), torch.ones(2, len(e))
    with_triton.backward(
        e.detach(), c.detach(), None, targets, ones, ones, ones, 512, Options(softcap=softcap), (dtype, dtype, None),
        None, None, entropy=entropy,
    )  # fmt: skip
    assert {"gradient_kernel", "product_kernel"} <= {name for name, _ in compiled}
    for name, kernel in compiled:
        check_resources(name, kernel, dtype)


@pytest.mark.parametrize("dtype_e", [BF16, FP32])
def test_targets_apart_compile_for_hopper(compiled, dtype_e):
    launch_all(Case("apart", dtype=BF16, **PLAIN), dtypes=(dtype_e, FP32, None))
    targets = {name: kernel for name, kernel in compiled if "target" in name}
    assert set(targets) == {
        "target_logits_kernel",
        "target_rows_kernel",
        "targets_kernel",
        "spilled_targets_kernel",
        "target_order_kernel",
    }
    for name, kernel in targets.items():
        check_resources(name, kernel, BF16)


@pytest.mark.parametrize("with_metrics", [False, True])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_rows_of_shards_compile_for_hopper(compiled, softcap, with_metrics):
    from cce_kernels.backends import with_triton
    from cce_kernels.kernels.row_stats import Gradient
    from cce_kernels.options import Options
    from cce_kernels.row_math import Rows

    x, metrics = torch.ones(256), torch.ones(2, 256) if with_metrics else None
    every, columns = torch.ones(4, 4 if with_metrics else 2, 256), torch.ones(256, dtype=torch.int64)
    rows, gradient = Rows(x, x, None, metrics), Gradient(x, x, x, weights=x if softcap else None)
    with_triton.settle(every, columns[:4], 1, columns, rows, gradient, Options(softcap=softcap))
    [(name, kernel)] = compiled
    check_resources(name, kernel, BF16)


@pytest.mark.parametrize(("unbiased", "mass"), [(False, None), (True, None), (True, 0.1)])
@pytest.mark.parametrize("dtype", [BF16, FP32])  # of the gradients
def test_the_filters_lists_compile_for_hopper_within_its_shared_memory(compiled, dtype, unbiased, mass):
    launch_lists(dtype, unbiased, mass)
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
    assert {name for name, _ in compiled} == {"target_logits_kernel"} | dense | lists
    for name, kernel in compiled:
        check_resources(name, kernel, BF16)
        if name == "select_kernel":
            assert "ld.global.v4.b32" in kernel.asm["ptx"], "exponentials are not read by vectors"


def test_fp32_parameters_under_autocast_get_fp32_gradients_from_bf16_products(compiled):
    launch_all(LAUNCHES[0], dtypes=(FP32, FP32, None))
    assert any("wgmma" in kernel.asm["ptx"] for name, kernel in compiled if name == "product_kernel")
