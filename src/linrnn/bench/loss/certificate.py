"""A certificate of the loss's errors: each shape x dtype x option of `linear_cross_entropy` against fp64.

Every call is compared with the same loss in fp64: the loss, the gradients of all options' inputs, and whether a second
call gives the same bits. The bar is the error of fp32 logits whose gradient is rounded once to the products' dtype. A
ratio is the kernels' error divided by the bar's error. Gradients are compared on a sample of rows of e and c, because
the fp64 gradients of a large problem take gigabytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linrnn.bench.loss.problems import Shape, make_problem, relative_error
from linrnn.core.errors import DataError, as_reason
from linrnn.core.files import write_text
from linrnn.core.tables import Table, show
from linrnn.runs.environment import commit_in_words
from linrnn.training.runtime import without_tf32

BOUND = 1.05  # the largest ratio to the bar that bf16 may have
SAMPLED = 128  # rows of dE, and as many rows of dC
BLOCK_ELEMENTS = 2**26  # logits at a time
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
IGNORE_INDEX = -100
LossFunction = Callable[..., Any]  # the kernels' linear_cross_entropy; scripts/maintain/certify_loss.py gives it
SHAPES = (
    Shape("257x203x5003", 257, 203, 5003), Shape("2048x2048x32000", 2048, 2048, 32000),
    Shape("1024x2048x50304", 1024, 2048, 50304), Shape("5120x1000x50304", 5120, 1000, 50304),
    Shape("8192x768x50257", 8192, 768, 50257), Shape("1000x1536x100277", 1000, 1536, 100277),
    Shape("512x4096x128256", 512, 4096, 128256), Shape("mve", 16384, 256, 32000),
    Shape("1536x8192x32000", 1536, 8192, 32000), Shape("3001x2880x201088", 3001, 2880, 201088),
    Shape("4096x4096x128256", 4096, 4096, 128256), Shape("gemma2_2b", 8192, 2304, 256000),
)  # fmt: skip
LARGEST_IN_FP32 = 10**12  # N x D x V; larger problems are certified in 16 bits alone, because IEEE fp32 takes minutes


@dataclass(frozen=True)
class Call:
    """An option of the loss: keywords of `linear_cross_entropy`, and what else the call has."""

    keywords: dict[str, Any] = field(default_factory=dict)
    logits: str = "peaked"
    bias: bool = False
    half_ignored: bool = False
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
    "half ignored": Call(half_ignored=True),
    "shift=1": Call({"shift": 1}),
    "main_grad_c": Call(main_grad=True),
    "accumulate=kahan workspace_mib=256": Call({"accumulate": "kahan", "workspace_mib": 256}),
    "accumulate=fp32 workspace_mib=256": Call({"accumulate": "fp32", "workspace_mib": 256}),
    "accumulate=bf16 workspace_mib=256": Call({"accumulate": "bf16", "workspace_mib": 256}),
}


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
    def key(self) -> tuple[str, str, str]:
        return self.shape, self.dtype, self.option


@dataclass(frozen=True)
class Case:
    """The tensors of a call: e (N, D), c (V, D), bias (V,) or None, and every row's label, weight and LSE's weight."""

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
    labels = problem.labels_N.clone()
    if call.half_ignored:
        labels[torch.rand(shape.n, generator=random, device=device) < 0.5] = IGNORE_INDEX
    target = labels
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
    entries = torch.cat((drawn, problem.labels_N[: SAMPLED // 4])).unique()
    lse_weight = 1e-2 / shape.n if "return_lse" in call.keywords else 0.0
    leaves = problem.hidden_ND, problem.weight_VD
    return Case(*leaves, bias, labels, target, weight, lse_weight, rows, entries)


@dataclass(frozen=True)
class Solution:
    """The loss, sampled rows of dE and dC, and all of dbias."""

    loss: float
    e: Tensor
    c: Tensor
    bias: Tensor | None


@torch.no_grad()
def solve(case: Case, call: Call, dtype: torch.dtype, operand: torch.dtype | None) -> Solution:
    """The call in `dtype`, a block of rows at a time. The gradient of the logits is rounded to `operand`, if given."""
    e, c = case.e.to(dtype), case.c.to(dtype)
    softcap, smoothing, z_loss = (call.keywords.get(x, 0.0) for x in ("softcap", "label_smoothing", "z_loss"))
    n_rows, vocab = len(e), len(c)
    loss = torch.zeros((), dtype=torch.float64, device=e.device)
    grad_e, grad_c = torch.zeros_like(e), torch.zeros_like(c[case.entries])
    grad_bias = None if case.bias is None else torch.zeros(vocab, dtype=dtype, device=e.device)
    sampled = torch.zeros(n_rows, dtype=torch.bool, device=e.device)
    sampled[case.rows] = True
    for first in range(0, n_rows, max(1, BLOCK_ELEMENTS // vocab)):
        block = slice(first, min(n_rows, first + max(1, BLOCK_ELEMENTS // vocab)))
        z = e[block] @ c.T
        if case.bias is not None:
            z += case.bias.to(dtype)
        if softcap:
            z = softcap * torch.tanh(z / softcap)
        lse = z.logsumexp(dim=1)
        target, weight = case.target[block], case.weight[block].to(dtype)
        place = target.clamp(min=0)[:, None]
        row_loss = lse - (1 - smoothing) * z.gather(1, place)[:, 0] - smoothing * z.mean(dim=1) + z_loss * lse.square()
        loss += (weight.double() * row_loss.double()).sum() + case.lse_weight * lse.double().sum()
        dz = (z - lse[:, None]).exp_() * (weight * (1 + 2 * z_loss * lse) + case.lse_weight)[:, None]
        dz -= (weight * smoothing / vocab)[:, None]
        dz.scatter_add_(1, place, -(1 - smoothing) * weight[:, None])
        if softcap:
            dz *= 1 - (z / softcap).square()
        if operand is not None:
            # The factor of all rows is not part of the rounding: fp16 has no room for 1 / N.
            largest = case.weight.max().to(dtype)
            dz = (dz / largest).to(operand).to(dtype) * largest
        here = sampled[block]
        grad_e[block][here] = dz[here] @ c
        grad_c += dz[:, case.entries].T @ e[block]
        if grad_bias is not None:
            grad_bias += dz.sum(dim=0)
    return Solution(loss.item(), grad_e[case.rows], grad_c, grad_bias)


def computed(loss: LossFunction, case: Case, call: Call) -> tuple[Solution, list[Tensor]]:
    """The call of `loss`; and its whole results, to compare bits."""
    for leaf in (case.e, case.c, case.bias):
        if leaf is not None:
            leaf.grad = None
    buffer = torch.zeros(case.c.shape, device=case.c.device) if call.main_grad else None
    found = loss(case.e, case.c, case.labels, bias=case.bias, main_grad_c=buffer, **call.keywords)
    total = found[0] + case.lse_weight * found[1].sum() if isinstance(found, tuple) else found
    if total.dim():
        total = (total.double() * case.weight[: len(total)]).sum()
    total.backward()
    grad_c = case.c.grad if buffer is None else buffer
    assert case.e.grad is not None
    assert grad_c is not None
    grad_bias = None if case.bias is None else case.bias.grad
    whole = [total.detach(), case.e.grad, grad_c] + ([] if grad_bias is None else [grad_bias])
    return Solution(total.item(), case.e.grad[case.rows], grad_c[case.entries], grad_bias), whole


def fp32_logits(case: Case, call: Call, dtype: torch.dtype) -> Solution:
    """The bar. Its gradients are rounded to those dtypes that the kernels return."""
    with without_tf32():
        found = solve(case, call, torch.float32, dtype)
    grad_c = found.c if call.main_grad else found.c.to(dtype)
    return Solution(found.loss, found.e.to(dtype), grad_c, None if found.bias is None else found.bias.to(dtype))


def certify(loss: LossFunction, shape: Shape, name: str, dtype: str, device: torch.device, run: str = "") -> Row:
    """The row of one call. A failure of the kernels is a row, too. A ValueError is a refusal."""
    call = CALLS[name]
    row = Row(shape.name, shape.n, shape.d, shape.v, dtype, name, run)
    case = make_case(shape, call, DTYPES[dtype], device)
    try:
        got, bits = computed(loss, case, call)
        again = computed(loss, case, call)[1]
    except ValueError as error:
        row.status, row.reason = "refused", str(error)
        return row
    except Exception as error:
        row.status, row.reason = "failed", as_reason(error)
        return row
    row.same_bits = all(torch.equal(a, b) for a, b in zip(bits, again, strict=True))
    del bits, again
    truth = solve(case, call, torch.float64, None)
    bar = fp32_logits(case, call, DTYPES[dtype])
    row.loss_err = abs(got.loss - truth.loss) / abs(truth.loss)
    row.de_err, row.dc_err = relative_error(got.e, truth.e), relative_error(got.c, truth.c)
    row.de_ratio = row.de_err / relative_error(bar.e, truth.e)
    row.dc_ratio = row.dc_err / relative_error(bar.c, truth.c)
    if got.bias is not None and truth.bias is not None and bar.bias is not None:
        row.dbias_err = relative_error(got.bias, truth.bias)
        row.dbias_ratio = row.dbias_err / relative_error(bar.bias, truth.bias)
    return row


def calls_of(shapes: Iterable[Shape], options: Iterable[str], dtypes: Iterable[str]) -> list[tuple[Shape, str, str]]:
    """Every call of the grid, all shapes of one kind of kernel in a row, so that kernels compile once."""
    return [
        (shape, option, dtype)
        for dtype in dtypes
        for option in options
        for shape in shapes
        if dtype != "fp32" or shape.n * shape.d * shape.v <= LARGEST_IN_FP32
    ]


def certified(
    loss: LossFunction, calls: list[tuple[Shape, str, str]], device: torch.device, run: str, seconds: float,
    say: Callable[[str], None],
) -> Iterator[Row]:  # fmt: skip
    """The rows of the calls, one after another. Stops after `seconds`, and says how many calls are left."""
    began = time.monotonic()
    for number, (shape, option, dtype) in enumerate(calls):
        if time.monotonic() - began > seconds:
            say(f"{seconds:g} seconds are over: {len(calls) - number} of {len(calls)} calls are not certified")
            return
        row = certify(loss, shape, option, dtype, device, run)
        say(f"[{number + 1}/{len(calls)}] {shape.name} {dtype} {option}: {row.reason or f'{row.worst:.3f}'}")
        yield row


# --------------------------------------------------------------------------------------------------------------- files
def read(path: Path) -> list[Row]:
    """The rows of a certificate; empty if there is none.

    Raises:
        DataError: the file is damaged, or another version wrote it.
    """
    if not path.exists():
        return []
    try:
        return [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read as a certificate ({error})", "move it away") from error


def write(directory: Path, rows: list[Row], run: dict[str, Any]) -> list[Path]:
    """Write rows, runs and table; rows of the same call in an earlier run are replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    kept = {row.key: row for row in [*read(directory / "certificate.jsonl"), *rows]}
    ordered = sorted(kept.values(), key=lambda row: (-row.worst, row.key))
    history = directory / "runs.jsonl"
    known = history.read_text(encoding="utf-8") if history.exists() else ""
    history_text = known + json.dumps(run) + "\n"
    table = page(ordered, [json.loads(line) for line in history_text.splitlines()], directory.name)
    texts = {
        "certificate.jsonl": "".join(json.dumps(asdict(row)) + "\n" for row in ordered),
        "runs.jsonl": history_text,
        "certificate.md": table,
    }
    for name, text in texts.items():
        write_text(directory / name, text)
    return [directory / name for name in texts]


def page(rows: list[Row], runs: list[dict[str, Any]], device: str) -> str:
    """The table, worst ratio first."""
    beyond = [row for row in rows if row.dtype == "bf16" and row.status == "ok" and row.worst > BOUND]
    other_bits = [row for row in rows if row.same_bits is False]
    failed = [row for row in rows if row.status == "failed"]
    columns = (
        "shape", "dtype", "option", "worst ratio", "dE", "dC", "dbias", "loss err", "dE err", "dC err", "same bits",
        "remark",
    )  # fmt: skip
    table = Table(
        columns, [_cells(row) for row in rows], frozenset(("shape", "dtype", "option", "same bits", "remark"))
    )
    used = {row.run for row in rows}
    return "\n".join(
        [
            f"# Certificate of the loss's errors, {device}", "",
            "Each row is one call of `linear_cross_entropy`, compared with fp64. A ratio is the call's "
            "error divided by that of fp32 logits whose gradient is rounded once to the dtype. Errors are relative "
            f"(Frobenius norm for gradients), on {SAMPLED} rows of dE and as many of dC.", "",
            f"* {len(rows)} calls. {len(beyond)} in bf16 lie beyond {BOUND}, {len(failed)} failed, and "
            f"{len(other_bits)} gave other bits in a second call.",
            f"* fp32 is certified up to N x D x V = {LARGEST_IN_FP32:.0e}.", "",
            *table.markdown(), "", "## Runs", "",
            *(f"* {describe(run)}" for run in runs if run["id"] in used), "",
        ]
    )  # fmt: skip


def describe(run: dict[str, Any]) -> str:
    """The run's command, commit, GPU and versions."""
    environment = run["environment"]
    versions = ", ".join(f"{name} {environment['packages'][name]}" for name in ("torch", "triton"))
    return f"`{run['command']}`: commit {commit_in_words(environment['git'])}, {run['device']}, {versions}"


def _cells(row: Row) -> tuple[str, ...]:
    errors = [show(x, ".1e") for x in (row.loss_err, row.de_err, row.dc_err)]
    ratios = [show(x, ".3f") for x in (row.de_ratio, row.dc_ratio, row.dbias_ratio)]
    remark = row.reason or (f"beyond {BOUND}" if row.worst > BOUND else "")
    worst = "-" if row.status != "ok" else f"{row.worst:.3f}"
    same = "-" if row.same_bits is None else "yes" if row.same_bits else "no"
    return (row.shape, row.dtype, row.option, worst, *ratios, *errors, same, remark)
