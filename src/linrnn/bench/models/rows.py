"""Rows of the benchmark of models: a line of JSON each in rows.jsonl, beside the commands in runs.jsonl."""

from dataclasses import dataclass, field
from pathlib import Path

from linrnn.bench.records import last_rows


@dataclass
class Row:
    """Training steps of one model with one loss.

    Times are medians over `rounds`, in ms. Memory is the most that the process had allocated during a step, in GiB
    (null on a CPU). A ratio is the median of the rounds' ratios, with its bootstrap interval of 95 %.
    """

    model: str  # as in the configuration, without batch and seq
    parameters: int
    batch: int
    seq: int
    d: int  # hidden dimensions
    v: int  # vocabulary entries
    dtype: str
    checkpointing: bool
    loss: str  # as in the configuration
    run: str  # id in runs.jsonl
    status: str = "ok"  # ok | unsupported | out_of_memory | failed
    reason: str = ""
    rounds: int = 0
    step_ms: float | None = None
    step_ms_q25: float | None = None
    step_ms_q75: float | None = None
    ratio: float | None = None  # to the step with `standard` in the same round
    ratio_low: float | None = None
    ratio_high: float | None = None
    peak_gib: float | None = None
    loss_nats: float | None = None  # before the first step, with the weights that all losses begin with
    loss_err: float | None = None  # of loss_nats, relative to fp64 logits of the same hidden states
    gradient_norm: float | None = None  # of the first step, all parameters
    rounds_ms: list[float] = field(default_factory=list)  # the step of every round; not in rows before 24 November 2026

    @property
    def problem(self) -> tuple[str, int, int, str, bool]:
        return self.model, self.batch, self.seq, self.dtype, self.checkpointing

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.step_ms is None else self.batch * self.seq / self.step_ms * 1e3


def read_rows(directory: Path) -> list[Row]:
    """The last row of every model and loss, in the order of their first rows.

    Raises:
        DataError: nothing was measured, or the file is damaged.
    """
    return last_rows(directory, Row, key=lambda row: (row.problem, row.loss))
