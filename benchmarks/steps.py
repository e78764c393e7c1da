"""Measure training steps of our models, where the loss alone differs: `python benchmarks/steps.py`.

One model and one optimizer serve all losses, so that nothing but the loss differs. Repetitions are interleaved: in each
round every loss has a turn of a few consecutive steps, in shuffled order. The wall clock times a turn from an idle
device to an idle device, so that the CPU counts. In each repetition a loss's time is divided by that of the baseline,
which is built twice (an A/A test). Values, memory and the output layer's own time are measured in steps of their own.
Each loss may have a batch of its own (`batch_sizes`).

With trainer.cuda_graph=true every turn captures the passes of its loss anew, and their graph dies with the turn. A
graph keeps the memory of its activations and gradients while it lives. All losses' graphs side by side would not fit,
and each loss's peak would hold the other losses' gradients. A pool that graphs share frees only activations, because
replays hand out the same gradients again. A turn therefore begins with one more step that is not timed.
"""

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.steps_rows import (
    AGAIN,
    BASELINE,
    EAGER,
    START,
    WITHOUT_EFFECT,
    Row,
    key_of,
    options_of,
    ratio_of,
    read_rows,
)
from benchmarks.training_step import TrainingStep, random_batch
from linrnn.config import load_config
from linrnn.config.schema import COMMANDS, Config, FlaModelConfig, LossConfig, MarkovDataConfig, option
from linrnn.core.errors import ConfigError, UnsupportedError
from linrnn.core.garbage import collect_after, collected_at_known_points
from linrnn.core.machine import GIB
from linrnn.core.output import say
from linrnn.core.tables import show
from linrnn.data import Batch, BatchLoader, PreparedData, prepare
from linrnn.losses import LossBackend, build_loss, check_loss
from linrnn.models import build_model, tuning
from linrnn.models.language_model import compute_dtype, parameter_dtype
from linrnn.profiling import Stopwatch
from linrnn.runs.environment import gpu_state
from linrnn.training.execution.compilation import compile_kernels, compiles_ahead
from linrnn.training.execution.float8 import use_float8
from linrnn.training.optimizer import build_optimizer
from linrnn.training.plan import check_step_fits, make_training_plan
from linrnn.training.runtime import prepare_process, resolve_device, resolve_precision, synchronize
from linrnn.training.starting import Weights, find_weights

# So small that the weights, and with them the logits, stay what they are at first. No time depends on the rate itself.
LEARNING_RATE = 1e-8
SEED = 0  # of weights, data and order
SETTLE = 1  # untimed steps of a turn, in which the allocator gets used to the loss
_AT_1B3 = "size=1b3 trainer.batch_size=8 trainer.seq_len=2048 trainer.activation_checkpointing=full"
_MODELS = [f"model={name} {_AT_1B3}" for name in ("gla", "transformer", "kda", "gated_deltanet")]
_GROUPS = ("model", "size", "optimizer", "data")
_TRAINER = (
    *("batch_size", "seq_len", "precision"),
    *("activation_checkpointing", "compile", "cuda_graph", "float8", "kernel_choices"),
)


@dataclass
class BenchConfig(common.Keys):
    """Keys of the command line."""

    models: list[str] = option(
        _MODELS,
        "each line holds overrides of train.py. Its keys are model, size, optimizer, data (and theirs), init_from, and "
        "trainer.batch_size, seq_len, precision, activation_checkpointing, compile, cuda_graph, float8 and "
        "kernel_choices. A line with data takes their first batch, and init_from=RUN the weights of a run. A line "
        "without data needs a vocabulary: size.vocab_size=…",
    )
    losses: list[str] = option(
        ["standard", "cce_kahan", "liger"],
        "with options as in 'liger accumulate=fp32'. `compiled` is always the first, and comes twice: the second shows "
        "the noise",
    )
    batch_sizes: list[int] = option(
        [],
        "[]: every loss has the line's trainer.batch_size. Else sequences for `compiled` and then for each of the "
        "losses, as each one's largest batch: [64,17,94,87]. Ratios are then those of the time for equally many tokens",
    )
    rounds: int = option(10, "pairs of each ratio: in a round every loss has its turn, in shuffled order", minimum=2)
    steps: int = option(3, "consecutive training steps of a turn, timed together", minimum=1)
    warmup: int = option(2, "first steps of every loss, which compile and tune kernels", minimum=1)


COMMANDS["bench_steps"] = BenchConfig


# ------------------------------------------------------------------------------------------------- a line's meaning
@dataclass(frozen=True)
class Start:
    """A line's configuration and what it names.

    Attributes:
        run: `size.vocab_size` is a number.
        data: None: tokens are random.
        weights: None: weights are random.
    """

    run: Config
    data: PreparedData | None = None
    weights: Weights | None = None

    def batch(self, sequences: int) -> Batch:
        """The first training batch of the data, in the order of `run.seed`, or random tokens. On the CPU."""
        run, seq_len = self.run, self.run.trainer.seq_len
        if self.data is None:
            return random_batch(sequences, seq_len, run.size.vocab_size or 0, run.seed)
        reset, order = run.data.reset_at_document, {"seq_len": seq_len, "batch_size": sequences, "seed": run.seed}
        return next(BatchLoader(self.data.train, reset_at_document=reset, **order))


def start_of(line: str, device: str) -> Start:
    """What a line of `models` means. Its data are prepared, unless they were before."""
    words = line.split()
    for word in words:
        key = key_of(word)
        group, _, rest = key.partition(".")
        known = key == START or (rest in _TRAINER if group == "trainer" else group in _GROUPS)
        if word not in WITHOUT_EFFECT and (not known or "=" not in word or key == "optimizer.lr"):
            raise ConfigError(
                f"models: {word!r} has no meaning in a benchmark of single steps on one GPU",
                f"leave it out; losses stand in losses=[…], and a line's keys are {START}, those of "
                f"{', '.join(_GROUPS)} without the learning rate, and of trainer {', '.join(_TRAINER)}",
            )
    own = [f"seed={SEED}", f"device={device}", "logger.wandb.mode=disabled"]
    names_data = any(key_of(word).split(".")[0] == "data" for word in words)
    run: Config = load_config([*words, *own, *([] if names_data else ["data=markov"])])
    if names_data:
        data = prepare(run.data)
        weights = find_weights(run.init_from, data) if run.init_from else None
        size = replace(run.size, vocab_size=run.size.vocab_size or data.vocab_size)
        return Start(replace(run, size=size), data, weights)
    if run.init_from:
        raise ConfigError(
            f"models: {line!r} has trained weights and random tokens, which are no text that the weights know",
            "add the data that they were trained with, as data=text data.path=… data.tokenizer=…",
        )
    if run.size.vocab_size is None:
        raise ConfigError(
            f"models: {line!r} has no vocabulary, because size={run.size.name} takes the data's",
            "add size.vocab_size=128256, or another number",
        )
    assert isinstance(run.data, MarkovDataConfig)
    return Start(replace(run, data=replace(run.data, vocab_size=run.size.vocab_size)))  # the plan compares the two


# ------------------------------------------------------------------------------------------------------ measuring
def run_benchmark(config: BenchConfig) -> list[Row]:
    """Measure every loss in every model. A model's rows are written as soon as it is done."""
    device = resolve_device(config.device)
    losses = {" ".join(text.split()): common.parse_loss(text) for text in [BASELINE, *config.losses]}
    if config.batch_sizes and (len(config.batch_sizes) != len(losses) or min(config.batch_sizes) < 1):
        raise ConfigError(
            f"batch_sizes={config.batch_sizes} does not give a number of sequences to each of {', '.join(losses)}",
            f"give {len(losses)} numbers of 1 or more, or leave batch_sizes out",
        )
    sizes = dict(zip(losses, config.batch_sizes, strict=False))
    sizes |= {AGAIN: sizes[BASELINE]} if sizes else {}
    losses = {BASELINE: losses.pop(BASELINE), AGAIN: common.parse_loss(BASELINE), **losses}
    starts = {line: start_of(line, config.device) for line in (" ".join(text.split()) for text in config.models)}
    for start in starts.values():
        with contextlib.suppress(UnsupportedError):  # it becomes a row
            make_training_plan(start.run)
    record = common.Record(config, "bench_steps")
    measured: list[Row] = []
    with tuning.show_progress(say):
        for number, (line, start) in enumerate(starts.items(), start=1):
            say(f"[{number}/{len(starts)}] {line}")
            run, precision = start.run, resolve_precision(start.run.trainer.precision, device)
            rows = {
                text: Row(
                    line, run.model.label, run.size.name, 0, sizes.get(text, run.trainer.batch_size),
                    run.trainer.seq_len, run.size.hidden_size, run.size.vocab_size or 0, precision, text, record.id,
                    config.steps, weights=str(start.weights.directory) if start.weights else None,
                    text=start.data.fingerprint if start.data else None,
                )
                for text in losses
            }  # fmt: skip
            measure_line(config, start, rows, losses, device)
            record.add(*rows.values())
            measured += rows.values()
    return measured


def measure_line(
    config: BenchConfig, start: Start, rows: dict[str, Row], losses: dict[str, LossConfig], device: torch.device
) -> None:
    """Fill the rows of one model. What cannot run is a row with the reason."""
    torch._dynamo.reset()  # the graphs of the line before, which also hold its model
    common.free(device)
    built: list[Bench] = []
    for text, row in rows.items():
        common.attempt(row, device, partial(_check, start.run, losses[text], row))
    running = [row for row in rows.values() if row.status == "ok"]
    if running:
        batches = {row.batch for row in rows.values()}
        common.attempt(running[0], device, lambda: built.append(Bench(config, start, device, batches)))
    if built:
        built.pop().measure({row.loss: row for row in running}, losses)
    else:  # without a model no loss can run
        for row in running:
            row.status, row.reason = running[0].status, running[0].reason
    for row in rows.values():
        ratio = _to(BASELINE, list(rows.values()))(row)
        beside = "" if ratio == "-" else f", {ratio} of {BASELINE} for equally many tokens"
        say(f"  {row.loss}: " + (row.reason or f"{show(row.step_ms, '.1f')} ms{beside}"))


def _check(run: Config, loss: LossConfig, row: Row) -> None:
    """Reject what cannot run here, before a model is built."""
    run = replace(run, trainer=replace(run.trainer, batch_size=row.batch))
    plan = make_training_plan(run)
    arch = plan.architecture(row.v)
    row.parameters, row.d = arch.n_parameters, arch.hidden_size
    check_loss(loss, plan.device, compute_dtype(plan.precision))
    check_step_fits(replace(plan, config=replace(run, loss=loss)), arch)


class Bench:
    """One model, its optimizer and its batches, by their sequences. Kernels of the model are compiled."""

    def __init__(self, config: BenchConfig, start: Start, device: torch.device, batches: Iterable[int]) -> None:
        run, trainer = start.run, start.run.trainer
        self.config, self.device, self.graphed = config, device, trainer.cuda_graph
        plan = make_training_plan(run)
        self.dtype = compute_dtype(plan.precision)
        prepare_process(run, device)
        # A GPU draws the weights of the matched models, which is faster than a CPU.
        with contextlib.nullcontext() if isinstance(run.model, FlaModelConfig) else device:
            arch, dtype = plan.architecture(run.size.vocab_size or 0), parameter_dtype(plan.precision)
            model = build_model(arch, device=device, dtype=dtype, seed=run.seed)
        if trainer.float8 == "blocks":
            use_float8(model, device)
        model.set_activation_checkpointing(trainer.activation_checkpointing)
        if trainer.compile != "none":
            model.set_compile(trainer.compile)
        if start.weights:
            start.weights.load(model)
            if start.weights.remark:
                say(f"  {start.weights.remark}")
        optimizer = build_optimizer(model, run.optimizer, device)
        self.steps = {
            batch.input_ids.shape[0]: TrainingStep(
                model, optimizer, batch, tokens=batch.n_tokens,
                precision=plan.precision, device=device, max_grad_norm=run.optimizer.max_grad_norm,
            )
            for batch in map(start.batch, sorted(batches))
        }  # fmt: skip
        self.step = next(iter(self.steps.values()))  # for what all batches share
        if compiles_ahead(run, device):
            compile_kernels(model, self.step.batch, self.step.ranks, plan.precision, device, say)
            common.free(device)
        # The optimizer allocates its state at a rate of 0: a loss that fails cannot leave half of it.
        self._set_rate(0.0)
        for parameter in self.step.parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        self.step.drop_gradients()
        self._set_rate(LEARNING_RATE)

    def _set_rate(self, rate: float) -> None:
        for group in self.step.optimizer.param_groups:
            group["lr"] = rate

    def measure(self, rows: dict[str, Row], losses: dict[str, LossConfig]) -> None:
        """Fill the rows: values with the same weights first, then warm-up and memory, the rounds, the output layer."""
        backends: dict[str, LossBackend] = {}

        def build(row: Row) -> None:
            backends[row.loss] = build_loss(losses[row.loss], device=self.device, dtype=self.dtype)

        def each(action: Callable[[LossBackend, Row], None], order: Iterable[str] = rows) -> None:
            """Call `action` with each loss that still runs."""
            for row in (rows[text] for text in order if rows[text].status == "ok"):
                if len(self.steps) > 1:  # give back the memory that the other batch's tensors were cut from
                    common.free(self.device)
                if not common.attempt(row, self.device, partial(action, backends[row.loss], row)):
                    self.step.drop_gradients()
                    common.free(self.device)

        shuffled = random.Random(SEED).sample
        with collected_at_known_points():
            for row in rows.values():
                common.attempt(row, self.device, partial(build, row))
            each(self._first_values)
            each(self._warm_up)
            if remark := tuning.remark():
                say(f"  {remark}")
            for number in range(1, self.config.rounds + 1):
                began = time.perf_counter()
                each(self._turn, shuffled([*rows], len(rows)))
                if number == 1:
                    say(f"  round 1 of {self.config.rounds} took {time.perf_counter() - began:.1f} s")
            if not self.graphed:  # nothing marks the output layer's begin inside a replay
                each(self._time_loss_layer)

    def _step_of(self, loss: LossBackend, row: Row) -> Callable[[], None]:
        """A step with this loss. Where the line asks for a CUDA graph, the first step captures it."""
        step = self.steps[row.batch]
        return step.graphed(loss) if self.graphed else partial(step, loss)

    def _steps(self, step: Callable[[], None], count: int) -> None:
        """Consecutive steps, with Python's garbage collected after each, as in a run."""
        for _ in range(count):
            step()
            collect_after(1)

    def _first_values(self, loss: LossBackend, row: Row) -> None:
        """The loss and its gradient's norm, before the first step of the optimizer."""
        row.loss_nats = self.steps[row.batch].gradients(loss).item()
        row.gradient_norm = self.step.clip().item()
        self.step.drop_gradients()

    def _warm_up(self, loss: LossBackend, row: Row) -> None:
        """The first steps, and the memory of another one, which captures the graph if there is one."""
        self._steps(partial(self.steps[row.batch], loss), self.config.warmup)
        step = self._step_of(loss, row)
        synchronize(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._steps(step, 1)
        synchronize(self.device)
        if self.device.type == "cuda":
            row.peak_gib = torch.cuda.max_memory_allocated(self.device) / GIB
        peak = "" if row.peak_gib is None else f", peak {row.peak_gib:.1f} GiB"
        say(f"  {row.loss} is warm: {row.loss_nats:.4f} nats{peak}")

    def _turn(self, loss: LossBackend, row: Row) -> None:
        """One loss's part of a round: some steps that are not timed, then `steps` steps that are."""
        step, n = self._step_of(loss, row), self.config.steps
        self._steps(step, SETTLE + self.graphed)
        state = gpu_state(self.device)  # the device still works: an idle GPU lowers its clock
        if state is not None and state["sm_mhz"] is not None:
            row.sm_mhz.append(state["sm_mhz"])
        synchronize(self.device)
        allocations = _allocations(self.device)
        began = time.perf_counter()
        self._steps(step, n)
        given = time.perf_counter()
        synchronize(self.device)
        row.wall_ms.append(1e3 * (time.perf_counter() - began) / n)
        row.host_ms.append(1e3 * (given - began) / n)
        if self.device.type == "cuda":
            row.allocations = (row.allocations or 0) + _allocations(self.device) - allocations

    def _time_loss_layer(self, loss: LossBackend, row: Row) -> None:
        """The output layer's passes in `steps` steps, by the observer of every run (speed/loss_forward_ms)."""
        step = self.steps[row.batch]
        self._steps(partial(step, loss), SETTLE)
        clock = Stopwatch(self.device)
        for _ in range(self.config.steps):
            step(loss, clock)
            clock.lap()
            collect_after(1)
        synchronize(self.device)
        row.loss_forward_ms, row.loss_backward_ms = (
            1e3 * median(seconds[name] for seconds in clock.seconds) for name in ("loss/forward", "loss/backward")
        )


def _allocations(device: torch.device) -> int:
    """Calls of cudaMalloc by this process's allocator; 0 on a CPU."""
    return torch.cuda.memory_stats(device).get("num_device_alloc", 0) if device.type == "cuda" else 0


# ----------------------------------------------------------------------------------------------------------- page
def _to(loss: str, rows: list[Row]) -> Callable[[Row], str]:
    """The ratio to another loss of the same line, with its interval, if it says something."""

    def cell(row: Row) -> str:
        base = next((one for one in rows if one.line == row.line and one.loss == loss), None)
        if row.loss == loss or (found := ratio_of(row, base)) is None:
            return "-"
        return f"{found.value:.4f} ({common.interval(found.low, found.high, '.4f')})"

    return cell


def _median(name: str) -> Callable[[Row], str]:
    return lambda row: show(median(values) if (values := getattr(row, name)) else None, ".1f")


def _heading(row: Row) -> str:
    size = f"{row.model} {row.size}, {row.batch} x {row.seq:,} tokens, V = {row.v:,}"
    return f"{', '.join([size, *options_of(row.line)])}: `{row.line}`"


def write_report(directory: Path) -> list[Path]:
    """Write steps.md; returns its path."""
    rows = read_rows(directory)
    sections = {_heading(own[0]): own for own in common.grouped(rows, key=lambda row: row.line)}
    columns: common.Columns = {
        "loss": lambda row: f"`{row.loss}`",
        "n": "rounds:d",
        "sequences": "batch:d",
        "step, ms": "step_ms:.1f",
        **{f"/ {loss}, 90 %": _to(loss, rows) for loss in (BASELINE, EAGER)},
        "tokens/s": "tokens_per_second:,.0f",
        "CPU, ms": _median("host_ms"),
        "output layer, ms": "loss_layer_ms:.1f",
        "share": "loss_layer_share:.1%",
        "peak, GiB": "peak_gib:.2f",
        "loss, nats": "loss_nats:.5f",
        "gradient's norm": "gradient_norm:.5g",
        "cudaMalloc": "allocations:d",
        "MHz": _median("sm_mhz"),
    }
    return common.write_report(directory, "steps", "Training steps, the loss alone exchanged", sections, columns)


if __name__ == "__main__":
    common.run("bench_steps", __doc__, run_benchmark, write_report)
