"""Measure training steps of Hugging Face models, where the loss alone differs: `python benchmarks/models.py`.

One model and one optimizer serve all losses, so that nothing but the loss differs. A step is forward, backward and
AdamW on a fixed batch of random tokens. Repetitions are interleaved: each runs one step with every loss, in shuffled
order; the loss is exchanged between steps, outside of the measured time. In each repetition a loss's time is divided by
that of the model's own loss. Memory is the peak of a step of its own. The losses' values and gradients' norms are
compared before the first step of the optimizer, when all losses have the same weights. Weights are random; nothing is
downloaded.

With trainer=trl the loss is that of TRL's SFTTrainer, with TRL's head (`trl`) and with ours: `losses=[cce_kahan]`.
"""

import importlib
import random
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import cce_kernels
import torch
from cce_kernels.cost.presets import apply_liger, build

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common, problems
from benchmarks.problems import DTYPES
from linrnn.config.schema import COMMANDS, LossConfig, option
from linrnn.core.errors import ConfigError, UnsupportedError
from linrnn.core.garbage import collect_after, collected_at_known_points
from linrnn.core.machine import GIB
from linrnn.core.output import say
from linrnn.losses import check_loss
from linrnn.losses.cce import CceFilterLossConfig, CceKahanLossConfig, filters
from linrnn.losses.liger import LigerLossConfig
from linrnn.models import tuning

KAHAN = "cce_kahan"
OWN = {"none": "standard", "trl": "trl"}  # the first loss: transformers' ForCausalLMLoss on logits, or TRL's head
LEARNING_RATE = 1e-5
SEED = 0  # of weights, data, order and bootstrap


@dataclass
class BenchConfig(common.Keys):
    """Keys of the command line."""

    models: list[str] = option(
        ["llama_1b batch=8 seq=2048", "qwen3_0.6b batch=8 seq=2048", "gemma2_2b batch=2 seq=2048 num_hidden_layers=6"],
        "'NAME batch=… seq=… [KEY=VALUE …]': a preset of `python -m cce_kernels.cost --help` or a model type of "
        "transformers, sequences, tokens of a sequence, and values of the model's configuration",
    )
    losses: list[str] = option(
        ["liger", "cce_kahan"],
        "with options as in 'cce_kahan workspace_mib=256'. The first is always `standard`, the model's own. liger: "
        "Liger's apply_liger_kernel_to_… with its other kernels off. cce_kahan | cce_filter: cce_kernels.patch(model)",
    )
    trainer: str = option("none", "none | trl: TRL's SFTTrainer computes the loss", choices=tuple(OWN))
    dtype: str = option("bf16", "bf16 | fp32: of weights, gradients and AdamW's moments", choices=("bf16", "fp32"))
    checkpointing: bool = option(True, "gradient checkpointing of every layer")
    rounds: int = option(10, "timed steps of every loss, in shuffled order", minimum=2)
    warmup: int = option(2, "steps of every loss before the timed ones, which compile and tune kernels", minimum=1)


COMMANDS["bench_models"] = BenchConfig


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
    v: int  # vocabulary size
    dtype: str
    checkpointing: bool
    loss: str  # as in the configuration
    run: str  # id in runs.jsonl
    status: str = "ok"  # ok | unsupported | out_of_memory | failed
    reason: str = ""
    rounds: int = 0
    step_ms: float | None = None
    ratio: float | None = None  # to the step with the first loss in the same round
    ratio_low: float | None = None
    ratio_high: float | None = None
    peak_gib: float | None = None
    loss_nats: float | None = None  # before the first step, with the weights that all losses begin with
    gradient_norm: float | None = None  # of the first step, all parameters
    rounds_ms: list[float] = field(default_factory=list)  # the step of every round
    trainer: str = "none"

    @property
    def label(self) -> str:
        return self.loss

    @property
    def problem(self) -> tuple[str, int, int, str, bool, str]:
        return self.model, self.batch, self.seq, self.dtype, self.checkpointing, self.trainer

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.step_ms is None else self.batch * self.seq / self.step_ms * 1e3


def read_rows(directory: Path) -> list[Row]:
    """The last row of every model and loss, in the order of their first rows."""
    return common.last_rows(directory, Row, key=lambda row: (row.problem, row.loss))


# ------------------------------------------------------------------------------------------------ models and losses
def parse_model(text: str) -> tuple[str, dict[str, str], int, int]:
    """Name, values of the configuration, sequences and tokens of a sequence of `NAME batch=… seq=… [KEY=VALUE …]`."""
    name, *words = text.split() or [""]
    values = dict(word.split("=", 1) for word in words if "=" in word)
    sizes = [values.pop(key, "") for key in ("batch", "seq")]
    if len(values) + 2 != len(words) or not all(size.isdecimal() and int(size) for size in sizes):
        raise ConfigError(
            f"models: {text!r} must be NAME batch=… seq=… [KEY=VALUE …]", "as in llama_1b batch=8 seq=2048"
        )
    return name, values, int(sizes[0]), int(sizes[1])


def build_published(name: str, overrides: dict[str, str], dtype: torch.dtype, device: torch.device) -> Any:
    """A model of transformers with random weights: a preset of `cce_kernels.cost` or a model type."""
    try:
        return build(name, overrides, dtype, device)
    except ValueError as error:
        raise ConfigError(f"models: {error}", "see python -m cce_kernels.cost --help") from error


def sft_trainer(model: Any, device: torch.device) -> Any:
    """TRL's SFTTrainer for a model. Neither its data nor its tokenizer is read."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"report_to": "none", "bf16": model.dtype == torch.bfloat16}
        config = SFTConfig(folder, use_cpu=device.type == "cpu", gradient_checkpointing=False, **options)
        return SFTTrainer(model, config, None, Dataset.from_dict({"input_ids": [[0, 1]]}), None, tokenizer)


def put_in(model: Any, loss: LossConfig, device: torch.device, trainer: str) -> Callable[[], object]:
    """Let the model, or TRL's trainer, compute its loss with `loss`. Returns what undoes it."""
    if loss.name == OWN[trainer]:
        return lambda: None
    check_loss(loss, device)
    if trainer == "trl" and loss == common.parse_loss(KAHAN):
        utils: Any = importlib.import_module("trl.trainer.utils")
        undo = partial(setattr, utils, "_ChunkedLogProbFunction", utils._ChunkedLogProbFunction)
        cce_kernels.register_in_trl()
        return undo
    if trainer == "none" and isinstance(loss, CceKahanLossConfig):
        names = ["accumulate", "workspace_mib"]
        if isinstance(loss, CceFilterLossConfig) and filters(loss):
            names += ["filter_eps", "filter_unbiased", "filter_mass", "filter_c", "filter_if_faster"]
        cce_kernels.patch(model, **{name: getattr(loss, name) for name in names})
        return partial(cce_kernels.unpatch, model)
    if trainer == "none" and isinstance(loss, LigerLossConfig) and loss.accumulate == "native":
        apply_liger(model)
        return partial(delattr, model, "forward")
    raise UnsupportedError(
        f"{loss.name} has no form for Hugging Face models with trainer={trainer}, or its options have none",
        "choose liger, cce_kahan, cce_filter; with trainer=trl cce_kahan alone",
    )


# ------------------------------------------------------------------------------------------------------ measuring
def run_benchmark(config: BenchConfig) -> list[Row]:
    """Measure every loss in every model. A model's rows are written as soon as it is done."""
    losses = {text: common.parse_loss(text) for text in dict.fromkeys([OWN[config.trainer], *config.losses])}
    models, measured = [parse_model(text) for text in config.models], []
    record = common.Record(config, "bench_models")
    for model in models:
        with tuning.show_progress(), tuning.during(model[0]):
            rows = Bench(config, *model, record.device).measure(losses, record.id)
        record.add(*rows)
        measured += rows
        common.free(record.device)
        say(f"{rows[0].model}, {rows[0].batch} x {rows[0].seq} tokens")
        for row in rows:
            say(f"  {row.loss}: {row.reason or f'{row.step_ms:.1f} ms'}")
    return measured


class Bench:
    """One model, its optimizer and its batch."""

    def __init__(
        self, config: BenchConfig, name: str, overrides: dict[str, str], batch: int, seq: int, device: torch.device
    ) -> None:
        torch.manual_seed(SEED)
        self.config, self.device = config, device
        self.name = " ".join([name, *(f"{key}={value}" for key, value in overrides.items())])
        self.model: Any = build_published(name, overrides, DTYPES[config.dtype], device)
        if config.checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.ids = torch.randint(self.model.config.get_text_config().vocab_size, (batch, seq), device=device)
        self.trainer = sft_trainer(self.model, device) if config.trainer == "trl" else None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=device.type == "cuda")

    def measure(self, losses: dict[str, LossConfig], run_id: str) -> list[Row]:
        """A row for each loss: values with the same weights first, then warm-up and memory, then the rounds."""
        vocab, width = self.model.get_output_embeddings().weight.shape
        parameters = sum(p.numel() for p in self.model.parameters())
        batch, seq = self.ids.shape
        sizes = batch, seq, width, vocab, self.config.dtype, self.config.checkpointing
        kind, own = self.config.trainer, OWN[self.config.trainer]
        rows = {text: Row(self.name, parameters, *sizes, text, run_id, trainer=kind) for text in losses}
        shuffled = random.Random(SEED).sample

        def each(action: Callable[[Row], None], order: Iterable[str] = rows) -> None:
            """Run an action with each loss that still runs, put into the model."""

            def act(row: Row) -> None:
                undo = put_in(self.model, losses[row.loss], self.device, kind)
                try:
                    action(row)
                finally:
                    undo()

            for row in (rows[text] for text in order if rows[text].status == "ok"):
                common.attempt(row, self.device, partial(act, row))
                self.optimizer.zero_grad()
                collect_after(1)

        with collected_at_known_points():
            each(self._first_values)
            each(self._warm_up)
            for _ in range(self.config.rounds):
                each(self._turn, shuffled([*rows], len(rows)))
        for row in (row for row in rows.values() if row.status == "ok"):
            row.rounds = len(row.rounds_ms)
            row.step_ms = median(row.rounds_ms)
            if rows[own].status == "ok":
                found = common.ratio_to(row.rounds_ms, rows[own].rounds_ms, SEED)
                row.ratio, row.ratio_low, row.ratio_high = found
        return list(rows.values())

    def step(self) -> None:
        """Forward, backward and optimizer."""
        self._loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _loss(self) -> torch.Tensor:
        inputs = {"input_ids": self.ids, "labels": self.ids, "use_cache": False}
        if self.trainer is None:
            return self.model(**inputs).loss
        with self.trainer.compute_loss_context_manager():
            return self.trainer.compute_loss(self.model, inputs | {"attention_mask": torch.ones_like(self.ids)})

    def _turn(self, row: Row) -> None:
        """A loss's part of a round: one step."""
        row.rounds_ms.append(problems.time_ms(self.step, self.device))

    def _first_values(self, row: Row) -> None:
        """The loss and the norm of its gradient, before the first step of the optimizer."""
        loss = self._loss()
        loss.backward()
        norms = [p.grad.float().norm() for p in self.model.parameters() if p.grad is not None]
        row.loss_nats, row.gradient_norm = loss.item(), torch.stack(norms).norm().item()

    def _warm_up(self, row: Row) -> None:
        for _ in range(self.config.warmup):
            self.step()
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            row.peak_gib = (before + (problems.peak_bytes(self.step, self.device) or 0)) / GIB


# ------------------------------------------------------------------------------------------------------- the page
COLUMNS: common.Columns = {
    "loss": lambda row: f"`{row.loss}`",
    "n": "rounds:d",
    "step, ms": "step_ms:.1f",
    "/ first": "ratio:.3f",
    "95 %": lambda row: common.interval(row.ratio_low, row.ratio_high),
    "tokens/s": "tokens_per_second:,.0f",
    "peak, GiB": "peak_gib:.1f",
    "loss, nats": "loss_nats:.5f",
    "gradient's norm": "gradient_norm:.4g",
}


def write_report(directory: Path) -> list[Path]:
    """Write models.md, and models.png where there are times; returns their paths."""
    sections: dict[str, list[Row]] = {}
    times: dict[str, dict[str, float]] = {}
    memory: dict[str, dict[str, float]] = {}
    rows = read_rows(directory)
    for own in common.grouped(rows, key=lambda row: row.problem):
        first = own[0]
        title = f"{first.model}, {first.batch} x {first.seq} tokens, V = {first.v:,}, {first.dtype}"
        sections[title + ", checkpointing" * first.checkpointing + ", TRL" * (first.trainer == "trl")] = own
        name = f"{first.model.replace(' num_hidden_layers=', ', layers: ')}\n{first.batch} x {first.seq:,} tokens"
        name += ", TRL" * (first.trainer == "trl")
        times[name] = {row.loss: row.step_ms for row in own if row.step_ms is not None}
        memory[name] = {row.loss: row.peak_gib for row in own if row.peak_gib is not None}
    panels = {"ms a step": (".0f", times), "peak memory, GiB": (".1f", memory)}
    drawn = {axis: panel for axis, panel in panels.items() if any(panel[1].values())}
    note = (
        f"{common.devices_of(directory)}, forward, backward and AdamW. standard: the loss of transformers, on logits."
    )
    pictures = {"models": common.bars(drawn, _finding(times, memory), note)} if drawn else {}
    title = "Training steps of Hugging Face models"
    return common.write_report(directory, "models", title, sections, COLUMNS, pictures)


def _finding(times: common.Bars, memory: common.Bars) -> str:
    """How much faster and smaller steps become with our exact loss, beside the first one."""
    faster, smaller = (
        [1 - own[KAHAN] / own[first] for own in bars.values() for first in OWN.values() if {KAHAN, first} <= own.keys()]
        for bars in (times, memory)
    )
    if not faster or not smaller:
        return "Training steps of Hugging Face models"
    return (
        f"One line makes steps {min(faster):.0%} to {max(faster):.0%} shorter, and takes {min(smaller):.0%} to "
        f"{max(smaller):.0%} off the peak"
    )


if __name__ == "__main__":
    common.run("bench_models", __doc__, run_benchmark, write_report)
