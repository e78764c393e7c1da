"""Find the largest batch under a memory budget. Formulas give a first guess, and every probe is a training run.

:func:`search` is only the search. :func:`find_max_batch` runs it with training runs as probes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linrnn import costs
from linrnn.config import load_config, run_name
from linrnn.config.schema import Config, FindMaxBatchConfig
from linrnn.core.errors import ConfigError, SweepFailure
from linrnn.core.files import write_json
from linrnn.core.machine import GIB, available_memory
from linrnn.core.output import say
from linrnn.data import vocabulary_size
from linrnn.distributed.launch import as_first_of
from linrnn.experiments.points import Process, point_of
from linrnn.experiments.sweep import check_gpus, in_another_process
from linrnn.runs.directory import ENVIRONMENT
from linrnn.runs.origins import differing, read_processes
from linrnn.runs.summary import names_of_run

GROWTH = 16  # a batch is at most this many times the largest that fitted: measured peaks may mislead
NOISE = 0.01  # share of a peak by which two peaks may differ for no reason


@dataclass(frozen=True)
class Probe:
    """The result of one batch: whether all its steps ran within the budget, and its figures."""

    batch: int  # sequences
    fits: bool
    peak_bytes: int | None  # None: it ran out of memory
    tokens_per_second: float | None  # None: it does not fit

    def __str__(self) -> str:
        peak = f", {self.peak_bytes / GIB:.2f} GiB" if self.peak_bytes else ""
        speed = f", {self.tokens_per_second:,.0f} tokens/s" if self.tokens_per_second else ""
        return f"{self.batch} sequences: {'fit' if self.fits else 'do not fit'}{peak}{speed}"


@dataclass(frozen=True)
class Answer:
    """The result of a search."""

    batch: int  # the largest that fitted; 0 if none did
    too_large: int | None  # the smallest that did not fit; None if all did
    estimated: int | None  # the largest by the formulas, before any probe; None without formulas
    probes: tuple[Probe, ...]  # in the order in which they ran

    @property
    def exact(self) -> bool:
        """Whether one sequence more was tried and did not fit."""
        return self.too_large == self.batch + 1


def search(probe: Callable[[int], Probe], estimated: int | None, budget_bytes: float, max_probes: int) -> Answer:
    """The largest batch for which `probe` fits, in at most `max_probes` probes.

    The first probe is the forecast, or one sequence. While all fit, the batch grows to where the measured peaks reach
    the budget, at most :data:`GROWTH` times, or it doubles. If the first one fails, one sequence less is tried, since
    forecasts were one too high. Between a batch that fits and one that does not, the peaks decide, or bisection.

    Args:
        probe: runs a batch.
        estimated: the largest batch by formulas; None: unknown.
    """
    probes: list[Probe] = []
    fitting, failing, batch = 0, None, max(estimated or 1, 1)
    while len(probes) < max_probes and failing != fitting + 1:
        probes.append(probe(batch))
        fitting, failing = (batch, failing) if probes[-1].fits else (fitting, batch)
        guess = _by_peaks(probes, budget_bytes)
        if failing is None:
            batch = min(max(guess or 2 * fitting, fitting + 1), GROWTH * fitting)
        elif guess is not None and fitting <= guess < failing:
            batch = max(guess, fitting + 1)
        else:
            batch = failing - 1 if len(probes) == 1 else (fitting + failing) // 2
    return Answer(fitting, failing, estimated, tuple(probes))


def _by_peaks(probes: Sequence[Probe], budget: float) -> int | None:
    """Where the line through the two measured peaks nearest to the budget reaches it; of one peak the line from 0.

    None without a peak, or if peaks rise by no more than noise.
    """
    peaks = sorted(((p.batch, p.peak_bytes) for p in probes if p.peak_bytes), key=lambda one: abs(one[1] - budget))
    if not peaks:
        return None
    (batch, peak), (other, other_peak) = [*peaks, (0, 0)][:2]
    slope = (peak - other_peak) / (batch - other)
    return int(batch + (budget - peak) / slope) if slope * abs(batch - other) > NOISE * peak else None


# ------------------------------------------------------------------------------------------------- training runs
def find_max_batch(config: FindMaxBatchConfig, overrides: Sequence[str]) -> Answer:
    """Search with training runs. Print every probe and the answer, and write the answer as JSON.

    With dry_run=true only the formulas answer, for this machine or `config.gpu`.

    Args:
        overrides: of train.py; `trainer.batch_size` among them has no effect.

    Raises:
        LinrnnError: the run cannot be made here, a probe failed for another reason than memory, or an earlier probe was
            made in another environment.
    """
    if config.gpu:
        overrides = [*overrides, f"gpu={config.gpu}"]
        there = costs.GPUS[config.gpu].memory_bytes / GIB
        config = dataclasses.replace(config, memory_budget_gib=min(config.memory_budget_gib, there))
    ranks, budget = config.ranks, config.memory_budget_gib
    of_probes = [
        *overrides,
        f"group={config.group}",
        f"results_dir={config.results_dir}",
        f"trainer.max_steps={config.probe_steps}",
        "trainer.max_tokens=null",
        f"trainer.warmup_measurement_steps={config.warmup_steps}",
        "trainer.checkpoint_every=0",
        "trainer.valid_tokens=1",  # the final validation cannot be left out: one batch
        "logger.wandb.mode=disabled",
        "logger.picture=false",
    ]
    of_one = point_of(of_probes, ranks).config
    unit = ranks // of_one.parallel.data_ranks(ranks)  # trainer.batch_size of one sequence a rank
    of_one.trainer.batch_size, of_one.dry_run = unit, config.dry_run
    if config.dry_run:
        estimated = _look_ahead(of_one, config)[1]
        where = costs.GPUS[config.gpu].name if config.gpu else "a GPU"
        say(f"estimated for {where} with {budget:.1f} GiB: {_sequences(estimated)}{' a rank' * (ranks > 1)}")
        say("nothing was run or written")
        return Answer(estimated or 0, None, estimated, ())
    on_gpu, estimated, environment = in_another_process(_look_ahead, of_one, config)
    of_probes += [f"memory_budget_gib={budget}"] * on_gpu

    def probe(batch: int) -> Probe:
        say(f"  trying {batch} sequences for {config.probe_steps} steps")
        result = _probe([*of_probes, f"trainer.batch_size={unit * batch}"], batch, config, environment)
        say(f"  {result}")
        return result

    say(f"budget {budget:g} GiB; estimated: {_sequences(estimated)}")
    answer = search(probe, estimated, budget * GIB, config.max_probes)
    for line in report(answer, on_gpu, ranks):
        say(line)
    run = load_config([*overrides, f"group={config.group}", f"results_dir={config.results_dir}"])
    name = run_name(run, ranks)
    directory = Path(config.results_dir) / config.group / "answers" / f"{name}-{budget:g}gib"
    directory.mkdir(parents=True, exist_ok=True)
    content = {
        **names_of_run(run, ranks),
        "world_size": ranks,
        "vocab_size": run.size.vocab_size or vocabulary_size(run.data),
        "tie_embeddings": run.size.tie_embeddings,
        "precision": run.trainer.precision,
        "memory_budget_gib": budget,
        "max_sequences": answer.batch,
        "exact": answer.exact,
        **dataclasses.asdict(answer),
        "environment": environment,
        "batch_size": answer.batch,
    }
    write_json(directory / "max_batch.json", content)
    say(f"wrote {directory / 'max_batch.json'}")
    return answer


def _sequences(estimated: int | None) -> str:
    return "unknown" if estimated is None else f"{estimated} sequences"


def _look_ahead(of_one: Config, config: FindMaxBatchConfig) -> tuple[bool, int | None, dict[str, Any]]:
    """Whether the probes run on a GPU; the largest batch by the formulas (None: there are none); the environment.

    Args:
        of_one: a run with one sequence on each rank.
    """
    import torch

    from linrnn.experiments.dry_run import largest_batch
    from linrnn.runs.environment import describe_environment
    from linrnn.training.plan import check_step_fits, make_training_plan
    from linrnn.training.runtime import check_memory_budget

    ranks, budget = config.ranks, config.memory_budget_gib
    with as_first_of(ranks):
        plan = make_training_plan(of_one)
        on_gpu, arch = plan.device.type == "cuda", plan.architecture(vocabulary_size(of_one.data))
        estimated = largest_batch(plan, arch, budget * GIB, of_one.trainer.batch_size)
        if config.dry_run:
            return on_gpu, estimated, {}
        if on_gpu:
            check_gpus(ranks, torch.cuda.device_count())
            check_memory_budget(budget, plan.device)
        check_step_fits(plan, arch)
    if not on_gpu and (there := available_memory()) is not None and ranks * budget * GIB > there:
        each = f" for each of {ranks} ranks" if ranks > 1 else ""
        raise ConfigError(
            f"memory_budget_gib={budget:g}{each} is more than the {there / GIB:.1f} GiB of memory that are free here",
            f"use memory_budget_gib={there * 0.9 / ranks / GIB:.1f} or less, or a machine with a GPU",
        )
    return on_gpu, estimated, describe_environment()


def _probe(overrides: Sequence[str], batch: int, config: FindMaxBatchConfig, environment: dict[str, Any]) -> Probe:
    """Run a probe, or read its summary if it was made before in the same `environment`."""
    point = point_of(overrides, config.ranks)
    if point.is_done(retry=False):
        processes = read_processes(point.directory / ENVIRONMENT)
        others = {key for made in processes for key in differing([made, environment])}
        warm_ups = {made["settings"]["trainer.warmup_measurement_steps"] for made in processes}
        others |= {"warmup_steps"} if warm_ups - {config.warmup_steps} else set()
        if others:
            raise ConfigError(
                f"the probe of {batch} sequences was made with another {', '.join(sorted(others))} ({point.directory})",
                "give the search another group, or move the old one away",
            )
        summary = point.summary() or {}
    else:
        summary = Process(point, {}).finish()
    finished = summary["status"] == "finished"  # a CPU lets a probe finish above the budget
    if not finished and summary["status"] != "out_of_memory":
        raise SweepFailure(
            f"the probe of {batch} sequences {summary['status']}: {summary['reason']}",
            f"the reason is in {point.log}; the same command runs the probe again",
        )
    peak = summary["peak_memory_bytes"] if finished else None
    fits = peak is not None and peak <= config.memory_budget_gib * GIB
    return Probe(batch, fits, peak, summary["tokens_per_second"] if fits else None)


def report(answer: Answer, on_gpu: bool, ranks: int = 1) -> list[str]:
    """The answer for people."""
    bound = "" if answer.exact else f" (at least; {answer.too_large or 'none'} is the smallest seen not to fit)"
    estimated = "unknown" if answer.estimated is None else answer.estimated
    lines = [f"largest batch: {answer.batch} sequences{bound}, estimated {estimated}, {len(answer.probes)} probes"]
    lines += [f"  {probe}" for probe in answer.probes if probe.batch == answer.batch]
    if answer.batch == 0:
        more = "or choose a smaller size" if answer.exact else "or raise max_probes (why: train.log)"
        lines.append(f"  no batch that was tried fits: raise memory_budget_gib, lower trainer.seq_len, {more}")
    if ranks > 1:
        lines.append(f"  sequences and memory are those of each of {ranks} ranks")
    if not on_gpu:
        lines.append("  memory is the process's resident set, Python and libraries included; the estimate is a GPU's")
    return lines
