"""Measure training steps of our models, where the loss alone differs: `python benchmarks/steps.py`.

One model and one optimizer serve all losses, so that nothing but the loss differs. In a round each loss has a turn, in
shuffled order. A turn is a few consecutive steps. The wall clock times it from an idle device to an idle device, so
that the host counts. In each round a loss's time is divided by that of the baseline. Values, memory and the loss
layer's own time are measured in steps of their own. Each loss may have a batch of its own (`batch_sizes`).

With trainer.cuda_graph=true every turn captures the passes of its loss anew, and their graph dies with the turn. A
graph keeps the memory of its activations and gradients while it lives. All losses' graphs side by side would not fit,
and each loss's peak would hold the other losses' gradients. A pool that graphs share frees only activations, because
replays hand out the same gradients again. A turn therefore begins with one more step that is not timed.
"""

import contextlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.steps_lines import Start, find_start, parse_line
from benchmarks.steps_rows import AGAIN, BASELINE, Row, ratio_of, read_rows, titles_of, write_report
from benchmarks.training_step import TrainingStep
from linrnn.config import cli
from linrnn.config.compose import add_command
from linrnn.config.schema import Config, FlaModelConfig, LossConfig, option
from linrnn.core.errors import ConfigError, UnsupportedError
from linrnn.core.garbage import collect_after, collected_at_known_points
from linrnn.core.machine import GIB
from linrnn.core.output import say
from linrnn.losses import LossBackend, build_loss, check_loss
from linrnn.models import LanguageModel, build_model, tuning
from linrnn.models.architecture import Architecture
from linrnn.profiling import LossTimer
from linrnn.profiling.graphs import GraphCounter, in_words
from linrnn.runs.environment import command_line, gpu_state
from linrnn.training.execution.compilation import compile_kernels_of, rehearse, rehearses
from linrnn.training.execution.float8 import use_float8
from linrnn.training.optimizer import build_optimizer
from linrnn.training.plan import check_step_fits, make_training_plan
from linrnn.training.runtime import (
    compute_dtype,
    parameter_dtype,
    prepare_process,
    resolve_device,
    resolve_precision,
    synchronize,
)

__all__ = ["AGAIN", "Row", "main", "ratio_of", "read_rows", "run_benchmark", "titles_of"]

# So small that the weights, and with them the logits, stay what they are at first. No time depends on the rate itself.
LEARNING_RATE = 1e-8
Step = Callable[[], None]
_AT_1B3 = "size=1b3 trainer.batch_size=8 trainer.seq_len=2048 trainer.activation_checkpointing=full"
_MODELS = [f"model={name} {_AT_1B3}" for name in ("gla", "transformer", "kda", "gated_deltanet")]


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
    settle: int = option(
        1,
        "untimed steps of a turn, in which the allocator gets used to the loss; a CUDA graph captures in one more",
        minimum=0,
    )
    warmup: int = option(2, "first steps of every loss, which compile and tune kernels", minimum=1)
    compare_with: str | None = option(
        None,
        "the name of a line, as 'GLA 1b3, compile=blocks': also print the times and gains of all lines, divided by its "
        "own",
    )
    seed: int = option(0, "of weights, data and order", minimum=0)


add_command("bench_steps", BenchConfig)


def run_benchmark(config: BenchConfig, command: str, say: common.Say) -> list[Row]:
    """Measure every loss in every model. A model's rows are written as soon as it is done.

    Args:
        command: the command line, for the record.

    Raises:
        ConfigError: a line, loss or option is not known, or has no meaning here. Nothing is measured then.
        DataError: text or weights of a line are missing or damaged. Nothing is measured then.
    """
    if not config.models:
        raise ConfigError("models=[] names no model", "leave models out, or use measure=false to write the page alone")
    directory, device = common.results_directory(config, "bench_steps"), resolve_device(config.device)
    losses = {" ".join(text.split()): common.parse_loss(text) for text in [BASELINE, *config.losses]}
    sizes = _batch_sizes(config, list(losses))
    losses = {BASELINE: losses.pop(BASELINE), AGAIN: common.parse_loss(BASELINE), **losses}
    lines = {" ".join(text.split()): parse_line(text, config.seed, config.device) for text in config.models}
    starts = {line: find_start(line, run) for line, run in lines.items()}
    for run in lines.values():
        with contextlib.suppress(UnsupportedError):  # it becomes a row
            make_training_plan(run)
    run_id = common.begin_run(directory, command, config)["id"]
    measured: list[Row] = []
    with tuning.show_progress(say):
        for number, (line, start) in enumerate(starts.items(), start=1):
            say(f"[{number}/{len(lines)}] {line}")
            rows = measure_line(config, line, start, losses, device, run_id, say, sizes)
            common.append_rows(directory, rows)
            measured += rows
    return measured


def _batch_sizes(config: BenchConfig, losses: list[str]) -> dict[str, int]:
    """The sequences of each loss that has a batch of its own.

    Raises:
        ConfigError: there is not one number for each loss, or one is below 1.
    """
    if config.batch_sizes and (len(config.batch_sizes) != len(losses) or min(config.batch_sizes) < 1):
        raise ConfigError(
            f"batch_sizes={config.batch_sizes} does not give a number of sequences to each of {', '.join(losses)}",
            f"give {len(losses)} numbers of 1 or more, or leave batch_sizes out",
        )
    found = dict(zip(losses, config.batch_sizes, strict=False))
    return found | ({AGAIN: found[BASELINE]} if found else {})


def measure_line(
    config: BenchConfig,
    line: str,
    start: Start,
    losses: dict[str, LossConfig],
    device: torch.device,
    run_id: str,
    say: common.Say,
    sizes: dict[str, int],
) -> list[Row]:
    """The rows of one model. What cannot run is a row with the reason.

    Args:
        sizes: sequences of the losses that have a batch of their own.
    """
    torch._dynamo.reset()  # the graphs of the line before, which also hold its model
    common.free(device)
    run = start.run
    precision = resolve_precision(run.trainer.precision, device)
    rows = {
        text: Row(
            line, run.model.label, run.size.name, 0, sizes.get(text, run.trainer.batch_size), run.trainer.seq_len,
            run.size.hidden_size, start.vocab_size, precision, text, run_id, config.steps,
            weights=str(start.weights.directory) if start.weights else None,
            text=start.data.fingerprint if start.data else None,
        )
        for text in losses
    }  # fmt: skip
    began = time.perf_counter()
    built: list[Bench] = []
    for text, row in rows.items():
        _attempt(row, device, lambda loss=losses[text], row=row: _check(run, loss, row))  # type: ignore[misc]
    first = next((row for row in rows.values() if row.status == "ok"), None)
    if first is not None:
        batches = {row.batch for row in rows.values()}
        _attempt(first, device, lambda: built.append(Bench(config, start, device, say, batches)))
    if built:
        say(f"  built in {time.perf_counter() - began:.0f} s: {first and first.parameters:,} parameters")
        if start.weights and start.weights.remark:
            say(f"  {start.weights.remark}")
        built.pop().measure({text: row for text, row in rows.items() if row.status == "ok"}, losses, say)
    elif first is not None:  # without a model no loss can run
        for row in rows.values():
            if row.status == "ok":
                row.status, row.reason = first.status, first.reason
    for row in rows.values():
        _compare(row, rows[BASELINE])
        say(f"  {row.loss}: {_in_words(row, rows[BASELINE].batch)}")
    return list(rows.values())


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

    def __init__(
        self, config: BenchConfig, start: Start, device: torch.device, say: common.Say, batches: Iterable[int]
    ) -> None:
        run = start.run
        self.config, self.device, self.graphed = config, device, run.trainer.cuda_graph
        plan = make_training_plan(run)
        arch, trainer = plan.architecture(start.vocab_size), run.trainer
        self.dtype = compute_dtype(plan.precision)
        prepare_process(run, device)
        model = _build_model(arch, run, device, parameter_dtype(plan.precision))
        if trainer.float8 == "blocks":
            use_float8(model, device)
        model.set_activation_checkpointing(trainer.activation_checkpointing)
        self.graphs = None
        if trainer.compile != "none":
            model.set_compile(trainer.compile)
            self.graphs = GraphCounter()
        if start.weights:
            start.weights.load(model)
        optimizer = build_optimizer(model, run.optimizer, device)
        self.steps = {
            batch.input_ids.shape[0]: TrainingStep(
                model, optimizer, batch, tokens=batch.n_tokens,
                precision=plan.precision, device=device, max_grad_norm=run.optimizer.max_grad_norm,
            )
            for batch in map(start.batch, sorted(batches))
        }  # fmt: skip
        self.step = next(iter(self.steps.values()))  # for what all batches share
        batch = self.step.batch
        if rehearses(run, device):
            compile_kernels_of(lambda: rehearse(model, batch, plan.precision, device), device, say)
            self.step.drop_gradients()
            common.free(device)
        self._allocate_moments()

    def _allocate_moments(self) -> None:
        """Let the optimizer allocate its state, at a rate of 0. A loss that fails cannot leave half of it."""
        optimizer = self.step.optimizer
        self._set_rate(0.0)
        for parameter in self.step.parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        self.step.drop_gradients()
        self._set_rate(LEARNING_RATE)

    def _set_rate(self, rate: float) -> None:
        for group in self.step.optimizer.param_groups:
            group["lr"] = rate

    # ---------------------------------------------------------------------------------------------- what is measured
    def measure(self, rows: dict[str, Row], losses: dict[str, LossConfig], say: common.Say) -> None:
        """Fill the rows: values with the same weights first, then warm-up and memory, the rounds, the loss layer."""
        backends: dict[str, LossBackend] = {}

        def build(text: str, row: Row) -> None:
            backends[text] = build_loss(losses[text], device=self.device, dtype=self.dtype)

        def with_loss(action: Callable[[LossBackend, Row], None]) -> Callable[[str, Row], None]:
            return lambda text, row: action(backends[text], row)

        def warm_up(loss: LossBackend, row: Row) -> None:
            self._warm_up(loss, row)
            memory = "" if row.peak_gib is None else f", peak {row.peak_gib:.1f} GiB"
            say(f"  {row.loss} is warm: first passes {row.first_s:.1f} s, {row.loss_nats:.4f} nats{memory}")

        shuffle = random.Random(self.config.seed).shuffle
        with collected_at_known_points():
            self._each(rows, build)
            self._each(rows, with_loss(self._first_values))
            self._each(rows, with_loss(warm_up))
            if self.graphs is not None:
                say(f"  {in_words(self.graphs.report())}, the compiled loss's included")
            if remark := tuning.remark():
                say(f"  {remark}")
            for number in range(1, self.config.rounds + 1):
                began, order = time.perf_counter(), list(rows)
                shuffle(order)
                self._each({text: rows[text] for text in order}, with_loss(self._turn))
                if number == 1:
                    say(f"  round 1 of {self.config.rounds} took {time.perf_counter() - began:.1f} s")
            if not self.graphed:  # nothing marks the loss layer's begin inside a replay
                self._each(rows, with_loss(self._time_loss_layer))
        for row in rows.values():
            row.kernel_choices = (tuning.used() or {}).get("fingerprint")

    def _each(self, rows: dict[str, Row], action: Callable[[str, Row], None]) -> None:
        """Call `action` with each loss that still runs."""
        for text, row in rows.items():
            if row.status == "ok" and not _attempt(row, self.device, lambda text=text, row=row: action(text, row)):  # type: ignore[misc]
                self.step.drop_gradients()
                common.free(self.device)

    def _step_of(self, loss: LossBackend, row: Row) -> Step:
        """A step with this loss. Where the line asks for a CUDA graph, the first step captures it."""
        step = self.steps[row.batch]
        return step.graphed(loss) if self.graphed else partial(step, loss)

    def _make_room(self) -> None:
        """Between losses of several batches: give back the memory that the other batch's tensors were cut from."""
        if len(self.steps) > 1:
            common.free(self.device)

    def _steps(self, step: Step, count: int) -> None:
        """Consecutive steps, with Python's garbage collected after each, as in a run."""
        for _ in range(count):
            step()
            collect_after(1)

    def _first_values(self, loss: LossBackend, row: Row) -> None:
        """The loss and its gradient's norm, before the first step of the optimizer."""
        self._make_room()
        began = time.perf_counter()
        row.loss_nats = self.steps[row.batch].gradients(loss).item()
        row.gradient_norm = self.step.clip().item()
        row.first_s = time.perf_counter() - began
        self.step.drop_gradients()

    def _warm_up(self, loss: LossBackend, row: Row) -> None:
        """The first steps, and the memory of another one, which captures the graph if there is one."""
        self._make_room()
        self._steps(partial(self.steps[row.batch], loss), self.config.warmup)
        step = self._step_of(loss, row)
        synchronize(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._steps(step, 1)
        synchronize(self.device)
        if self.device.type == "cuda":
            row.peak_gib = torch.cuda.max_memory_allocated(self.device) / GIB

    def _turn(self, loss: LossBackend, row: Row) -> None:
        """One loss's part of a round: some steps that are not timed, then `steps` steps that are."""
        self._make_room()
        step = self._step_of(loss, row)
        if untimed := self.config.settle + self.graphed:
            self._steps(step, untimed)
            self._record_clock(row)
        synchronize(self.device)
        cuda, n = self.device.type == "cuda", self.config.steps
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2 * cuda)]
        allocations = _allocations(self.device)
        began = time.perf_counter()
        for event in events[:1]:
            event.record()
        self._steps(step, n)
        for event in events[1:]:
            event.record()
        given = time.perf_counter()
        synchronize(self.device)
        ended = time.perf_counter()
        row.wall_ms.append(1e3 * (ended - began) / n)
        row.host_ms.append(1e3 * (given - began) / n)
        if allocations is not None:
            row.device_ms.append(events[0].elapsed_time(events[1]) / n)
            row.allocations = (row.allocations or 0) + (_allocations(self.device) or 0) - allocations

    def _record_clock(self, row: Row) -> None:
        """Read the GPU's clock while the device still works on untimed steps. An idle GPU lowers its clock."""
        state = gpu_state(self.device)
        if state is not None and state["sm_mhz"] is not None:
            row.sm_mhz.append(state["sm_mhz"])

    def _time_loss_layer(self, loss: LossBackend, row: Row) -> None:
        """The loss layer's passes in `steps` steps, by the observer of every run (speed/loss_forward_ms)."""
        self._make_room()
        step = self.steps[row.batch]
        self._steps(partial(step, loss), self.config.settle)
        timer = LossTimer(self.device, skip=0)
        for _ in range(self.config.steps):
            step(loss, timer)
            timer.step_ended()
            collect_after(1)
        synchronize(self.device)
        row.loss_forward_ms, row.loss_backward_ms = (
            1e3 * statistics.median(seconds[name] for seconds in timer.seconds) for name in ("forward", "backward")
        )


def _build_model(arch: Architecture, run: Config, device: torch.device, dtype: torch.dtype) -> LanguageModel:
    """The model with random weights. A GPU draws those of the matched models, which is faster than a CPU."""
    how: dict[str, Any] = {"device": device, "dtype": dtype, "seed": run.seed}
    if isinstance(run.model, FlaModelConfig):
        return build_model(arch, **how)
    with device:
        return build_model(arch, **how)


def _attempt(row: Row, device: torch.device, action: Callable[[], None]) -> bool:
    """Whether an action succeeded. A failure is a result, and stands in the row."""
    try:
        action()
        return True
    except Exception as error:
        row.status, row.reason = common.status_and_reason(error)
    common.free(device)  # the error held the tensors of its frames
    return False


def _allocations(device: torch.device) -> int | None:
    """Calls of cudaMalloc by this process's allocator; None on a CPU."""
    return torch.cuda.memory_stats(device).get("num_device_alloc", 0) if device.type == "cuda" else None


def _compare(row: Row, base: Row) -> None:
    """The ratio to the baseline. A loss that failed in a later round keeps its times, and has no ratio."""
    if found := ratio_of(row, base):
        row.ratio, row.ratio_low, row.ratio_high = found.value, found.low, found.high


def _in_words(row: Row, baseline_batch: int) -> str:
    if row.status != "ok":
        return f"{row.status}. {row.reason}"
    if row.ratio is None or row.ratio_low is None or row.loss == BASELINE:
        return f"{row.step_ms:.1f} ms"
    times = f"{row.step_ms:.1f} ms, {row.ratio:.4f} of {BASELINE} ({row.ratio_low:.4f} to {row.ratio_high:.4f})"
    return times if row.batch == baseline_batch else f"{times} for equally many tokens ({row.batch} sequences)"


def main(config: BenchConfig) -> None:
    if config.measure:
        run_benchmark(config, command_line(), say)
    directory = common.results_directory(config, "bench_steps")
    say("wrote " + ", ".join(str(path) for path in write_report(directory)))
    if config.compare_with is not None:
        from study.line_ratios import line_ratios

        say(f"divided by {config.compare_with}, unpaired rounds, Welch's 90 % intervals:")
        for line in line_ratios(read_rows(directory), config.compare_with).markdown():
            say(line)


if __name__ == "__main__":
    cli.run(main, "bench_steps", __doc__)
