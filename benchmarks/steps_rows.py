"""Rows of benchmarks/steps.py, one line of JSON each in rows.jsonl, and their ratios."""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks import common
from linrnn.runs.intervals import Estimate, estimate

BASELINE = "compiled"
EAGER = "standard"  # the study's second baseline
AGAIN = f"{BASELINE}, again"  # the baseline once more, as a backend of its own: its ratio shows the noise
START = "init_from"  # the key of a line that names the weights of another run
WITHOUT_EFFECT = ("parallel=none", "trainer.accumulation_steps=1")  # words of a line


@dataclass
class Row:
    """Training steps of one model with one loss.

    Times are in ms. Lists hold one entry for each round: the mean over the `steps` consecutive steps of a turn.
    """

    line: str  # of the configuration: overrides of train.py
    model: str
    size: str
    parameters: int
    batch: int
    seq: int
    d: int  # hidden dimensions
    v: int  # vocabulary size
    precision: str
    loss: str  # as in the configuration, or AGAIN
    run: str  # id in runs.jsonl
    steps: int  # of a turn
    weights: str | None = None  # directory of the checkpoint that the steps start from; null: random weights
    text: str | None = None  # fingerprint of the prepared data behind the batch; null: random tokens
    status: str = "ok"  # ok | unsupported | out_of_memory | failed
    reason: str = ""
    wall_ms: list[float] = field(default_factory=list)  # from an idle device to an idle device
    host_ms: list[float] = field(default_factory=list)  # until the host has given the device all work of the turn
    sm_mhz: list[float] = field(default_factory=list)  # the GPU's clock, read in untimed steps; empty on a CPU
    allocations: int | None = None  # cudaMalloc calls within the timed steps; null on a CPU
    peak_gib: float | None = None  # the most that the process had allocated during a step; null on a CPU
    loss_forward_ms: float | None = None  # the output layer's passes, medians over own `steps`; null in CUDA graphs
    loss_backward_ms: float | None = None
    loss_nats: float | None = None  # with the weights that all losses begin with
    gradient_norm: float | None = None  # likewise, all parameters, before clipping

    @property
    def label(self) -> str:
        return self.loss

    @property
    def rounds(self) -> int:
        return len(self.wall_ms)

    @property
    def step_ms(self) -> float | None:
        """The median over the rounds."""
        return median(self.wall_ms) if self.wall_ms else None

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.step_ms is None else self.batch * self.seq / self.step_ms * 1e3

    @property
    def loss_layer_ms(self) -> float | None:
        """Both passes of the output layer."""
        forward, backward = self.loss_forward_ms, self.loss_backward_ms
        return None if forward is None or backward is None else forward + backward

    @property
    def loss_layer_share(self) -> float | None:
        """Of the step's time."""
        layer, step = self.loss_layer_ms, self.step_ms
        return None if layer is None or step is None else layer / step

    @property
    def speed_with_a_free_loss(self) -> float | None:
        """The step's speed, as a multiple, if the output layer took no time."""
        return None if self.loss_layer_share is None else 1 / (1 - self.loss_layer_share)


def ratio_of(row: Row, base: Row | None) -> Estimate | None:
    """Time divided by the base's in the same round, for equally many tokens; None without rounds of one process.

    The interval is Student's of 90 %, of the ratios' logarithms.
    """
    if base is None or row.run != base.run or not row.status == base.status == "ok" or not row.rounds:
        return None
    more = row.batch / base.batch
    ratios = [ms / of_base / more for ms, of_base in zip(row.wall_ms, base.wall_ms, strict=True)]
    return estimate(ratios, ratios=True)


def read_rows(directory: Path) -> list[Row]:
    """The last row of every model line and loss, in the order of their first rows."""
    return common.last_rows(directory, Row, key=lambda row: (row.line, row.loss))


def key_of(word: str) -> str:
    return word.split("=")[0].lstrip("+~")


def options_of(line: str) -> list[str]:
    """What a line says beside model, size, batch and data: of starting weights the last folder's name."""
    told = ["model", "model.config", "model.shared_projection_rank"]
    told += ["size", "size.vocab_size", "trainer.batch_size", "trainer.seq_len"]
    return [
        f"{START}={Path(word.split('=', 1)[1]).name}" if key_of(word) == START else word.removeprefix("trainer.")
        for word in line.split()
        if key_of(word) not in told and key_of(word).split(".")[0] != "data" and word not in WITHOUT_EFFECT
    ]
