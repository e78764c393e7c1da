"""Rows of benchmarks/loss.py: rows.json, a JSON list, and runs.jsonl with the commands behind the rows. No torch.

A directory holds the rows of one device. A run replaces the rows that it measures again for the same set. All other
rows stay, so runs of few backends or shapes add up. Ratios are taken within a run. Times of different runs cannot be
compared.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from linrnn.core.errors import DataError
from linrnn.core.files import read_json, write_text

BASELINE, EAGER = "compiled", "standard"
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
    logits: str  # flat | peaked | half_ignored | trained
    backend: str
    workspace_mib: float | None  # null: the backend's default, or the backend has no workspace
    trained: str = ""  # for a trained model's logits: the model, its training and its data.
    run: str = ""  # id in runs.jsonl.
    set: str = ""  # the set of the measurement.
    status: str = "started"  # ok | unsupported | out_of_memory | failed; started: killed before it was done
    reason: str = ""
    rounds: int = 0
    forward_ms: float | None = None  # without gradients, as in evaluation
    backward_ms: float | None = None  # from the end of the forward pass that goes with it
    backward_ratio_to_eager: float | None = None  # backward_ms to that of `standard`
    forward_backward_ms: float | None = None
    forward_backward_ms_q25: float | None = None
    forward_backward_ms_q75: float | None = None
    graph_ms: float | None = None  # both passes as a CUDA graph's replay: in rows up to commit 0596196b
    ratio_to_compiled: float | None = None  # forward_backward_ms to that of torch.compile, with 95 % interval
    ratio_to_compiled_low: float | None = None
    ratio_to_compiled_high: float | None = None
    ratio_to_product: float | None = None  # forward_backward_ms to one cuBLAS product N x D x V, with 95 % interval
    ratio_to_product_low: float | None = None
    ratio_to_product_high: float | None = None
    ratio_to_three_products: float | None = None  # to the floor; rows without an interval: to products of 4096 rows
    ratio_to_three_products_low: float | None = None
    ratio_to_three_products_high: float | None = None
    forward_ratio_to_product: float | None = None
    graph_ratio_to_compiled: float | None = None  # of the two graphs' replays, likewise
    extra_mib: float | None = None
    forward_extra_mib: float | None = None
    loss_nats: float | None = None
    loss_err: float | None = None
    de_err: float | None = None
    dc_err: float | None = None
    de_err_ratio: float | None = None  # to the error of fp32 logits with a rounded softmax - onehot
    dc_err_ratio: float | None = None
    batches: int = 1
    dc_sum_err: float | None = None  # of dC summed over so many batches, where they are more than one
    deterministic: bool | None = None  # whether two calls gave the same bits
    first_call_s: float | None = None  # compiling and tuning of kernels
    sm_mhz: float | None = None  # medians over the rounds
    watts: float | None = None
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

    @property
    def key(self) -> tuple[Any, ...]:
        return (*self.problem, self.backend, self.workspace_mib)


def rows_path(directory: Path) -> Path:
    return directory / "rows.json"


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; empty if the file does not exist."""
    if not path.exists():
        return []
    try:
        return [Row(**row) for row in read_json(path)]
    except TypeError as error:
        raise DataError(
            f"{path} cannot be read as benchmark rows ({error})", "move it away, or measure again elsewhere"
        ) from error


def merge_rows(path: Path, measured: list[Row]) -> None:
    """Replace rows of the same problem, backend, workspace and set by `measured`. All other rows stay."""
    rows = {(row.key, row.set): row for row in [*read_rows(path), *measured]}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows.values())
    write_text(path, f"[\n{lines}\n]\n")
