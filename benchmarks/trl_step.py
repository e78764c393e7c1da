"""Measure whole steps of TRL's SFTTrainer with both heads, TRL's own and ours: `python benchmarks/trl_step.py`.

One trainer serves both: the head is exchanged between steps, outside of the measured time. A step is forward, backward,
clipping and AdamW, on one batch of random tokens. The learning rate is 0: weights stay, so that losses compare.
"""

import importlib
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import cce_kernels
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.models import SEED, build_published, parse_model
from benchmarks.problems import DTYPES
from linrnn.config.compose import add_command
from linrnn.config.schema import option
from linrnn.core.machine import GIB
from linrnn.core.output import say

TRL, OURS = "trl", "cce_kahan"


@dataclass
class BenchConfig(common.Keys):
    """Keys of the command line."""

    models: list[str] = option(
        ["qwen3_0.6b batch=8 seq=2048", "llama_1b batch=8 seq=2048"], "as in benchmarks/models.py"
    )
    loss_type: str = option("nll", "of SFTConfig", choices=("nll", "dft"))
    dtype: str = option("bf16", "bf16 | fp32: of weights, gradients and AdamW's moments", choices=("bf16", "fp32"))
    checkpointing: bool = option(True, "gradient checkpointing of every layer, as TRL's default")
    rounds: int = option(8, "timed steps of each, in shuffled order", minimum=2)
    warmup: int = option(2, "steps of each before the timed ones", minimum=1)


add_command("bench_trl", BenchConfig)


@dataclass
class Row:
    """Steps of one model with one head. Times are medians in ms; memory is the most that a step had allocated."""

    model: str  # as in the configuration, without batch and seq
    batch: int
    seq: int
    v: int  # vocabulary entries
    dtype: str
    checkpointing: bool
    loss_type: str
    label: str  # the head: trl | cce_kahan
    run: str  # id in runs.jsonl
    rounds: int
    step_ms: float
    ratio: float  # to TRL's step of the same round
    ratio_low: float  # ends of the bootstrap interval of 95 %
    ratio_high: float
    peak_gib: float | None
    nats: float  # training loss, the same in every step
    rounds_ms: list[float] = field(default_factory=list)
    status: str = "ok"

    @property
    def problem(self) -> str:
        where = f"{self.model}, {self.batch} x {self.seq} tokens, V = {self.v:,}, {self.dtype}, {self.loss_type}"
        return f"{where}, checkpointing" if self.checkpointing else where


# -------------------------------------------------------------------------------------------------------- measuring
def train(config: BenchConfig, text: str, device: torch.device, run: str) -> list[Row]:
    """The rows of one model: TRL's head, then ours."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    utils: Any = importlib.import_module("trl.trainer.utils")
    own = utils._ChunkedLogProbFunction  # what register_in_trl replaces; it is put back
    shuffled = random.Random(SEED).sample
    order = [head for _ in range(config.warmup + config.rounds) for head in shuffled([TRL, OURS], 2)]
    ms: dict[str, list[float]] = {TRL: [], OURS: []}
    peaks, begins, cuda = dict.fromkeys(ms, 0), [0.0], device.type == "cuda"

    class Watch(TrainerCallback):
        """Puts in the head of the next step, and measures the step."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            utils._ChunkedLogProbFunction = own
            if order[state.global_step] == OURS:
                cce_kernels.register_in_trl()
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begins[0] = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            name = order[state.global_step - 1]
            ms[name].append((time.perf_counter() - begins[0]) * 1e3)
            if cuda and len(ms[name]) > config.warmup:
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated())

    name, overrides, batch, seq = parse_model(text)
    torch.manual_seed(SEED)
    model = build_published(name, overrides, DTYPES[config.dtype], device)
    vocab = model.config.get_text_config().vocab_size
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    data = Dataset.from_dict({"input_ids": torch.randint(2, vocab, (batch, seq)).tolist()})
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder, max_steps=len(order), learning_rate=0.0, per_device_train_batch_size=batch, max_length=seq,
            loss_type=config.loss_type, gradient_checkpointing=config.checkpointing, bf16=config.dtype == "bf16",
            use_cpu=not cuda, report_to="none", logging_steps=1, save_strategy="no", disable_tqdm=True, seed=SEED,
        )  # fmt: skip
        trainer = SFTTrainer(model, arguments, None, data, None, tokenizer, callbacks=[Watch()])
        try:
            trainer.train()
        finally:
            utils._ChunkedLogProbFunction = own
    nats = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    times = {name: ms[name][config.warmup :] for name in ms}
    label = " ".join([name, *(f"{key}={value}" for key, value in overrides.items())])
    return [
        Row(
            label, batch, seq, vocab, config.dtype, config.checkpointing, config.loss_type, head, run, len(own),
            median(own), *common.ratio_to(own, times[TRL], SEED), peaks[head] / GIB if cuda else None,
            nats[order.index(head)], own,
        )
        for head, own in times.items()
    ]  # fmt: skip


def run_benchmark(config: BenchConfig) -> list[Row]:
    """Measure every model. Its rows are written as soon as it is done."""
    record, measured = common.Record(config, "bench_trl"), []
    for text in config.models:
        rows = train(config, text, record.device, record.id)
        record.add(*rows)
        common.free(record.device)
        measured += rows
        say(f"{rows[0].problem}: " + ", ".join(f"{row.label} {row.step_ms:.1f} ms" for row in rows))
    return measured


# --------------------------------------------------------------------------------------------------------- the page
COLUMNS: common.Columns = {
    "head": lambda row: f"`{row.label}`",
    "n": "rounds:d",
    "step, ms": "step_ms:.1f",
    "/ trl": "ratio:.3f",
    "95 %": lambda row: common.interval(row.ratio_low, row.ratio_high),
    "peak, GiB": "peak_gib:.2f",
    "loss, nats": "nats:.5f",
}


def write_report(directory: Path) -> list[Path]:
    """Write trl.md from the last row of every model and head; returns its path."""
    rows = common.last_rows(directory, Row, key=lambda row: (row.problem, row.label))
    sections = {own[0].problem: own for own in common.grouped(rows, key=lambda row: row.problem)}
    return common.write_report(directory, "trl", "Steps of TRL's SFTTrainer", sections, COLUMNS)


if __name__ == "__main__":
    common.run("bench_trl", __doc__, run_benchmark, write_report)
