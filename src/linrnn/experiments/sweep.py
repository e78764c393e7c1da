"""Run many runs, each in its own process: `scripts/sweep.py`. If one point fails, all others still run."""

import math
import os
import shlex
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from linrnn.config.bounds import check_outputs
from linrnn.config.grids import sweep_points
from linrnn.config.schema import HubDataConfig, RunSweepConfig
from linrnn.core.errors import (
    ConfigError,
    DataError,
    DivergedError,
    InterruptedRun,
    OutOfMemoryError,
    SweepFailure,
    UnsupportedError,
    first_line,
)
from linrnn.core.interrupts import StopRequest, worker_processes
from linrnn.core.machine import GIB, SHARED_GPU, cores
from linrnn.experiments.launching import launch
from linrnn.experiments.listing import TimeLeft, check_inputs, listing, pending, points_at_full_speed
from linrnn.experiments.points import (
    ANSWERS,
    LOGS,
    POLL_SECONDS,
    Point,
    PointTakenError,
    Process,
    foresee,
    write_summary,
)
from linrnn.report.targets import parse_target, store_targets
from linrnn.runs.figures import host_decides
from linrnn.runs.summary import duration

# The exit code if all points ended so. For any other status it is that of SweepFailure.
CODES = {"out_of_memory": OutOfMemoryError.exit_code, "diverged": DivergedError.exit_code}
NAMED = 5  # points that the closing error names; it counts all others
HARMLESS = ("finished", "unsupported")
OUTSIDE_FORECASTS = GIB  # bytes of a process that the formulas leave out: CUDA's context, kernels, fragmentation
SHARING = ", or share_gpus=true if only the losses matter"

Say = Callable[[str], None]


def run_sweep(config: RunSweepConfig, overrides: Sequence[str], launcher: Sequence[str], say: Say) -> None:
    """Run every point of `config.sweep` that has no answer yet. Print progress, and at the end all statuses.

    Args:
        overrides: of the runs; they beat the sweep's values and may be lists (`loss=compiled,cce_kahan`).
        launcher: Hydra's overrides (`hydra/launcher=submitit_slurm …`); empty: processes of this machine.

    Raises:
        ConfigError: an override is wrong, or there are too few GPUs for the jobs and their ranks.
        DataError: no point that is left to run has its data and weights on this machine, or can have them from the hub.
        InterruptedRun: after Ctrl-C or SIGTERM; the running points have written a checkpoint.
        SweepFailure: a point failed, diverged or ran out of memory.
        UnsupportedError: no point can run here.
    """
    for target in config.sweep.targets:
        parse_target(target)
    points, gpus = in_another_process(_look_ahead, sweep_points(config.sweep, overrides), config.sweep.ranks)
    if launcher and config.share_gpus:
        raise ConfigError("share_gpus=true: jobs of a cluster get GPUs of their own", "leave share_gpus out")
    slots = [] if launcher else slots_of(config.jobs, gpus, config.sweep.ranks, share=config.share_gpus)
    if launcher:
        points = [point.on_a_cluster() for point in points]
    if config.share_gpus:
        ahead = pending(points, config.retry)
        check_shared_memory(ahead, config.jobs, len(gpus), in_another_process(_least_gpu_memory))
    if config.dry_run:
        for line in listing(points, config, gpus):
            say(line)
        return
    for point in points:
        check_outputs(point.config)
    ahead = pending(points, config.retry)
    if not launcher:
        ahead = with_data_of_hub(ahead, say)
    for line in check_inputs(ahead):
        say(line)
    if config.sweep.targets:
        for group in dict.fromkeys(point.directory.parent for point in points):
            store_targets(config.sweep.targets, group)
    _answer_refused(points, config.retry, say)
    say(f"sweep {config.sweep.name}: {len(points)} points, {len(ahead)} to run")
    if launcher and ahead:
        _submit(ahead, launcher, say)
    elif ahead:
        threads = threads_of(config.jobs)
        slots = [threads | slot for slot in slots]
        Sweep(
            ahead,
            slots,
            say,
            config.report_every_seconds,
            share_gpus=config.share_gpus,
            at_full_speed=points_at_full_speed(config.jobs, gpus, config.sweep.ranks),
        ).run()
    _judge(points, say)


def _answer_refused(points: Sequence[Point], retry: bool, say: Say) -> None:
    """Write and say why points cannot run here, unless they have an answer."""
    refused: dict[str, list[str]] = {}
    for point in points:
        if point.refusal is not None and not point.is_answered(retry):
            write_summary(point, "unsupported", point.refusal)
            refused.setdefault(point.refusal, []).append(point.label)
    for reason, labels in refused.items():
        say(f"unsupported: {', '.join(labels)}: {reason}")


class Sweep:
    """Runs points, one per slot at a time.

    Args:
        slots: for each slot, environment variables for its processes.
        command: the command of a point's process; None: train.py.
        share_gpus: whether several slots share a GPU. The first point of each model and loss then starts alone: it
            compiles the kernels of all others.
        at_full_speed: points at a time that take no longer than expected; None: all.
    """

    def __init__(
        self,
        points: Sequence[Point],
        slots: Sequence[dict[str, str]],
        say: Say,
        report_every_seconds: float,
        command: Callable[[Point], Sequence[str]] | None = None,
        *,
        share_gpus: bool = False,
        at_full_speed: int | None = None,
    ) -> None:
        self._waiting, self._free = deque(points), deque(slots)
        self._total = len(points)
        self._before = {point.directory: point.written_at() for point in points}
        self._say, self._every, self._command = say, report_every_seconds, command
        self._running: list[tuple[Process, dict[str, str], float]] = []
        self._clock = TimeLeft(len(slots), at_full_speed)
        self._share_gpus = share_gpus
        self._compiled: set[str] = set()  # what needs_kernels_of names, if a point has taken a step with it

    def run(self) -> None:
        """Run all points.

        Raises:
            InterruptedRun: after Ctrl-C or SIGTERM, once every running point has stopped.
        """
        reported = time.monotonic()
        with StopRequest() as stop:
            try:
                while (self._waiting or self._running) and stop.signal_number is None:
                    self._start()
                    time.sleep(POLL_SECONDS)
                    self._collect()
                    if time.monotonic() - reported >= self._every:
                        reported = time.monotonic()
                        self._report()
                if stop.signal_number is not None:
                    self._stop(stop.signal_number)
            finally:  # also after a second Ctrl-C: end at once
                for process, _, _ in self._running:
                    process.kill()
                    process.release()

    def _start(self) -> None:
        for _ in range(len(self._waiting)):
            if not self._free:
                return
            point = self._waiting.popleft()
            if self._waits_for_kernels(point):
                self._waiting.append(point)
                continue
            try:
                claim = point.claim()
            except PointTakenError:
                self._waiting.append(point)
                continue
            if point.run_directory().in_use():  # by a single run, or an earlier sweep's process that is ending
                claim.close()
                self._waiting.append(point)
                continue
            if answer := self._answer_of_another(point):
                claim.close()
                self._finish(point, f"{answer} by another process")
                continue
            command = None if self._command is None else self._command(point)
            process = Process(point, self._free[0], command, claim)
            self._running.append((process, self._free.popleft(), time.monotonic()))
            self._say(f"{self._place(point)}: started{self._left()}")

    def _answer_of_another(self, point: Point) -> str | None:
        """The status of `point` if another process has answered it since this sweep began."""
        summary, anew = point.summary(), point.written_at() != self._before[point.directory]
        return summary["status"] if summary and point.is_answered(retry=not anew) else None

    def _waits_for_kernels(self, point: Point) -> bool:
        """Whether a running point is compiling the kernels that `point` needs."""
        if not self._share_gpus:
            return False
        running = [process.point for process, _, _ in self._running]
        self._compiled |= {needs_kernels_of(one) for one in running if one.has_trained()}
        needed = needs_kernels_of(point)
        return needed not in self._compiled and needed in map(needs_kernels_of, running)

    def _collect(self) -> None:
        for entry in [entry for entry in self._running if entry[0].ended()]:
            process, slot, began = entry
            self._running.remove(entry)
            self._free.append(slot)
            seconds = time.monotonic() - began
            summary = process.conclude()
            if summary["status"] == "finished":
                self._clock.add(process.point, seconds)
                self._compiled.add(needs_kernels_of(process.point))
            self._finish(process.point, f"{outcome(summary)} ({duration(seconds)})")

    def _finish(self, point: Point, words: str) -> None:
        self._say(f"{self._place(point)}: {words}{self._left()}")

    def _report(self) -> None:
        for process, _, began in self._running:
            line = f"{process.point.label}: {duration(time.monotonic() - began)}: {process.last_line() or 'starting'}"
            self._say(f"  {line}{self._left()}")

    def _stop(self, signal_number: int) -> None:
        for process, _, _ in self._running:
            process.send(signal_number)
        for process, _, _ in self._running:
            process.wait()
        interrupted = ", ".join(process.point.label for process, _, _ in self._running)
        raise InterruptedRun(
            f"interrupted; running: {interrupted or 'none'}; waiting: {len(self._waiting)}",
            "run the same command again to continue",
            signal_number,
        )

    def _place(self, point: Point) -> str:
        number = self._total - len(self._waiting) - len(self._running)
        return f"[{number}/{self._total} done] {point.label}" if number else f"[{self._total} to run] {point.label}"

    def _left(self) -> str:
        points = [*self._waiting, *(process.point for process, _, _ in self._running)]
        elapsed = sum(time.monotonic() - began for _, _, began in self._running)
        seconds = self._clock.left(points, elapsed)
        return "" if seconds is None or not points else f"; about {duration(seconds)} left"


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
    if host_decides(summary):
        words.append(f"CPU-bound: {summary['host_step_ms']:.1f} of {summary['wall_step_ms']:.1f} ms a step")
    if summary.get("gpu_shared"):
        words.append("times not measured")
    return f"finished: {', '.join(word for word in words if word)}"


def with_data_of_hub(points: Sequence[Point], say: Say) -> list[Point]:
    """The points, after their data of the hub were prepared, once for all points that share them.

    A point whose data the hub does not give gets the error as `missing`. Without this check each point would wait for
    the hub anew, half a minute without a network.
    """
    errors: dict[str, DataError | None] = {}
    found = []
    for point in points:
        data = point.config.data
        if isinstance(data, HubDataConfig) and data.path in point.hub:
            key = repr(data)
            if key not in errors:
                say(f"preparing data={data.name} ({data.path}) for all points that use it")
                errors[key] = in_another_process(_error_of_preparing, data)
            point = replace(point, missing=point.missing or errors[key])
        found.append(point)
    return found


def _error_of_preparing(data: HubDataConfig) -> DataError | None:
    from linrnn.data import ConsoleProgress, prepare

    try:
        prepare(data, progress=ConsoleProgress())
    except DataError as error:
        return error
    return None


def _look_ahead(points: Sequence[Sequence[str]], ranks: int) -> tuple[list[Point], list[str]]:
    """The points and the GPUs, found in one process, because a process takes seconds to start."""
    found, gpus = foresee(points, ranks), visible_gpus()
    on_cpu = all(point.config.device == "cpu" for point in found)
    return found, [] if on_cpu else gpus


def visible_gpus() -> list[str]:
    """GPUs as CUDA_VISIBLE_DEVICES names them. No GPU is initialised."""
    import torch

    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",")[: torch.cuda.device_count()]
    return [str(index) for index in range(torch.cuda.device_count())]


def _least_gpu_memory() -> int:
    """Bytes of the smallest visible GPU."""
    import torch

    return min(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count()))


def needs_kernels_of(point: Point) -> str:
    """What decides the kernels of a point: model, size and loss with all their options, and how a step is computed."""
    config, trainer = point.config, point.config.trainer
    batch = [trainer.batch_size, trainer.seq_len, config.data.reset_at_document]
    blocks = [trainer.precision, trainer.activation_checkpointing, trainer.compile, trainer.float8]
    return f"{config.model} {config.size} {config.loss} {batch} {blocks}"


def threads_of(jobs: int) -> dict[str, str]:
    """OMP_NUM_THREADS for each of several points: its share of the cores, unless the user has set the variable."""
    if jobs == 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores() // jobs))}


def slots_of(jobs: int, gpus: Sequence[str], ranks: int = 1, *, share: bool = False) -> list[dict[str, str]]:
    """Environment variables for each of `jobs` points: a GPU of its own for each of its ranks, if there are GPUs.

    Args:
        share: give each point one GPU, in turn, and tell it that others compute there too.

    Raises:
        ConfigError: there are fewer GPUs than ranks, or than the ranks of all jobs; or nothing can be shared.
    """
    if share:
        _check_sharing(jobs, len(gpus), ranks)
        return [{"CUDA_VISIBLE_DEVICES": gpus[job % len(gpus)], SHARED_GPU: "1"} for job in range(jobs)]
    if not gpus:
        return [{} for _ in range(jobs)]
    check_gpus(ranks, len(gpus))
    if jobs * ranks > len(gpus):
        of_ranks = f" of {ranks} ranks" if ranks > 1 else ""
        raise ConfigError(
            f"jobs={jobs}{of_ranks}: there are {len(gpus)} GPUs, and two points on one would disturb each other's "
            "measurements",
            f"use jobs={len(gpus) // ranks}{'' if ranks > 1 else SHARING}",
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[job * ranks : (job + 1) * ranks])} for job in range(jobs)]


def _check_sharing(jobs: int, gpus: int, ranks: int) -> None:
    """Check that points can share GPUs.

    Raises:
        ConfigError: there is no GPU, points have several ranks, or each job has a GPU of its own.
    """
    if not gpus:
        raise ConfigError(
            f"share_gpus=true: no GPU is used here, and jobs={jobs} needs no sharing on a CPU", "leave share_gpus out"
        )
    if ranks > 1:
        raise ConfigError(
            f"share_gpus=true: points of {ranks} ranks cannot share GPUs", "use sweep.ranks=1, or leave share_gpus out"
        )
    if jobs <= gpus:
        raise ConfigError(
            f"share_gpus=true: each of {jobs} jobs has one of {gpus} GPUs of its own, and its times can be measured",
            f"leave share_gpus out, or use jobs={gpus + 1} or more",
        )


def check_shared_memory(points: Sequence[Point], jobs: int, gpus: int, least: int) -> None:
    """Check that all points fit that may share a GPU at a time.

    A point without a forecast counts OUTSIDE_FORECASTS alone. A point that fits on no GPU is left to its own run.

    Args:
        least: bytes of the smallest GPU.

    Raises:
        ConfigError: the formulas foresee more memory than `least`.
    """
    sizes = [point.memory_bytes or 0 for point in points]
    shared = [size for size in sizes if size + OUTSIDE_FORECASTS <= least]
    most = sorted(shared, reverse=True)[: math.ceil(jobs / gpus)]
    needed = [sum(most[:count]) + count * OUTSIDE_FORECASTS for count in range(len(most) + 1)]
    if len(most) < 2 or needed[-1] <= least:
        return
    fitting = max(count for count, size in enumerate(needed) if size <= least)
    raise ConfigError(
        f"share_gpus=true: {len(most)} points at a time on one GPU need up to {needed[-1] / GIB:.1f} GiB "
        f"(by formulas), and a GPU here has {least / GIB:.1f} GiB",
        f"use jobs={fitting * gpus}" if fitting > 1 else f"leave share_gpus out, and use jobs={gpus}",
    )


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


def in_another_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in a fresh process, so that this one never initialises a GPU."""
    with worker_processes(1) as pool:
        return pool.submit(function, *arguments).result()


def run_alone(point: Point) -> str:
    """Run one point in a fresh process, as a cluster's job, and wait for it. Returns its status."""
    process = Process(point, {})
    process.wait()
    return str(process.conclude()["status"])


def _submit(points: Sequence[Point], launcher: Sequence[str], say: Say) -> None:
    """Run all points as jobs of a cluster. A job that leaves no summary gets one that says so."""
    directory = points[0].directory.parent / LOGS / "cluster"
    say(f"submitting {len(points)} jobs ({shlex.join(launcher)}); their files are in {directory}")
    problem, before = "the job left no summary", [point.written_at() for point in points]
    try:
        launch(run_alone, points, launcher, directory.absolute())
    except ConfigError:
        raise
    except Exception as error:  # submitit raises when a job was lost; the others have run
        problem = f"the job was lost: {first_line(error)}"
    for point, written_at in zip(points, before, strict=True):
        summary = point.summary()
        if summary is None or (point.written_at() == written_at and summary["status"] != "finished"):
            summary = write_summary(point, "failed", problem)  # a summary that is there is of an earlier sweep
        say(f"{point.label}: {outcome(summary)}")


def _judge(points: Sequence[Point], say: Say) -> None:
    """Print the status of all points.

    Raises:
        SweepFailure: a point neither finished nor was unsupported.
        UnsupportedError: every point was unsupported.
    """
    statuses = {point.label: (point.summary() or {"status": "failed"})["status"] for point in points}
    say(", ".join(f"{count} {status}" for status, count in Counter(statuses.values()).items()))
    if {*statuses.values()} == {"unsupported"}:
        raise UnsupportedError(
            f"none of {len(points)} points can run here", "the lines above say why; change the points or the machine"
        )
    failed = {name: status for name, status in statuses.items() if status not in HARMLESS}
    if failed:
        codes = {CODES.get(status, SweepFailure.exit_code) for status in failed.values()}
        words = [f"{name} ({status})" for name, status in failed.items()]
        more = [f"and {len(words) - NAMED} more"] if len(words) > NAMED else []
        logs = [point.log for point in points if point.label in failed]
        folders = ", ".join(sorted({str(log.parent / "*.log") for log in logs}))
        where = f"reason is in {logs[0]}" if len(logs) == 1 else f"reasons are in {folders}"
        raise SweepFailure(
            f"{len(failed)} of {len(points)} points did not finish: {', '.join([*words[:NAMED], *more])}",
            f"the {where}; {_again({*failed.values()})}",
            codes.pop() if len(codes) == 1 else SweepFailure.exit_code,
        )


def _again(statuses: set[str]) -> str:
    """How points of these statuses are run again."""
    if not statuses & {*ANSWERS}:
        return f"the same command runs {'failed points' if statuses == {'failed'} else 'these points'} again"
    if statuses <= {*ANSWERS}:
        return "the same command with retry=true runs these points again"
    return f"the same command runs failed points again, and with retry=true also points that are {' or '.join(ANSWERS)}"
