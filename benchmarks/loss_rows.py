"""Rows of benchmarks/loss.py, one line of JSON each in rows.jsonl.

A directory holds the rows of one device. Of a problem, backend and set the last row counts, so runs of few backends or
shapes add up. Ratios are taken within a run. Times of different runs cannot be compared.
"""

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import common

BASELINE = "compiled"
AGAIN = "(again)"  # marks the second entry of the baseline. Its ratio to the first entry is the noise
BAR = "fp32_logits"  # names the row of benchmarks.problems.fp32_logits_of
FLOOR = "three_products_cublas"  # names the row of benchmarks.problems.three_products: time alone


@dataclass
class Row:
    """One backend on one problem.

    Times are medians over `rounds`, in ms. Memory is the peak of one call beyond inputs and gradients, in MiB (null on
    a CPU). Errors are relative to fp64 (Frobenius norm for gradients). A ratio is the median of the rounds' ratios.
    """

    shape: str
    n: int
    d: int
    v: int
    dtype: str  # of the products
    gradients: str  # dtype of hidden states, weight and their gradients
    logits: str  # flat | peaked | half_ignored; of committed rows also `trained`, a trained model's
    backend: str
    workspace_mib: float | None  # null: the backend's default, or the backend has no workspace
    run: str = ""  # id in runs.jsonl.
    set: str = ""  # the set of the measurement.
    status: str = "ok"  # ok | unsupported | out_of_memory | failed
    reason: str = ""
    rounds: int = 0
    forward_ms: float | None = None  # without gradients, as in evaluation
    forward_backward_ms: float | None = None
    ratio_to_compiled: float | None = None  # forward_backward_ms to that of torch.compile, with 95 % interval
    ratio_to_compiled_low: float | None = None
    ratio_to_compiled_high: float | None = None
    ratio_to_three_products: float | None = None  # to the floor; rows without an interval: to products of 4096 rows
    ratio_to_three_products_low: float | None = None
    ratio_to_three_products_high: float | None = None
    extra_mib: float | None = None
    forward_extra_mib: float | None = None
    loss_nats: float | None = None
    loss_err: float | None = None
    de_err: float | None = None
    dc_err: float | None = None
    de_err_ratio: float | None = None  # to the error of fp32 logits with a rounded softmax - onehot
    dc_err_ratio: float | None = None
    deterministic: bool | None = None  # whether two calls gave the same bits
    # Every round's times, in order, so that intervals can be computed again. Some rows lack them.
    rounds_ms: list[float] = field(default_factory=list)  # of forward and backward pass
    forward_rounds_ms: list[float] = field(default_factory=list)  # of the forward pass without gradients

    @property
    def label(self) -> str:
        """Backend and workspace, as in the configuration."""
        if self.workspace_mib is None:
            return self.backend
        return f"{self.backend} workspace_mib={self.workspace_mib:g}"

    @property
    def problem(self) -> tuple[str, str, str, str]:
        return self.shape, self.dtype, self.gradients, self.logits


def read_rows(directory: Path) -> list[Row]:
    """The last row of every problem, backend and set.

    Raises:
        DataError: nothing was measured, or the file is damaged.
    """
    return common.last_rows(directory, Row, key=lambda row: (row.problem, row.label, row.set))
