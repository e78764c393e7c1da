"""Find the largest batch under a memory budget. Formulas give a first guess; then every probe is a training run.

:func:`search` is only the search. :func:`find_max_batch` runs it with training runs as probes.
"""

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from linrnn.config.schema import Config, FindMaxBatchConfig
from linrnn.core.errors import ConfigError, SweepFailure, UnsupportedError
from linrnn.core.machine import GIB
from linrnn.distributed.launch import as_first_of
from linrnn.experiments.points import Point, Process, check_parallel, foresee
from linrnn.experiments.sweep import check_gpus, in_another_process
from linrnn.runs.directory import ENVIRONMENT
from linrnn.runs.origins import differing, read_processes

Say = Callable[[str], None]
GROWTH = 16  # a batch is at most this many times the largest that fitted: measured peaks may mislead
NOISE = 0.01  # share of a peak by which two peaks may differ for no reason
STEEP = 0.05  # a slope above this share of peak / batch counts, however close the two peaks are


@dataclass(frozen=True)
class Probe:
    """The result of one batch.

    Attributes:
        batch: sequences.
        fits: whether all its steps ran within the budget.
        peak_bytes: most memory at once. For a probe that does not fit: its memory when it ran out, or None.
        tokens_per_second: None for a probe that does not fit.
        foreseen_bytes: the memory model's estimate before the probe; None without formulas for the model or the loss.
        tokens_per_second_is: how the speed was measured, from the probe's summary.
        finished: whether all steps ran. A CPU lets a probe finish above the budget; its peak is then as good as any.
    """

    batch: int
    fits: bool
    peak_bytes: int | None
    tokens_per_second: float | None
    foreseen_bytes: int | None
    tokens_per_second_is: str | None = None
    finished: bool = False

    @property
    def measured(self) -> bool:
        """Whether the peak is that of whole steps."""
        return self.peak_bytes is not None and (self.fits or self.finished)


@dataclass(frozen=True)
class Answer:
    """The result of a search.

    Attributes:
        batch: the largest batch that fitted; 0 if none did.
        too_large: the smallest batch that did not fit; None if all did.
        foreseen: the largest batch by the memory model, before any probe; None without a memory model.
        probes: in the order in which they ran.
    """

    batch: int
    too_large: int | None
    foreseen: int | None
    probes: tuple[Probe, ...]

    @property
    def exact(self) -> bool:
        """Whether one sequence more was tried and did not fit."""
        return self.too_large == self.batch + 1


def search(
    probe: Callable[[int], Probe], memory_model: Callable[[int], float] | None, budget_bytes: float, max_probes: int
) -> Answer:
    """The largest batch for which `probe` fits, in at most `max_probes` probes.

    The first probe is the model's guess. Every measured peak corrects the model: one peak scales it, two peaks replace
    it by the line through them. While no batch has failed, the search grows, at most :data:`GROWTH` times in a probe.
    Later it follows the corrected model, or halves the interval if the model's guess lies outside. If the first guess
    runs out of memory, one sequence less is tried, because forecasts were one too high. If that batch fails, too, the
    search goes back by an eighth of the first guess, then by a quarter and a half.

    Without a memory model the first probe is one sequence. Memory is then assumed proportional to the batch, until two
    peaks give a line.

    Args:
        probe: runs a batch.
        memory_model: bytes that a batch should need, rising with the batch; None: unknown.
    """
    foreseen = None if memory_model is None else _largest(memory_model, budget_bytes)
    probes: list[Probe] = []
    fitting, failing, batch = 0, None, max(foreseen or 1, 1)
    while len(probes) < max_probes and failing != fitting + 1:
        probes.append(probe(batch))
        if probes[-1].fits:
            fitting = batch
        else:
            failing = batch
        measured = any(one.measured for one in probes)
        guess = (
            0
            if memory_model is None and not measured
            else _largest(_corrected(memory_model or float, probes, budget_bytes), budget_bytes)
        )
        if failing is None:
            batch = max(min(guess, GROWTH * fitting), fitting + 1)
        elif not measured:  # back by one, then by an eighth of the first guess, a quarter, a half
            eighths = probes[0].batch >> max(5 - len(probes), 1)
            batch = max(failing - (1 if len(probes) == 1 else max(eighths, 1)), 1)
        elif fitting <= guess < failing:
            batch = max(guess, fitting + 1)
        else:
            batch = (fitting + failing) // 2
    return Answer(fitting, failing, foreseen, tuple(probes))


def _largest(memory: Callable[[int], float], budget: float) -> int:
    """The largest batch whose memory is within `budget`; 0 if one sequence is too much."""
    high = 1
    while memory(high) <= budget:
        high *= 2
    return bisect_right(range(1, high), budget, key=memory)


def _corrected(memory: Callable[[int], float], probes: Sequence[Probe], budget: float) -> Callable[[int], float]:
    """The model, corrected by the measured peaks that are nearest to the budget.

    Two peaks give a line only if they rise by more than noise. Otherwise the nearer one scales the model.
    """
    measured = [(p.batch, p.peak_bytes) for p in probes if p.measured and p.peak_bytes is not None]
    measured.sort(key=lambda one: abs(one[1] - budget))
    if not measured:
        return memory
    batch, peak = measured[0]
    if len(measured) > 1 and (slope := _slope(*measured[:2])) is not None:
        return lambda other: peak + (other - batch) * slope
    scale = peak / memory(batch)
    return lambda other: memory(other) * scale


def _slope(nearest: tuple[int, int], other: tuple[int, int]) -> float | None:
    """Bytes a sequence by two measured batches and their peaks; None if the peaks rise by no more than noise."""
    (batch, peak), (other_batch, other_peak) = nearest, other
    slope = (peak - other_peak) / (batch - other_batch)
    rises = slope * abs(batch - other_batch) > NOISE * peak or slope > STEEP * peak / batch
    return slope if rises else None


# ------------------------------------------------------------------------------------------------- training runs
def find_max_batch(config: FindMaxBatchConfig, overrides: Sequence[str], say: Say) -> Answer:
    """Search with training runs. Print every probe and the answer, write the answer as JSON, and mirror it to wandb.

    Args:
        overrides: of train.py; `trainer.batch_size` among them has no effect.

    Raises:
        LinrnnError: the run cannot be made here, a probe failed for another reason than memory, or an earlier probe was
            made in another environment.
    """
    budget = config.memory_budget_gib * GIB
    probe_overrides = [
        *overrides,
        f"group={config.group}",
        f"results_dir={config.results_dir}",
        f"trainer.max_steps={config.probe_steps}",
        "trainer.max_tokens=null",
        f"trainer.warmup_measurement_steps={config.warmup_steps}",
        "trainer.checkpoint_every=0",
        "trainer.valid_tokens=1",  # the final validation cannot be left out: one batch
        "logger.wandb.mode=disabled",
    ]
    ahead = in_another_process(_look_ahead, probe_overrides, budget, config.ranks)
    model = None if ahead.peaks is None else partial(_foreseen, ahead.peaks)

    def probe(batch: int) -> Probe:
        say(f"  trying {batch} sequences for {config.probe_steps} steps")
        point = ahead.points.get(batch) or in_another_process(_point, batch, ahead.overrides, ahead.unit, config.ranks)
        result = _probe(point, batch, budget, None if model is None else int(model(batch)), ahead.environment)
        say(f"  {_line(result)}")
        return result

    expected = "unknown, hence measured" if model is None else f"{_largest(model, budget)} sequences"
    say(f"budget {config.memory_budget_gib:g} GiB; estimated: {expected}")
    answer = search(probe, model, budget, config.max_probes)
    for line in report(answer, ahead.on_gpu, config.ranks):
        say(line)
    _write(config, overrides, answer, ahead.environment, say)
    return answer


@dataclass(frozen=True)
class Ahead:
    """What is known before the first probe.

    Attributes:
        on_gpu: whether the probes run on a GPU.
        peaks: expected bytes of 1, 2, 3 … sequences a rank, up to twice the budget; None if unknown.
        environment: of this machine.
        overrides: of all probes.
        unit: `trainer.batch_size` where each rank has one sequence.
        points: by sequences a rank, the probes that the search needs if the forecast is right or one sequence too high.
    """

    on_gpu: bool
    peaks: list[int] | None
    environment: dict[str, Any]
    overrides: list[str]
    unit: int
    points: dict[int, Point]


def _look_ahead(overrides: list[str], budget: float, ranks: int = 1) -> Ahead:
    """Look ahead, all of it in one process, because every process takes seconds to start."""
    from linrnn.config import load_config

    config: Config = load_config(overrides)
    check_parallel(config, ranks)
    unit = ranks // config.parallel.data_ranks(ranks)
    trainer = dataclasses.replace(config.trainer, batch_size=unit)
    with as_first_of(ranks):
        on_gpu, peaks, environment = _ahead(dataclasses.replace(config, trainer=trainer), budget, ranks)
    if on_gpu:
        overrides = [*overrides, f"memory_budget_gib={budget / GIB}"]
    first = 1 if peaks is None else max(_largest(partial(_foreseen, peaks), budget), 1)
    likely = range(max(first - 1, 1), first + (1 if peaks is None else 2))
    points = {batch: _point(batch, overrides, unit, ranks) for batch in likely}
    return Ahead(on_gpu, peaks, environment, overrides, unit, points)


def _foreseen(peaks: Sequence[int], batch: int) -> float:
    """Expected bytes of a batch, beyond the table by its last difference."""
    return peaks[batch - 1] if batch <= len(peaks) else peaks[-1] + (peaks[-1] - peaks[-2]) * (batch - len(peaks))


def _point(batch: int, overrides: Sequence[str], unit: int, ranks: int) -> Point:
    """The probe of `batch` sequences a rank."""
    return foresee([[*overrides, f"trainer.batch_size={unit * batch}"]], ranks)[0]


def _ahead(config: Config, budget: float, ranks: int) -> tuple[bool, list[int] | None, dict[str, Any]]:
    """`on_gpu`, `peaks` and `environment` of :class:`Ahead`, in a process that plans as the first of `ranks`.

    Args:
        config: of a run with one sequence on each rank.
    """
    import torch

    from linrnn.core.machine import available_memory
    from linrnn.data import vocabulary_size
    from linrnn.runs.environment import describe_environment
    from linrnn.training.plan import check_step_fits, make_training_plan

    plan = make_training_plan(config)
    arch = plan.architecture(vocabulary_size(config.data))
    on_gpu = plan.device.type == "cuda"
    if on_gpu:
        check_gpus(ranks, torch.cuda.device_count())
    check_step_fits(plan, arch)
    there = available_memory()
    if not on_gpu and there is not None and ranks * budget > there:
        each = f" for each of {ranks} ranks" if ranks > 1 else ""
        raise ConfigError(
            f"memory_budget_gib={budget / GIB:g}{each} is more than the {there / GIB:.1f} GiB of memory that are free "
            "here",
            f"use memory_budget_gib={there * 0.9 / ranks / GIB:.1f} or less, or a machine with a GPU",
        )
    table: list[int] = []
    while len(table) < 2 or (table[-1] <= 2 * budget and len(table) < 4096):
        trainer = dataclasses.replace(config.trainer, batch_size=config.trainer.batch_size * (len(table) + 1))
        larger = dataclasses.replace(plan, config=dataclasses.replace(config, trainer=trainer))
        if (estimate := larger.memory_estimate(arch)) is None:
            return on_gpu, None, describe_environment()
        table.append(estimate.peak)
    return on_gpu, table, describe_environment()


def _probe(point: Point, batch: int, budget: float, foreseen: int | None, environment: dict[str, Any]) -> Probe:
    """Run a probe, or read its summary if it was made before in the same `environment`."""
    if point.refusal is not None:
        cause, remedy = point.refusal.split("; ", 1)
        raise UnsupportedError(cause, remedy)
    if point.is_answered(retry=False):
        _check_origin(point, batch, environment)
        summary = point.summary()
    else:
        process = Process(point, {})
        try:
            process.wait()
        finally:
            process.kill()
        summary = process.conclude()
    assert summary is not None
    if summary["status"] not in ("finished", "out_of_memory"):
        raise SweepFailure(
            f"the probe of {batch} sequences {summary['status']}: {summary['reason']}",
            f"the reason is in {point.log}; the same command runs the probe again",
        )
    peak = summary["peak_memory_bytes"]
    finished = summary["status"] == "finished"
    fits = finished and peak <= budget
    speed = summary["tokens_per_second"] if fits else None
    return Probe(batch, fits, peak, speed, foreseen, summary["tokens_per_second_is"], finished)


def _check_origin(point: Point, batch: int, environment: dict[str, Any]) -> None:
    """Reject a probe that was made in another environment or measured after another warm-up."""
    warmup = "trainer.warmup_measurement_steps"
    others: set[str] = set()
    for process in read_processes(point.directory / ENVIRONMENT):
        others |= set(differing([process, environment]))
        if process["settings"][warmup] != point.config.trainer.warmup_measurement_steps:
            others.add(warmup)
    if others:
        raise ConfigError(
            f"the probe of {batch} sequences was made with another {', '.join(sorted(others))} ({point.directory})",
            "give the search another group, or move the old one away",
        )


def _line(probe: Probe) -> str:
    foreseen = "unknown" if probe.foreseen_bytes is None else f"{probe.foreseen_bytes / GIB:.2f}"
    words = [f"{probe.batch} sequences: {'fit' if probe.fits else 'do not fit'}"]
    if probe.measured and probe.peak_bytes is not None:
        words.append(f"{probe.peak_bytes / GIB:.2f} GiB (estimated {foreseen})")
    else:
        words.append(f"estimated {foreseen} GiB")
    if probe.tokens_per_second:
        words.append(f"{probe.tokens_per_second:,.0f} tokens/s")
    return ", ".join(words)


def report(answer: Answer, on_gpu: bool, ranks: int = 1) -> list[str]:
    """The answer for people."""
    best = next((probe for probe in answer.probes if probe.batch == answer.batch), None)
    bound = "" if answer.exact else f" (at least; {answer.too_large or 'none'} is the smallest seen not to fit)"
    foreseen = "unknown" if answer.foreseen is None else answer.foreseen
    found = f"largest batch: {answer.batch} sequences{bound}"
    lines = [f"{found}, estimated {foreseen}, {len(answer.probes)} probes"]
    if best is not None:
        lines.append(f"  {_line(best)}")
    if answer.batch == 0 and answer.exact:
        lines.append("  not even one fits: raise memory_budget_gib, lower trainer.seq_len, or choose a smaller size")
    elif answer.batch == 0:
        lines.append("  no batch that was tried fits, smaller ones were not tried: raise max_probes (why: train.log)")
    if ranks > 1:
        lines.append(f"  sequences and memory are those of each of {ranks} ranks")
    if not on_gpu:
        lines.append("  memory is the process's resident set, Python and libraries included; the estimate is a GPU's")
    return lines


def _write(
    config: FindMaxBatchConfig, overrides: Sequence[str], answer: Answer, environment: dict[str, Any], say: Say
) -> None:
    from linrnn.config import identity, load_config, run_name, to_yaml
    from linrnn.data import vocabulary_size
    from linrnn.runs.directory import RunDirectory
    from linrnn.runs.loggers import WandbMirror
    from linrnn.runs.summary import names_of_run

    run: Config = load_config([*overrides, f"group={config.group}"])
    name = run_name(run, config.ranks)
    directory = RunDirectory(
        Path(config.results_dir) / config.group / "answers" / f"{name}-{config.memory_budget_gib:g}gib",
        identity={**identity(run, config.ranks), "memory_budget_gib": config.memory_budget_gib},
        resume="auto",
    )
    directory.open()
    try:
        directory.begin(to_yaml(run))
        content: dict[str, Any] = {
            **names_of_run(run, name, config.ranks),
            "world_size": config.ranks,
            "vocab_size": run.size.vocab_size or vocabulary_size(run.data),
            "tie_embeddings": run.size.tie_embeddings,
            "precision": run.trainer.precision,
            "memory_budget_gib": config.memory_budget_gib,
            "max_sequences": answer.batch,
            "exact": answer.exact,
            **dataclasses.asdict(answer),
            "environment": environment,
        }
        content["batch_size"] = answer.batch
        directory.write_json("max_batch.json", content)
        wandb = WandbMirror(
            run.logger.wandb,
            directory.path,
            run_name=f"max_batch-{name}",
            group=config.group,
            tags=[run.model.name, run.size.name, run.loss.name, run.data.name, "max_batch"],
            hyperparameters=identity(run, config.ranks),
            history=lambda: [{"step": number, **_metrics(probe)} for number, probe in enumerate(answer.probes)],
            say=say,
        )
        for number, probe in enumerate(answer.probes):
            wandb.log(number, _metrics(probe))
        wandb.finish({"batch/max_sequences": answer.batch}, exit_code=0)
    finally:
        directory.close()
    say(f"wrote {directory.path / 'max_batch.json'}")


def _metrics(probe: Probe) -> dict[str, float | None]:
    return {
        "batch/probe_sequences": probe.batch,
        "memory/peak_gib": None if probe.peak_bytes is None else probe.peak_bytes / GIB,
        "speed/tokens_per_second": probe.tokens_per_second,
    }
