"""Loss and gradients against fp64: blockwise in torch, by the kernels in Triton's interpreter, and on a GPU."""

from itertools import product

import pytest
import torch
from cases import BF16, CASES, FP16, FP32, Case, check, check_default_dtype, draw, error, gradients, in_fp64
from cce_kernels import WorkspaceTooSmall, linear_cross_entropy, operators, vocabulary_parallel_linear_cross_entropy
from cce_kernels.planner import Plan
from cce_kernels.reference import reference_linear_cross_entropy
from cce_kernels.runtime.interpreter import INTERPRETED
from everywhere import devices, devices_with, interpreted, kernels, on
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch import distributed as dist

# The interpreter is slow. In bf16 it leaves out cases that differ only before or after the kernels. In other dtypes it
# runs what differs there: tiles and rounding.
OUTSIDE = ("no_ignored", "leading_dimensions", "sum", "row_losses", "shift", "mixed-bf16_fp16")
OTHERS = ("one_row", "everything", "many_chunks_kahan", "mixed-fp32_bf16")
INTERPRETED_CASES = [
    case for case in CASES if (case.dtype == BF16 or case.name.startswith(OTHERS)) and not case.name.startswith(OUTSIDE)
]
MODERATE = [
    Case(f"{name}-{str(dtype)[6:]}", dtype=dtype, **more)
    for dtype in (BF16, FP16, FP32)
    for name, more in {
        "moderate": {"shape": (2048,), "dim": 256, "vocab": 8001},
        "moderate_odd": {"shape": (3, 333), "dim": 203, "vocab": 5003, "bias": True},
        "moderate_chunks": {"shape": (2048,), "dim": 512, "vocab": 8192, "options": {"workspace_mib": 12}},
        "moderate_trained": {"shape": (2048,), "dim": 512, "vocab": 8192, "peak": 15, "options": {"softcap": 30.0}},
        "wide": {"shape": (1024,), "dim": 2304, "vocab": 4096, "strided": True},
    }.items()
]


@devices_with("case", CASES, INTERPRETED_CASES, on_gpu=MODERATE)
def test_loss_and_gradients_are_within_twice_torchs_error(case, device):
    check(case, device)


options = st.fixed_dictionaries(
    {},
    optional={
        "softcap": st.sampled_from([5.0, 30.0]),
        "logit_scale": st.sampled_from([0.1, 2.0]),
        "label_smoothing": st.sampled_from([0.1, 1.0]),
        "z_loss": st.just(1e-2),
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "accumulate": st.sampled_from(["kahan", "fp32"]),
        "workspace_mib": st.sampled_from([0.5, 4]),
    },
)
random_cases = st.builds(
    Case,
    name=st.just("random"),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    dim=st.integers(1, 70),
    vocab=st.integers(1, 700),
    dtype=st.sampled_from([FP32, BF16, FP16]),
    bias=st.booleans(),
    ignored=st.sampled_from([0, 0.5, 1]),
    peak=st.sampled_from([0.0, 5.0]),
    strided=st.booleans(),
    weights=st.booleans(),
    options=options,
)


@devices
def test_any_shape_dtype_stride_and_option(device):
    examples = 12 if INTERPRETED else 100 if device == "cuda" else 60

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(random_cases)
    def check_one(case: Case) -> None:
        check(case, device, floor=1e-5)  # one row of one dimension may cancel, by chance not in torch's order

    check_one()


DEFAULTED = {
    "plain": {"z_loss": 1e-2, "return_metrics": True},
    "sum": {"reduction": "sum", "label_smoothing": 0.1},
    "threshold": {"filter_eps": 1.1e-3},
    "softcap": {"filter_eps": 1.1e-3, "softcap": 9.0},
    "unbiased": {"filter_eps": 1.1e-3, "filter_unbiased": True, "filter_mass": 0.9},
}


@devices_with("name", [*product(DEFAULTED, (BF16, torch.float64))], [("plain", torch.float64)])
def test_the_default_dtype_changes_nothing(name, device):
    check_default_dtype(DEFAULTED[name[0]], name[1], device, rows=24 if INTERPRETED else 240)


@on("cpu", "interpreter")
def test_each_backend_of_a_cpu_has_operators_of_its_own(device):
    """torch.compile keeps graphs on disk by the operators' names. A graph holds the plan of one backend."""
    namespace = "cce_kernels_interpreted" if INTERPRETED else "cce_kernels"
    assert operators._forward_op._qualname == f"{namespace}::cross_entropy"


@kernels
def test_evaluation_needs_no_workspace(device):
    e, c, targets, _ = draw(Case("evaluation", shape=(5,), ignored=0), device)
    want = linear_cross_entropy(e, c, targets).detach()
    with torch.no_grad():
        assert linear_cross_entropy(e, c, targets, workspace_mib=1e-6) == want


@devices
def test_a_bias_of_minus_infinity_masks_whole_tiles(device):
    e, c, _, bias = draw(Case("masked", bias=True, vocab=1300), device)
    allowed = slice(700, 720)
    masked = torch.full_like(bias, -torch.inf)
    masked[allowed] = bias.detach()[allowed]
    targets = (torch.arange(len(e)) % 20).to(device)
    loss = linear_cross_entropy(e, c, targets + 700, bias=masked)
    want = linear_cross_entropy(e, c[allowed], targets, bias=bias[allowed])
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(gradients(loss, (e, c)), gradients(want, (e, c)))


OFFLOADED = {
    "mean": {},
    "row losses": {"reduction": "none"},
    "unbiased": {"filter_eps": 0.01, "filter_unbiased": True},
    "vocabulary over ranks": {"shards": [70]},
}


@interpreted
@pytest.mark.parametrize("name", OFFLOADED)
def test_saved_tensors_may_be_offloaded(name):
    e, c, targets, _ = draw(Case("offloaded", shape=(40,), dim=12, vocab=70, dtype=BF16), "cpu")
    options = OFFLOADED[name]
    function = vocabulary_parallel_linear_cross_entropy if "shards" in options else linear_cross_entropy

    def results() -> list[Tensor]:
        loss = function(e, c, targets, **options)
        return [loss.detach(), *gradients(loss, (e, c))]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        want = results()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous().clone(), lambda x: x.clone()):
            got = results()
    finally:
        dist.destroy_process_group()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@kernels
def test_kahan_sums_over_many_chunks_as_well_as_fp32(device):
    chunks, rows = (256, 512) if device == "cuda" else (8, 32)
    case = Case("sums", shape=(rows,), dim=128, vocab=256 * chunks, dtype=BF16, ignored=0)
    e, c, targets, _ = draw(case, device)
    e64, c64 = in_fp64(e, c)
    (truth,) = gradients(reference_linear_cross_entropy(e64, c64, targets)[0], (e64,))
    narrowest = (rows * 128 * 4 + 256 * (rows * 2 + rows // 32 + 4)) / 2**20
    errors = {}
    for accumulate in ("kahan", "fp32", "bf16"):
        loss = linear_cross_entropy(e, c, targets, accumulate=accumulate, workspace_mib=narrowest)
        errors[accumulate] = error(gradients(loss, (e,))[0], truth)
    assert errors["kahan"] <= 1.05 * errors["fp32"]
    assert errors["bf16"] > 1.3 * errors["fp32"]


@devices
def test_a_workspace_too_small_is_refused_before_backward_with_the_least_that_will_do(device):
    shape, vocab = ((2100, 16), 600) if INTERPRETED or device == "cuda" else ((1024, 512), 20)
    e, c, targets, _ = draw(Case("workspace", shape=shape[:1], dim=shape[1], vocab=vocab, dtype=BF16), device)

    def loss(workspace_mib: int) -> Tensor:
        return linear_cross_entropy(e, c, targets, accumulate="fp32", filter_eps=0.1, workspace_mib=workspace_mib)

    with pytest.raises(WorkspaceTooSmall, match=r"^workspace_mib: 1 is too small") as refusal:
        loss(1)
    with pytest.raises(WorkspaceTooSmall):
        loss(refusal.value.least_mib - 1)
    gradients(loss(refusal.value.least_mib), (e, c))


@devices
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_the_loss_is_the_same_whatever_the_chunk(dtype, device, monkeypatch):
    """Bit for bit where all rows' sums come before the chunks; else their fp32 sums run in another order."""
    n_rows, dim, vocab = (4096, 256, 32003) if device == "cuda" else (200, 64, 1101 if INTERPRETED else 3001)
    e, c, targets, _ = draw(Case("chunks", shape=(n_rows,), dim=dim, vocab=vocab, dtype=dtype, peak=3), device)
    if INTERPRETED:  # as many as an H100 has, so that chunks differ in how they split the vocabulary
        monkeypatch.setattr("cce_kernels.triton.logits.multiprocessors", lambda e: 132)
    with torch.no_grad():
        alone = linear_cross_entropy(e, c, targets)
    if device == "cpu" and not INTERPRETED:
        found = [linear_cross_entropy(e, c, targets, workspace_mib=mib).detach() for mib in (0.3, 0.5, 1, 2, 8)]
    else:
        with_triton = pytest.importorskip("cce_kernels.backends.with_triton")
        found = []
        stored = (n_rows, n_rows // 2, 128) if dtype == BF16 else ()  # three products are for bf16 alone
        for chunk in (Plan(0, 256), Plan(0, 1024), *(Plan(rows, 0) for rows in stored)):
            monkeypatch.setattr(with_triton, "plan", lambda *_, chunk=chunk: chunk)
            found.append(linear_cross_entropy(e, c, targets).detach())
        assert all(torch.equal(x, alone) for x in found[:2])
    for loss in found:
        assert (loss - alone).abs() <= 2**-21 * alone.clamp(min=1), found
