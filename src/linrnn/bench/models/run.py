"""Training steps of a model, with each loss in turn, in one process and on the same weights.

One model and one optimizer serve all losses, so that nothing but the loss differs. Every round runs one step with each
loss, in shuffled order; the loss is exchanged between steps, outside of the measured time. In each round a loss's time
is divided by that of `standard`. Memory is the peak of a step of its own. The losses' values and gradients' norms are
compared before the first step of the optimizer, when all losses have the same weights.
"""

import gc
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from linrnn.bench.loss import timing
from linrnn.bench.loss.sets import parse_loss
from linrnn.bench.models.rows import Row
from linrnn.bench.records import append_rows, begin_run, results_directory, status_and_reason
from linrnn.config.schema import BenchModelsConfig, LossConfig
from linrnn.core.errors import ConfigError
from linrnn.core.garbage import collect_after, collected_at_known_points
from linrnn.core.machine import GIB
from linrnn.losses.hugging_face import build_published, model_loss
from linrnn.models import tuning
from linrnn.runs.intervals import interval_of_median
from linrnn.training.plan import check_memory
from linrnn.training.runtime import resolve_device

OWN = "standard"
LEARNING_RATE = 1e-5
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_BLOCK_ROWS = 1024  # rows of fp64 logits at a time


def run_benchmark(config: BenchModelsConfig, command: str, say: Callable[[str], None]) -> list[Row]:
    """Measure every loss in every model. A model's rows are written as soon as it is done.

    Args:
        config: see configs/bench_models.yaml.
        command: the command line, for the record.
        say: shows text to the user.

    Raises:
        ConfigError: a model, loss or option is not known.
        UnsupportedError: on a CPU, a step needs more memory than this machine has free.
    """
    directory, device = results_directory(config, "bench_models"), resolve_device(config.device)
    losses = {text: parse_loss(text) for text in dict.fromkeys([OWN, *config.losses])}
    models = [parse_model(text) for text in config.models]
    if device.type == "cpu":
        for name, overrides, batch, seq in models:
            _check_fits(config, name, overrides, batch * seq)
    run_id = begin_run(directory, command, config)["id"]
    measured: list[Row] = []
    for number, (name, overrides, batch, seq) in enumerate(models, start=1):
        begin = time.perf_counter()
        with tuning.show_progress(), tuning.during(f"{name} ({number} of {len(models)})"):
            bench = Bench(config, name, overrides, batch, seq, device)
            rows = bench.measure(losses, run_id)
        append_rows(directory, rows)
        measured += rows
        del bench
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        say(f"{rows[0].model}, {batch} x {seq} tokens: {time.perf_counter() - begin:.0f} s")
        for row in rows:
            say(f"  {row.loss}: {row.reason or f'{row.step_ms:.1f} ms'}")
    return measured


def parse_model(text: str) -> tuple[str, dict[str, str], int, int]:
    """Name, values of the configuration, sequences and tokens of a sequence of `NAME batch=… seq=… [KEY=VALUE …]`.

    Raises:
        ConfigError: batch or seq is missing or no positive integer, or a word is no KEY=VALUE.
    """
    name, *words = text.split() or [""]
    values = dict(word.split("=", 1) for word in words if "=" in word)
    sizes = [values.pop(key, "") for key in ("batch", "seq")]
    if len(values) + 2 != len(words) or not all(size.isdecimal() and int(size) for size in sizes):
        raise ConfigError(
            f"models: {text!r} must be NAME batch=… seq=… [KEY=VALUE …]", "as in llama_1b batch=8 seq=2048"
        )
    return name, values, int(sizes[0]), int(sizes[1])


def _check_fits(config: BenchModelsConfig, name: str, overrides: dict[str, str], n_tokens: int) -> None:
    """Reject a step that cannot fit on a CPU, where the system would kill the process without a message.

    It holds at least weights, gradients and two moments, and the logits of `standard` in the model's dtype and in fp32.
    """
    dtype = _DTYPES[config.dtype]
    model = build_published(name, overrides, dtype, torch.device("meta"))
    vocab = model.get_output_embeddings().weight.shape[0]
    state, logits = 4 * dtype.itemsize * sum(p.numel() for p in model.parameters()), dtype.itemsize + 4
    needed = state + logits * n_tokens * vocab
    what = f"a step of {name} with {n_tokens:,} tokens needs {needed / GIB:.1f} GiB or more"
    check_memory(needed, what, "a smaller model or batch, as in models=['llama_1b batch=1 seq=64 num_hidden_layers=1']")


class Bench:
    """One model, its optimizer and its batch."""

    def __init__(
        self,
        config: BenchModelsConfig,
        name: str,
        overrides: dict[str, str],
        batch: int,
        seq: int,
        device: torch.device,
    ) -> None:
        torch.manual_seed(config.seed)
        self.config, self.device = config, device
        self.name = " ".join([name, *(f"{key}={value}" for key, value in overrides.items())])
        self.model: Any = build_published(name, overrides, _DTYPES[config.dtype], device)
        if config.checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.ids = torch.randint(self.model.config.get_text_config().vocab_size, (batch, seq), device=device)
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=fused)

    def measure(self, losses: dict[str, LossConfig], run_id: str) -> list[Row]:
        """A row for each loss: values with the same weights first, then warm-up and memory, then the rounds."""
        rows = {text: self._row(text, run_id) for text in losses}
        self._attempt(rows, losses, self._compare)
        self._attempt(rows, losses, self._warm_up)
        running = [text for text, row in rows.items() if row.status == "ok"]
        shuffle = random.Random(self.config.seed).shuffle
        with collected_at_known_points():
            for _ in range(self.config.rounds):
                order = list(running)
                shuffle(order)
                for text in order:
                    self._attempt({text: rows[text]}, losses, self._turn)
                    collect_after(1)
        ran = {text: row for text, row in rows.items() if row.status == "ok"}
        for row in ran.values():
            _record_times(row, ran.get(OWN), self.config.seed)
        return list(rows.values())

    def _turn(self, row: Row) -> None:
        """A loss's part of a round: one step."""
        row.rounds_ms.append(timing.time_ms(self.step, self.device))

    def step(self) -> None:
        """Forward, backward and optimizer."""
        self._loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _loss(self) -> torch.Tensor:
        return self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss

    def _row(self, text: str, run_id: str) -> Row:
        (batch, seq), config = self.ids.shape, self.config
        vocab, width = self.model.get_output_embeddings().weight.shape
        return Row(
            self.name, sum(p.numel() for p in self.model.parameters()), batch, seq, width, vocab, config.dtype,
            config.checkpointing, text, run_id,
        )  # fmt: skip

    def _attempt(self, rows: dict[str, Row], losses: dict[str, LossConfig], action: Callable[[Row], None]) -> None:
        """Run an action with each loss that still runs. A loss's failure is a result; a wrong option is not."""
        for text, row in rows.items():
            if row.status != "ok":
                continue
            try:
                with model_loss(self.model, losses[text], self.device):
                    action(row)
            except ConfigError:
                raise
            except Exception as error:
                row.status, row.reason = status_and_reason(error)
            self.optimizer.zero_grad()

    def _compare(self, row: Row) -> None:
        """The loss and the norm of its gradient, before the first step of the optimizer."""
        loss = self._loss()
        loss.backward()
        norms = [p.grad.float().norm() for p in self.model.parameters() if p.grad is not None]
        row.loss_nats, row.gradient_norm = loss.item(), torch.stack(norms).norm().item()
        row.loss_err = abs(row.loss_nats / self.true_nats - 1)

    def _warm_up(self, row: Row) -> None:
        for _ in range(self.config.warmup):
            self.step()
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            beyond = timing.peak_bytes(self.step, self.device)
            assert beyond is not None
            row.peak_gib = (before + beyond) / GIB

    @property
    def true_nats(self) -> float:
        """The loss by fp64 logits of the model's own hidden states, computed once."""
        if not hasattr(self, "_true_nats"):
            self._true_nats = self._fp64_loss()
        return self._true_nats

    @torch.no_grad()
    def _fp64_loss(self) -> float:
        hidden = self.model.base_model(input_ids=self.ids, use_cache=False)[0][:, :-1].flatten(0, 1)
        labels, weight = self.ids[:, 1:].flatten(), self.model.get_output_embeddings().weight.double()
        softcap = getattr(self.model.config, "final_logit_softcapping", None)
        total = 0.0
        for e, target in zip(hidden.split(_BLOCK_ROWS), labels.split(_BLOCK_ROWS), strict=True):
            logits = e.double() @ weight.T
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            total += F.cross_entropy(logits, target, reduction="sum").item()
        return total / len(labels)


def _record_times(row: Row, own: Row | None, seed: int) -> None:
    ms, row.rounds = np.array(row.rounds_ms), len(row.rounds_ms)
    row.step_ms_q25, row.step_ms, row.step_ms_q75 = map(float, np.quantile(ms, (0.25, 0.5, 0.75)))
    if own is not None:
        ratios = ms / np.array(own.rounds_ms)
        row.ratio = float(np.median(ratios))
        row.ratio_low, row.ratio_high = interval_of_median(ratios, seed)
