"""An accuracy report of `cce_kernels.linear_cross_entropy` against fp64: `python benchmarks/certificate.py`.

Every call of the grid shape x dtype x option is compared with the same loss in fp64: the loss, the gradients of all
options' inputs, and whether a second call gives the same bits. The bar is the error of fp32 logits whose gradient is
rounded once to the products' dtype. A ratio is the kernels' error divided by the bar's error. Gradients are compared
on a sample of rows of e and c, because the fp64 gradients of a large problem take gigabytes. Runs add up, so a run may
be stopped at any time; `measure=false` then writes the page.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cce_kernels import linear_cross_entropy
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.problems import DTYPES, Shape, Solution, make_problem, parse_shape, relative_error, solve, without_tf32
from linrnn.config.schema import COMMANDS
from linrnn.config.schema import option as key
from linrnn.core.errors import as_reason
from linrnn.core.output import say
from linrnn.losses.base import IGNORE_INDEX

BOUND = 1.05  # the largest ratio to the bar that bf16 may have
SAMPLED = 128  # rows of dE, and as many rows of dC
LossFunction = Callable[..., Any]  # the kernels' linear_cross_entropy
SHAPES = (
    *("257x203x5003", "2048x2048x32000", "1024x2048x50304", "5120x1000x50304", "8192x768x50257", "1000x1536x100277"),
    *("512x4096x128256", "mve", "1536x8192x32000", "3001x2880x201088", "4096x4096x128256", "gemma2_2b"),
)
LARGEST_IN_FP32 = 10**12  # N x D x V; larger problems are certified in 16 bits alone, because IEEE fp32 takes minutes


@dataclass(frozen=True)
class Call:
    """An option of the loss: keywords of `linear_cross_entropy`, and what else the call has."""

    keywords: dict[str, Any] = field(default_factory=dict)
    logits: str = "peaked"
    bias: bool = False
    main_grad: bool = False


CALLS = {
    "plain": Call(),
    "flat logits": Call(logits="flat"),
    "softcap=30": Call({"softcap": 30.0}),
    "bias": Call(bias=True),
    "label_smoothing=0.1": Call({"label_smoothing": 0.1}),
    "z_loss=1e-3": Call({"z_loss": 1e-3}),
    "return_lse": Call({"return_lse": True}),
    "reduction=none": Call({"reduction": "none"}),
    "half ignored": Call(logits="half_ignored"),
    "shift=1": Call({"shift": 1}),
    "main_grad_c": Call(main_grad=True),
    "accumulate=kahan workspace_mib=256": Call({"accumulate": "kahan", "workspace_mib": 256}),
    "accumulate=fp32 workspace_mib=256": Call({"accumulate": "fp32", "workspace_mib": 256}),
    "accumulate=bf16 workspace_mib=256": Call({"accumulate": "bf16", "workspace_mib": 256}),
}


@dataclass
class BenchConfig(common.Keys):
    """Keys of the command line."""

    shapes: list[str] = key([*SHAPES], "names, or tokens x hidden dimensions x vocabulary")
    options: list[str] = key([*CALLS], "options of the loss, each alone")
    dtypes: list[str] = key([*DTYPES], "of the products")


COMMANDS["certificate"] = BenchConfig


@dataclass
class Row:
    """One call. Errors are relative to fp64; ratios are to the bar. Without a bias both of dbias are null."""

    shape: str
    n: int
    d: int
    v: int
    dtype: str
    option: str
    run: str
    status: str = "ok"  # ok | refused | failed
    reason: str = ""
    loss_err: float | None = None
    de_err: float | None = None
    dc_err: float | None = None
    dbias_err: float | None = None
    de_ratio: float | None = None
    dc_ratio: float | None = None
    dbias_ratio: float | None = None
    same_bits: bool | None = None

    @property
    def worst(self) -> float:
        """The largest ratio; infinite if the call failed."""
        found = [x for x in (self.de_ratio, self.dc_ratio, self.dbias_ratio) if x is not None]
        return max(found, default=float("inf"))

    @property
    def label(self) -> str:
        return f"{self.shape} {self.dtype} {self.option}"


def read_rows(directory: Path) -> list[Row]:
    """The last row of every call, the worst ratio first."""
    return sorted(common.last_rows(directory, Row, lambda row: row.label), key=lambda row: (-row.worst, row.label))


# ----------------------------------------------------------------------------------------------------- one call
@dataclass(frozen=True)
class Case:
    """The tensors of a call: e (N, D), c (V, D), bias (V,) or None, and every row's label, weight and LSE's weight."""

    call: Call
    e: Tensor
    c: Tensor
    bias: Tensor | None
    labels: Tensor  # (N,) int64, as they are given to the loss
    target: Tensor  # (N,) int64, after the shift; IGNORE_INDEX for none
    weight: Tensor  # (N,) fp64, dloss / d(row loss)
    lse_weight: float  # dloss / dLSE of every row
    rows: Tensor  # sampled rows of e
    entries: Tensor  # sampled rows of c


def make_case(shape: Shape, call: Call, dtype: torch.dtype, device: torch.device) -> Case:
    problem = make_problem(shape, call.logits, dtype, device, seed=0)
    random = torch.Generator(device).manual_seed(1)
    labels = target = problem.labels_N
    if shift := call.keywords.get("shift", 0):
        target = torch.cat((labels[shift:], labels.new_full((shift,), IGNORE_INDEX)))
    bias = None
    if call.bias:
        bias = torch.randn(shape.v, generator=random, device=device).to(dtype).requires_grad_()
    counted = (target >= 0).double()
    weight = counted / counted.sum()
    if call.keywords.get("reduction") == "none":
        weight = counted * torch.rand(shape.n, generator=random, device=device).double()
    rows = torch.randperm(shape.n, generator=random, device=device)[:SAMPLED]
    drawn = torch.randperm(shape.v, generator=random, device=device)[: SAMPLED * 3 // 4]
    entries = torch.cat((drawn, labels[: SAMPLED // 4].clamp(min=0))).unique()
    lse_weight = 1e-2 / shape.n if "return_lse" in call.keywords else 0.0
    return Case(call, problem.hidden_ND, problem.weight_VD, bias, labels, target, weight, lse_weight, rows, entries)


def solved(case: Case, dtype: torch.dtype, operand: torch.dtype | None = None) -> Solution:
    """The call in `dtype`: the loss, sampled rows of dE and dC, and all of dbias."""
    options = {name: case.call.keywords.get(name, 0.0) for name in ("softcap", "label_smoothing", "z_loss")}
    return solve(
        case.e, case.c, case.target, case.weight, dtype, operand,
        bias_V=case.bias, lse_weight=case.lse_weight, rows=case.rows, entries=case.entries, **options,
    )  # fmt: skip


def computed(loss: LossFunction, case: Case) -> tuple[Solution, list[Tensor]]:
    """The call of `loss`; and its whole results, to compare bits."""
    for leaf in (case.e, case.c, case.bias):
        if leaf is not None:
            leaf.grad = None
    buffer = torch.zeros(case.c.shape, device=case.c.device) if case.call.main_grad else None
    found = loss(case.e, case.c, case.labels, bias=case.bias, main_grad_c=buffer, **case.call.keywords)
    total = found[0] + case.lse_weight * found[1].sum() if isinstance(found, tuple) else found
    if total.dim():
        total = (total.double() * case.weight[: len(total)]).sum()
    total.backward()
    grad_c = case.c.grad if buffer is None else buffer
    assert case.e.grad is not None
    assert grad_c is not None
    grad_bias = None if case.bias is None else case.bias.grad
    whole = [tensor for tensor in (total.detach(), case.e.grad, grad_c, grad_bias) if tensor is not None]
    return Solution(total.item(), case.e.grad[case.rows], grad_c[case.entries], grad_bias), whole


def certify(loss: LossFunction, shape: Shape, name: str, dtype: str, device: torch.device, run: str = "") -> Row:
    """The row of one call. A failure of the kernels is a row, too. A ValueError is a refusal."""
    row, of = Row(shape.name, shape.n, shape.d, shape.v, dtype, name, run), DTYPES[dtype]
    case = make_case(shape, CALLS[name], of, device)
    try:
        got, bits = computed(loss, case)
        again = computed(loss, case)[1]
    except Exception as error:
        row.status = "refused" if isinstance(error, ValueError) else "failed"
        row.reason = as_reason(error)
        return row
    row.same_bits = all(torch.equal(a, b) for a, b in zip(bits, again, strict=True))
    del bits, again
    truth = solved(case, torch.float64)
    with without_tf32():
        bar = solved(case, torch.float32, of)  # its gradients are rounded to those dtypes that the kernels return
    row.loss_err = abs(got.loss - truth.loss) / abs(truth.loss)
    row.de_err = relative_error(got.hidden_ND, truth.hidden_ND)
    row.dc_err = relative_error(got.weight_VD, truth.weight_VD)
    bar_c = bar.weight_VD if case.call.main_grad else bar.weight_VD.to(of)
    row.de_ratio = row.de_err / relative_error(bar.hidden_ND.to(of), truth.hidden_ND)
    row.dc_ratio = row.dc_err / relative_error(bar_c, truth.weight_VD)
    if got.bias_V is not None and truth.bias_V is not None and bar.bias_V is not None:
        row.dbias_err = relative_error(got.bias_V, truth.bias_V)
        row.dbias_ratio = row.dbias_err / relative_error(bar.bias_V.to(of), truth.bias_V)
    return row


# ------------------------------------------------------------------------------------------------------ the grid
def run_benchmark(config: BenchConfig) -> None:
    """Certify one call after another. A row is written as soon as its call is certified."""
    common.check_known("options", config.options, [*CALLS])
    common.check_known("dtypes", config.dtypes, [*DTYPES])
    calls = [  # all shapes of one kind of kernel in a row, so that kernels compile once
        (shape, option, dtype)
        for dtype in config.dtypes
        for option in config.options
        for shape in map(parse_shape, config.shapes)
        if dtype != "fp32" or shape.n * shape.d * shape.v <= LARGEST_IN_FP32
    ]
    record = common.Record(config, "certificate")
    for number, (shape, option, dtype) in enumerate(calls, start=1):
        row = certify(linear_cross_entropy, shape, option, dtype, record.device, record.id)
        record.add(row)
        say(f"[{number}/{len(calls)}] {shape.name} {dtype} {option}: {row.reason or f'{row.worst:.3f}'}")


# ------------------------------------------------------------------------------------------------------- the page
COLUMNS: common.Columns = {
    "call": "label:",
    "worst": "worst:.3f",
    "dE": "de_ratio:.3f",
    "dC": "dc_ratio:.3f",
    "dbias": "dbias_ratio:.3f",
    "loss err": "loss_err:.1e",
    "dE err": "de_err:.1e",
    "dC err": "dc_err:.1e",
    "same bits": lambda row: {True: "yes", False: "no", None: "-"}[row.same_bits],
}


def write_report(directory: Path) -> list[Path]:
    """Write certificate.md; returns its path."""
    rows = read_rows(directory)
    beyond = sum(row.dtype == "bf16" and row.status == "ok" and row.worst > BOUND for row in rows)
    failed, other_bits = sum(row.status == "failed" for row in rows), sum(row.same_bits is False for row in rows)
    heading = f"{len(rows)} calls. {beyond} in bf16 lie beyond {BOUND}, {failed} failed, "
    heading += f"and {other_bits} gave other bits in a second call"
    return common.write_report(directory, "certificate", "Accuracy report of the loss", {heading: rows}, COLUMNS)


if __name__ == "__main__":
    common.run("certificate", __doc__, run_benchmark, write_report)
