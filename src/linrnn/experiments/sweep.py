"""Run many runs, each in its own process: `scripts/sweep.py`. If one point fails, all others still run."""

import dataclasses
import os
import shlex
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from linrnn.config.bounds import check_outputs
from linrnn.config.grids import sweep_points
from linrnn.config.schema import RunSweepConfig
from linrnn.core.errors import (
    ConfigError,
    DivergedError,
    InterruptedRun,
    LinrnnError,
    SweepFailure,
    UnsupportedError,
    first_line,
)
from linrnn.core.interrupts import StopRequest
from linrnn.core.machine import GIB, SHARED_GPU, cores
from linrnn.core.output import as_started, say
from linrnn.experiments.cluster import run_on_cluster
from linrnn.experiments.points import (
    LOGS,
    NOT_RETRIED,
    POLL_SECONDS,
    START_SECONDS,
    Point,
    Process,
    plan_points,
    write_summary,
)
from linrnn.report.targets import parse_target, store_targets
from linrnn.runs.measurements import is_cpu_bound
from linrnn.runs.summary import duration

OUTCOMES = ("finished", "unsupported", "out_of_memory")
REPORT_SECONDS = 30.0  # between two reports on the points that run


def run_sweep(config: RunSweepConfig, overrides: Sequence[str]) -> None:
    """Run every point of `config.sweep` that is not done yet. Print progress, and at the end all statuses.

    Args:
        overrides: of the runs; they beat the sweep's values and may be lists (`loss=compiled,cce_kahan`).

    Raises:
        ConfigError: an override is wrong, or there are too few GPUs for the jobs and their ranks.
        InterruptedRun: after Ctrl-C or SIGTERM; the running points have written a checkpoint.
        SweepFailure: a point failed or diverged.
        UnsupportedError: no point can run here.
    """
    for target in config.sweep.targets:
        parse_target(target)
    ranks, on_cluster = config.sweep.ranks, config.cluster != "none"
    if config.gpu:
        if not config.dry_run:
            raise ConfigError(f"gpu={config.gpu} names the GPU of a forecast", "use dry_run=true, or leave gpu out")
        overrides = [*overrides, "dry_run=true", f"gpu={config.gpu}"]
    points, gpus = in_another_process(_look_ahead, sweep_points(config.sweep, overrides), ranks)
    if on_cluster:  # its machines may run what this one cannot: a job itself says so
        points = [dataclasses.replace(point, refusal=None) for point in points]
    slots = [] if on_cluster else slots_of(config.jobs, gpus, ranks, share=config.share_gpus)
    open_points = [point for point in points if not point.is_done(config.retry)]
    refused, ahead = ([point for point in open_points if (point.refusal is None) == runs] for runs in (False, True))
    if config.dry_run:
        for line in listing(points, ahead, refused, min(config.jobs, len(gpus) // ranks or config.jobs)):
            say(line)
    for reason in dict.fromkeys(point.refusal for point in refused):
        say(f"unsupported: {', '.join(point.label for point in refused if point.refusal == reason)}: {reason}")
    if config.dry_run:
        say("nothing was run or written")
        return
    for point in points:
        check_outputs(point.config)
    if config.sweep.targets:
        for group in {point.directory.parent for point in points}:
            store_targets(config.sweep.targets, group)
    for point in refused:
        write_summary(point, "unsupported", point.refusal or "")
    say(f"sweep {config.sweep.name}: {len(points)} points, {len(ahead)} to run")
    if on_cluster and ahead:
        _submit(ahead, config)
    elif ahead:
        run_points(ahead, [threads_of(config.jobs) | slot for slot in slots])
    _judge(points)


def _look_ahead(points: Sequence[Sequence[str]], ranks: int) -> tuple[list[Point], list[str]]:
    """The points, and the GPUs as CUDA_VISIBLE_DEVICES names them. In one process: it takes seconds to start."""
    import torch

    found = plan_points(points, ranks)
    elsewhere = all(point.config.gpu or point.config.device == "cpu" for point in found)
    count = 0 if elsewhere else torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found, named.split(",")[:count] if named else [str(index) for index in range(count)]


def in_another_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in a fresh process, so that this one never initialises a GPU. Ctrl-C is left to this one."""
    with ProcessPoolExecutor(
        1, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN), max_tasks_per_child=1
    ) as pool:
        return pool.submit(function, *arguments).result()


def listing(points: Sequence[Point], ahead: Sequence[Point], refused: Sequence[Point], at_a_time: int) -> list[str]:
    """The dry run's lines: name, memory, time and state of every point, then the sums.

    Args:
        ahead, refused: the points to run, and those that cannot run here. All others are done.
        at_a_time: how many run at once.
    """
    width = max(len(point.label) for point in points)
    lines, states = [f"{'point':<{width}}  {'memory, GiB':>11}  {'time':>8}  state"], Counter[str]()
    for point in points:
        state = "to run" if point in ahead else "unsupported" if point in refused else (point.summary() or {})["status"]
        states[state] += 1
        memory = "unknown" if point.memory_bytes is None else f"{point.memory_bytes / GIB:.2f}"
        seconds = "unknown" if point.seconds is None else duration(point.seconds)
        lines.append(f"{point.label:<{width}}  {memory:>11}  {seconds:>8}  {state}")
    known = [point.seconds for point in ahead if point.seconds is not None]
    in_all = ""
    if known and len(known) == len(ahead):
        in_all = f"; in all {duration(max(sum(known) / at_a_time, *known))}"
    where = points[0].config.gpu or "a GPU in this machine's precision"
    of_one = f"; each point has {points[0].ranks} ranks, and its memory is that of one" * (points[0].ranks > 1)
    return [
        *lines,
        "",
        f"{len(points)} points: {', '.join(f'{count} {state}' for state, count in states.items())}{of_one}",
        f"memory is estimated for {where}; time includes {START_SECONDS:.0f} s to start a point, and no tuning{in_all}",
    ]


# ------------------------------------------------------------------------------------------------------- the loop
def run_points(points: Sequence[Point], slots: Sequence[dict[str, str]]) -> None:
    """Run points, one in each slot at a time. A point that another process still runs is tried again later.

    Args:
        slots: for each slot, environment variables for its processes.

    Raises:
        InterruptedRun: after Ctrl-C or SIGTERM, once every running point has stopped.
    """
    waiting, free = deque(points), deque(slots)
    running: list[tuple[Process, dict[str, str], float]] = []
    took: list[float] = []  # seconds of points that finished here
    reported = time.monotonic()

    def tell(point: Point, words: str) -> None:
        done = len(points) - len(waiting) - len(running)
        place = f"[{done}/{len(points)} done] " if done else f"[{len(points)} to run] "
        spent = sum(time.monotonic() - began for _, _, began in running)
        left = sum(took) / len(took) * (len(waiting) + len(running)) - spent if took else 0
        say(f"{place}{point.label}: {words}" + (f"; about {duration(left / len(slots))} left" if left > 0 else ""))

    with StopRequest() as stop:
        try:
            while (waiting or running) and stop.signal_number is None:
                for _ in range(len(waiting)):
                    if not free:
                        break
                    point = waiting.popleft()
                    if point.run_directory().in_use():  # as one that a killed sweep left behind, which saves and ends
                        waiting.append(point)
                        continue
                    slot = free.popleft()
                    running.append((Process(point, slot), slot, time.monotonic()))
                    tell(point, "started")
                time.sleep(POLL_SECONDS)
                for entry in [entry for entry in running if entry[0].ended()]:
                    process, slot, began = entry
                    running.remove(entry)
                    free.append(slot)
                    if process.point.run_directory().in_use():  # another sweep began it, too, and was the first there
                        waiting.append(process.point)
                        continue
                    seconds, summary = time.monotonic() - began, process.conclude()
                    if summary["status"] == "finished":
                        took.append(seconds)
                    tell(process.point, f"{outcome(summary)} ({duration(seconds)})")
                if time.monotonic() - reported >= REPORT_SECONDS:
                    reported = time.monotonic()
                    for process, _, began in running:
                        tell(process.point, f"{duration(reported - began)}: {process.last_line() or 'starting'}")
            if stop.signal_number is not None:
                for process, _, _ in running:
                    process.send(stop.signal_number)
                for process, _, _ in running:
                    process.wait()
                interrupted = ", ".join(process.point.label for process, _, _ in running)
                raise InterruptedRun(
                    f"interrupted; running: {interrupted or 'none'}; waiting: {len(waiting)}",
                    "run the same command again to continue",
                    stop.signal_number,
                )
        finally:  # also after a second Ctrl-C: end at once
            for process, _, _ in running:
                process.kill()


def outcome(summary: dict[str, Any]) -> str:
    """A summary in one line."""
    if summary["status"] != "finished":
        return f"{summary['status']}: {summary['reason']}"
    words = [
        summary[key] is not None and form.format(summary[key] * scale)
        for key, form, scale in (
            ("tokens_per_second", "{:,.0f} tokens/s", 1),
            ("peak_memory_bytes", "{:.2f} GiB", 1 / GIB),
            ("train_loss_nats", "loss {:.4f}", 1),
        )
    ]
    if is_cpu_bound(summary):
        words.append(f"CPU-bound: {summary['host_step_ms']:.1f} of {summary['wall_step_ms']:.1f} ms a step")
    if summary.get("gpu_shared"):
        words.append("times not measured")
    return f"finished: {', '.join(word for word in words if word)}"


# ---------------------------------------------------------------------------------------------------------- slots
def threads_of(jobs: int) -> dict[str, str]:
    """OMP_NUM_THREADS for each of several points: its share of the cores, unless the user has set the variable."""
    if jobs == 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores() // jobs))}


def slots_of(jobs: int, gpus: Sequence[str], ranks: int = 1, *, share: bool = False) -> list[dict[str, str]]:
    """Environment variables for each of `jobs` points: a GPU of its own for each of its ranks, if there are GPUs.

    Args:
        share: if there are more jobs than GPUs, give each point one, in turn, and tell it that others compute there.

    Raises:
        ConfigError: there are fewer GPUs than ranks, or than the ranks of all jobs.
    """
    if not gpus:
        return [{} for _ in range(jobs)]
    if share and ranks == 1 and jobs > len(gpus):
        return [{"CUDA_VISIBLE_DEVICES": gpus[job % len(gpus)], SHARED_GPU: "1"} for job in range(jobs)]
    check_gpus(ranks, len(gpus))
    if jobs * ranks > len(gpus):
        of_ranks = f" of {ranks} ranks" if ranks > 1 else ""
        raise ConfigError(
            f"jobs={jobs}{of_ranks}: there are {len(gpus)} GPUs, and two points on one would disturb each other's "
            "measurements",
            f"use jobs={len(gpus) // ranks}{'' if ranks > 1 else ', or share_gpus=true if only the losses matter'}",
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[job * ranks : (job + 1) * ranks])} for job in range(jobs)]


def check_gpus(ranks: int, gpus: int) -> None:
    """Check that each rank of a point has a GPU.

    Raises:
        ConfigError: there are more ranks than GPUs.
    """
    if ranks > gpus:
        raise ConfigError(
            f"{ranks} ranks: {gpus} GPU{'s are' if gpus > 1 else ' is'} visible, and each rank needs one",
            f"use {gpus} rank{'s' * (gpus > 1)} or fewer, or device=cpu",
        )


# ------------------------------------------------------------------------------------------- clusters and the end
def run_alone(point: Point) -> str:
    """Run one point in a fresh process, as a cluster's job, and wait for it. Returns its status.

    Where Slurm ends the job, to queue it again, the run first saves a checkpoint.
    """
    process = Process(point, {})
    try:
        process.wait()
    except BaseException:  # submitit answers Slurm's signal with SystemExit
        process.send(signal.SIGTERM)
        process.wait()
        raise
    return str(process.conclude()["status"])


def _submit(points: Sequence[Point], config: RunSweepConfig) -> None:
    """Run all points as jobs of a cluster. A job that leaves no summary gets one that says so."""
    directory = points[0].directory.parent / LOGS / "cluster"
    say(f"submitting {len(points)} jobs (cluster={config.cluster}); their files are in {directory}")
    problem, before = "the job left no summary", [point.summary() for point in points]
    try:
        run_on_cluster(run_alone, points, config.cluster, config.resources, directory.absolute())
    except LinrnnError:
        raise
    except Exception as error:  # submitit raises when a job was lost; the others have run
        problem = f"the job was lost: {first_line(error)}"
    for point, earlier in zip(points, before, strict=True):
        summary = point.summary()
        if summary is None or (summary == earlier and summary["status"] != "finished"):
            summary = write_summary(point, "failed", problem)  # a summary that is there is of an earlier sweep
        say(f"{point.label}: {outcome(summary)}")


def _judge(points: Sequence[Point]) -> None:
    """Print the status of all points. A point that cannot run here or does not fit into memory is done.

    Raises:
        SweepFailure: a point failed or diverged.
        UnsupportedError: every point was unsupported.
    """
    statuses = {point.label: (point.summary() or {"status": "failed"})["status"] for point in points}
    again = "" if {*NOT_RETRIED}.isdisjoint(statuses.values()) else f"; retry=true repeats {' and '.join(NOT_RETRIED)}"
    say(", ".join(f"{count} {status}" for status, count in Counter(statuses.values()).items()) + again)
    if "finished" in statuses.values():
        for results, group in dict.fromkeys((point.config.results_dir, point.config.group) for point in points):
            place = "" if results == "results" else f" {shlex.quote(f'results_dir={results}')}"
            say(as_started(f"compare the runs: python scripts/report.py group={group}{place}"))
    if {*statuses.values()} == {"unsupported"}:
        raise UnsupportedError(
            f"none of {len(points)} points can run here", "the lines above say why; change the points or the machine"
        )
    if failed := [point for point in points if statuses[point.label] not in OUTCOMES]:
        diverged = {statuses[point.label] for point in failed} == {"diverged"}
        logs = " and ".join(sorted({f"{point.log.parent}/*.log" for point in failed}))
        raise SweepFailure(
            f"{len(failed)} of {len(points)} points did not finish: "
            + ", ".join(f"{point.label} ({statuses[point.label]})" for point in failed),
            f"the reasons are in {logs}; the same command{' with retry=true' * diverged} runs them again",
            DivergedError.exit_code if diverged else SweepFailure.exit_code,
        )
