"""Find the largest batch under a memory budget. Formulas give a first guess, and every probe is a training run.

:func:`search` is only the search. :func:`find_max_batch` runs it with training runs as probes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linrnn.config import load_config, run_name
from linrnn.config.schema import Config, FindMaxBatchConfig
from linrnn.core.errors import ConfigError, SweepFailure
from linrnn.core.files import write_json
from linrnn.core.machine import GIB
from linrnn.distributed.launch import as_first_of
from linrnn.experiments.points import Process, check_parallel, point_of
from linrnn.experiments.sweep import check_gpus, in_another_process
from linrnn.runs.directory import ENVIRONMENT
from linrnn.runs.origins import differing, read_processes
from linrnn.runs.summary import names_of_run

Say = Callable[[str], None]
GROWTH = 16  # a batch is at most this many times the largest that fitted: measured peaks may mislead
NOISE = 0.01  # share of a peak by which two peaks may differ for no reason


@dataclass(frozen=True)
class Probe:
    """The result of one batch.

    Attributes:
        batch: sequences.
        fits: whether all its steps ran within the budget.
        peak_bytes: most memory at once; None for a probe that ran out of memory.
        tokens_per_second: None for a probe that does not fit.
        tokens_per_second_is: how the speed was measured, from the probe's summary.
    """

    batch: int
    fits: bool
    peak_bytes: int | None
    tokens_per_second: float | None
    tokens_per_second_is: str | None = None


@dataclass(frozen=True)
class Answer:
    """The result of a search.

    Attributes:
        batch: the largest batch that fitted; 0 if none did.
        too_large: the smallest batch that did not fit; None if all did.
        foreseen: the largest batch by the formulas, before any probe; None without formulas.
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


def search(probe: Callable[[int], Probe], foreseen: int | None, budget_bytes: float, max_probes: int) -> Answer:
    """The largest batch for which `probe` fits, in at most `max_probes` probes.

    The first probe is the forecast, or one sequence. While all fit, the batch grows to where the measured peaks reach
    the budget, at most :data:`GROWTH` times, or it doubles. If the first one fails, one sequence less is tried, since
    forecasts were one too high. Between a batch that fits and one that does not, the peaks decide, or bisection.

    Args:
        probe: runs a batch.
        foreseen: the largest batch by formulas; None: unknown.
    """
    probes: list[Probe] = []
    fitting, failing, batch = 0, None, max(foreseen or 1, 1)
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
    return Answer(fitting, failing, foreseen, tuple(probes))


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
def find_max_batch(config: FindMaxBatchConfig, overrides: Sequence[str], say: Say) -> Answer:
    """Search with training runs. Print every probe and the answer, and write the answer as JSON.

    Args:
        overrides: of train.py; `trainer.batch_size` among them has no effect.

    Raises:
        LinrnnError: the run cannot be made here, a probe failed for another reason than memory, or an earlier probe was
            made in another environment.
    """
    budget = config.memory_budget_gib * GIB
    if config.dry_run or config.gpu:
        return _foresee(config, overrides, say)
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
    run: Config = load_config(of_probes)
    check_parallel(run, config.ranks)
    unit = config.ranks // run.parallel.data_ranks(config.ranks)  # trainer.batch_size of one sequence a rank
    of_one = dataclasses.replace(run, trainer=dataclasses.replace(run.trainer, batch_size=unit))
    on_gpu, foreseen, environment = in_another_process(_look_ahead, of_one, budget, config.ranks)
    if on_gpu:
        of_probes.append(f"memory_budget_gib={config.memory_budget_gib}")

    def probe(batch: int) -> Probe:
        say(f"  trying {batch} sequences for {config.probe_steps} steps")
        result = _probe([*of_probes, f"trainer.batch_size={unit * batch}"], batch, config, environment)
        say(f"  {_line(result)}")
        return result

    expected = "unknown, hence measured" if foreseen is None else f"{foreseen} sequences"
    say(f"budget {config.memory_budget_gib:g} GiB; estimated: {expected}")
    answer = search(probe, foreseen, budget, config.max_probes)
    for line in report(answer, on_gpu, config.ranks):
        say(line)
    _write(config, overrides, answer, environment, say)
    return answer


def _foresee(config: FindMaxBatchConfig, overrides: Sequence[str], say: Say) -> Answer:
    """The answer of the formulas alone, for this machine or `config.gpu`.

    Raises:
        ConfigError: a GPU that need not be here is named without dry_run=true.
    """
    from linrnn import costs
    from linrnn.data import vocabulary_size
    from linrnn.experiments.dry_run import largest_batch
    from linrnn.training.plan import make_training_plan

    if not config.dry_run:
        raise ConfigError(f"gpu={config.gpu} names the GPU of a forecast", "use dry_run=true, or leave gpu out")
    gpu = [f"gpu={config.gpu}"] if config.gpu else []
    run: Config = load_config([*overrides, *gpu, "dry_run=true", f"trainer.batch_size={config.ranks}"])
    check_parallel(run, config.ranks)
    with as_first_of(config.ranks):
        plan = make_training_plan(run)
    budget = config.memory_budget_gib * GIB
    budget = min(budget, costs.GPUS[config.gpu].memory_bytes) if config.gpu else budget
    unit = config.ranks // run.parallel.data_ranks(config.ranks)  # trainer.batch_size of one sequence a rank
    batch = largest_batch(plan, plan.architecture(vocabulary_size(run.data)), budget, unit)
    where = costs.GPUS[config.gpu].name if config.gpu else "a GPU"
    found = "unknown" if batch is None else f"{batch} sequences{' a rank' * (config.ranks > 1)}"
    say(f"estimated for {where} with {budget / GIB:.1f} GiB: {found}")
    say("nothing was run or written")
    return Answer(batch or 0, None, batch, ())


def _look_ahead(config: Config, budget: float, ranks: int) -> tuple[bool, int | None, dict[str, Any]]:
    """Whether the probes run on a GPU; the forecast (None without formulas); and this machine's environment.

    Args:
        config: of a run with one sequence on each of `ranks`.
    """
    import torch

    from linrnn.core.machine import available_memory
    from linrnn.data import vocabulary_size
    from linrnn.experiments.dry_run import largest_batch
    from linrnn.runs.environment import describe_environment
    from linrnn.training.plan import check_step_fits, make_training_plan
    from linrnn.training.runtime import check_memory_budget

    with as_first_of(ranks):
        plan = make_training_plan(config)
        arch = plan.architecture(vocabulary_size(config.data))
        on_gpu, there = plan.device.type == "cuda", available_memory()
        if on_gpu:
            check_gpus(ranks, torch.cuda.device_count())
            check_memory_budget(budget / GIB, plan.device)
        check_step_fits(plan, arch)
    if not on_gpu and there is not None and ranks * budget > there:
        each = f" for each of {ranks} ranks" if ranks > 1 else ""
        raise ConfigError(
            f"memory_budget_gib={budget / GIB:g}{each} is more than the {there / GIB:.1f} GiB of memory that are free "
            "here",
            f"use memory_budget_gib={there * 0.9 / ranks / GIB:.1f} or less, or a machine with a GPU",
        )
    foreseen = largest_batch(plan, arch, budget, unit=config.trainer.batch_size)  # `config` has one sequence on a rank
    return on_gpu, foreseen, describe_environment()


def _probe(overrides: Sequence[str], batch: int, config: FindMaxBatchConfig, environment: dict[str, Any]) -> Probe:
    """Run a probe, or read its summary if it was made before in the same `environment`."""
    point = point_of(overrides, load_config(overrides), config.ranks, total_steps=config.probe_steps)
    if point.is_answered(retry=False):
        others = set[str]()
        for made in read_processes(point.directory / ENVIRONMENT):
            others |= set(differing([made, environment]))
            if made["settings"]["trainer.warmup_measurement_steps"] != config.warmup_steps:
                others.add("trainer.warmup_measurement_steps")
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
    return Probe(batch, fits, peak, summary["tokens_per_second"] if fits else None, summary["tokens_per_second_is"])


def _line(probe: Probe) -> str:
    peak = f", {probe.peak_bytes / GIB:.2f} GiB" if probe.peak_bytes else ""
    speed = f", {probe.tokens_per_second:,.0f} tokens/s" if probe.tokens_per_second else ""
    return f"{probe.batch} sequences: {'fit' if probe.fits else 'do not fit'}{peak}{speed}"


def report(answer: Answer, on_gpu: bool, ranks: int = 1) -> list[str]:
    """The answer for people."""
    bound = "" if answer.exact else f" (at least; {answer.too_large or 'none'} is the smallest seen not to fit)"
    foreseen = "unknown" if answer.foreseen is None else answer.foreseen
    lines = [f"largest batch: {answer.batch} sequences{bound}, estimated {foreseen}, {len(answer.probes)} probes"]
    lines += [f"  {_line(probe)}" for probe in answer.probes if probe.batch == answer.batch]
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
    from linrnn.data import vocabulary_size

    run: Config = load_config([*overrides, f"group={config.group}"])
    name = run_name(run, config.ranks)
    answers = Path(config.results_dir) / config.group / "answers"
    path = answers / f"{name}-{config.memory_budget_gib:g}gib" / "max_batch.json"
    path.parent.mkdir(parents=True, exist_ok=True)
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
        "batch_size": answer.batch,
    }
    write_json(path, content)
    say(f"wrote {path}")
