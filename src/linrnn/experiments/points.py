"""One point of a sweep: estimate its needs, run it in processes of its own, turn any end of them into a status."""

import contextlib
import ctypes
import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linrnn.config import CONFIG_DIR, last_of_each, load_config, place_of
from linrnn.config.naming import HORIZON
from linrnn.config.schema import Config, TextDataConfig, leaves
from linrnn.config.steps import ending_at, last_step
from linrnn.core.errors import ConfigError, DataError, LinrnnError, OutOfMemoryError, UnsupportedError
from linrnn.distributed.launch import as_first_of, environments
from linrnn.runs.directory import SUMMARY, RunDirectory
from linrnn.runs.environment import without_machine_paths
from linrnn.runs.metrics import read_jsonl
from linrnn.runs.summary import status_of, summary_without_measurements

TRAIN = CONFIG_DIR.parent / "train.py"  # in the source tree alone
POLL_SECONDS = 0.2
START_SECONDS = 15.0  # from a command to its first step: about 8 on an idle CPU, 14 to 19 on an H100
LEFT_BEHIND_SECONDS = 60.0  # after a rank has failed: until all others get SIGTERM, and again until they get SIGKILL
LOGS = "sweep_logs"  # in a group's directory: what each point printed
NOT_RETRIED = ("out_of_memory", "diverged")  # results of their own: running again would not change them


@dataclass(frozen=True)
class Point:
    """A run and its expected needs. None: unknown."""

    overrides: tuple[str, ...]  # of train.py
    config: Config  # that they make
    directory: Path  # the run's
    label: str  # the overrides in which the points of its sweep differ
    ranks: int  # processes that share the run
    total_steps: int  # optimizer steps of the whole run
    memory_bytes: int | None = None  # expected peak of one rank
    seconds: float | None = None  # expected, from the command to the last step
    refusal: str | None = None  # why it cannot run here; None if it can

    @property
    def log(self) -> Path:
        """The file with its processes' output."""
        return self.directory.parent / LOGS / f"{self.directory.name}.log"

    def run_directory(self) -> RunDirectory:
        """The run's directory.

        Raises:
            ConfigError: it holds a run of another configuration.
        """
        resume = "must" if self.config.trainer.resume == "must" else "auto"
        return RunDirectory(self.config, self.ranks, resume)

    def summary(self) -> dict[str, Any] | None:
        return self.run_directory().read_summary()

    def is_done(self, retry: bool) -> bool:
        """Whether nothing is left to run: the point is finished, or (without `retry`) out of memory or diverged.

        Raises:
            ConfigError: the directory holds a run with more steps than this point asks for.
        """
        summary = self.summary() or {"status": "none"}
        if summary["status"] != "finished":
            return summary["status"] in NOT_RETRIED and not retry
        if (steps := summary["steps"]) > self.total_steps:
            raise ConfigError(
                f"{self.directory} holds a run of {steps} steps, and {self.label} stops at {self.total_steps}",
                f"use {ending_at(steps, self.config)}, or choose another group",
            )
        return bool(steps == self.total_steps)


def point_of(overrides: Sequence[str], ranks: int = 1, label: str = "") -> Point:
    """The point of these overrides. No GPU is initialised.

    Raises:
        ConfigError: an override is wrong, or several ranks are to run parallel=none.
    """
    config = load_config(overrides)
    if ranks > 1 and config.parallel.name == "none":
        raise ConfigError(
            f"{ranks} ranks, and parallel=none is a run of one process",
            "add parallel=fsdp, ddp or vocab, or use one rank",
        )
    directory, steps = place_of(config, ranks), last_step(config, ranks)
    return Point(tuple(last_of_each(overrides)), config, directory, label or directory.name, ranks, steps)


# ----------------------------------------------------------------------------------------------------------- plan
def plan_points(points: Sequence[Sequence[str]], ranks: int = 1) -> list[Point]:
    """Name every point, estimate its memory and time, and check whether it can run.

    A point with the configuration of an earlier one is dropped. Call this in a separate process, since it may
    initialise the GPU.

    Args:
        points: overrides of train.py.
        ranks: processes that share each run.

    Raises:
        ConfigError: two different points would share a directory, or several ranks are to run a point of one process.
        LinrnnError: an override is wrong on any machine.
    """
    found: dict[Path, Point] = {}
    common = set(points[0]).intersection(*points)
    with as_first_of(ranks):
        for overrides in points:
            point = point_of(overrides, ranks, " ".join(one for one in overrides if one not in common))
            first = found.get(point.directory)
            if first is None:
                found[point.directory] = _plan_point(point)
            elif first.config != point.config:
                raise _shared_directory(first, point)
    return list(found.values())


def _shared_directory(first: Point, second: Point) -> ConfigError:
    here, there = (dict(leaves(dataclasses.asdict(point.config))) for point in (first, second))
    keys = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
    remedy = f"names do not tell {', '.join(keys)} apart: leave run_name out, or give each value a group of its own"
    if not second.config.run_name and {"trainer.max_steps", "trainer.max_tokens"} & {*keys}:
        remedy = f"use schedule=cosine {HORIZON}=null, so that each name says where its run ends"
    return ConfigError(f"the points {first.label} and {second.label} would share {first.directory}", remedy)


def _plan_point(point: Point) -> Point:
    import torch

    from linrnn.data import vocabulary_size
    from linrnn.data.readers import find_files
    from linrnn.experiments.dry_run import seconds_of_step
    from linrnn.training.plan import Plan, check_step_fits, make_training_plan
    from linrnn.training.runtime import check_memory_budget, resolve_device, resolve_precision

    config = point.config
    try:
        device = torch.device("cuda") if config.gpu else resolve_device(config.device)
        plan = Plan(config, device, resolve_precision(config.trainer.precision, device), point.ranks)
        arch = plan.architecture(vocabulary_size(config.data))
        estimate, found = plan.memory_estimate(arch), seconds_of_step(plan, arch)
        memory = None if estimate is None else estimate.peak
        total = None if found is None else START_SECONDS + plan.total_steps * found[0]
        point = dataclasses.replace(point, memory_bytes=memory, seconds=total)
        if isinstance(config.data, TextDataConfig):
            named = [("data.sources", source.path) for source in config.data.sources]
            for key, path in (*named, ("data.path", config.data.path), ("data.valid_path", config.data.valid_path)):
                _ = path is None or find_files(path, key)  # raises if there is none
        make_training_plan(config)
        if not config.gpu:
            check_memory_budget(config.memory_budget_gib, device)
        check_step_fits(plan, arch)
    except OutOfMemoryError:  # the run itself will give this result
        pass
    except (UnsupportedError, ConfigError, DataError) as error:
        point = dataclasses.replace(point, refusal=f"{error.cause}; {error.remedy}")
    return point


# ------------------------------------------------------------------------------------------------------------ run
class Process:
    """A point running in a fresh process for each of its ranks. They end when the process that started them ends.

    torchrun would kill ranks 30 s after a signal, in the middle of a checkpoint, and leave them behind if it is killed.

    Args:
        environment: variables in addition to this process's own.
    """

    def __init__(self, point: Point, environment: dict[str, str]) -> None:
        self.point = point
        self._summary_before = point.summary()
        self._failed_at: float | None = None
        self._codes: list[int] | None = None  # exit codes before other ranks were ended here
        point.log.parent.mkdir(parents=True, exist_ok=True)
        with point.log.open("ab") as log:  # another sweep's process may write there, too
            self._log_begins = log.tell()
            self._ranks = [
                subprocess.Popen(
                    command_of(point),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **environment, **of_rank},
                    start_new_session=True,  # only this process passes Ctrl-C on to it
                    preexec_fn=_end_with_parent,
                )
                for of_rank in environments(point.ranks)
            ]

    def send(self, signal_number: int) -> None:
        """Send a signal to every rank."""
        for rank in self._ranks:
            if rank.poll() is None:
                rank.send_signal(signal_number)

    def kill(self) -> None:
        """End it at once. Harmless where it has ended."""
        self.send(signal.SIGKILL)
        self.wait()

    def ended(self) -> bool:
        """Whether every rank has ended.

        If a rank fails, the others notice and end. Ranks that have not joined it yet do not notice, and are ended here.
        """
        codes = [rank.poll() for rank in self._ranks]
        if None in codes and any(codes):
            self._failed_at = self._failed_at or time.monotonic()
            waited = time.monotonic() - self._failed_at
            if waited > LEFT_BEHIND_SECONDS:
                self._codes = self._codes or [code or 0 for code in codes]
                self.send(signal.SIGKILL if waited > 2 * LEFT_BEHIND_SECONDS else signal.SIGTERM)
        return None not in codes

    def wait(self) -> None:
        """Wait until every rank has ended."""
        while not self.ended():
            time.sleep(POLL_SECONDS)

    def _printed(self) -> str:
        return self.point.log.read_bytes()[self._log_begins :].decode(errors="replace")

    def last_line(self) -> str:
        """The last line about progress or end: at the left edge, without the summary's figures below it."""
        lines = self._printed().splitlines()
        return next((line for line in reversed(lines) if line.strip() and line[0] != " "), "")

    def finish(self) -> dict[str, Any]:
        """Wait for its end, and return its summary (:meth:`conclude`). An error or Ctrl-C here ends it at once."""
        try:
            self.wait()
        except BaseException:
            self.kill()
            raise
        return self.conclude()

    def conclude(self) -> dict[str, Any]:
        """The summary after the process has ended: the run's own, or one that says how it died."""
        rank, code = decisive(self._codes or [rank.returncode for rank in self._ranks])
        own = self.point.summary()
        if own and (code == 0 or own != self._summary_before):  # 0: nothing was left to do
            return own
        reason = self._reason(code)
        if self.point.ranks > 1 and not reason.startswith("rank "):
            reason = f"rank {rank}: {reason}"
        return write_summary(self.point, status_of(code), reason)

    def _reason(self, code: int) -> str:
        if code < 0:
            host_memory = "; perhaps the machine ran out of host memory" * (-code == signal.SIGKILL)
            return f"killed by {signal.Signals(-code).name}{host_memory}"
        errors = re.findall("error: (.*)", self._printed())
        return (errors or [self.last_line()])[-1] or f"exit code {code}"


def command_of(point: Point) -> list[str]:
    """The command of each of a point's ranks."""
    return [sys.executable, *([str(TRAIN)] if TRAIN.exists() else ["-m", "linrnn", "train"]), *point.overrides]


def decisive(codes: Sequence[int]) -> tuple[int, int]:
    """The rank that decides what became of a point, and its exit code, from the exit codes of all ranks.

    A rank out of memory comes first, then one that a signal killed, then one that failed in another way.
    """
    return min(enumerate(codes), key=lambda one: (one[1] != OutOfMemoryError.exit_code, one[1] >= 0, one[1] == 0))


def write_summary(point: Point, status: str, reason: str) -> dict[str, Any]:
    """Write a summary without figures for a point, and return the summary that is then in its directory.

    Nothing is written if another process uses the directory or has finished the run. An `unsupported` point also keeps
    the summary of a run that has trained steps.
    """
    launcher = ["python"] if point.ranks == 1 else ["torchrun", f"--nproc-per-node={point.ranks}"]
    command = shlex.join([*launcher, "train.py", *without_machine_paths(point.overrides)])
    summary = summary_without_measurements(point.config, point.ranks, status, reason, command)
    directory = point.run_directory()
    try:
        directory.open()
    except LinrnnError as error:
        return {**summary, "reason": f"{reason} ({error.cause})"}
    try:
        if (finished := directory.read_summary()) and point.is_done(retry=True):
            return finished
        with contextlib.suppress(DataError):  # the file is damaged
            for record in read_jsonl(directory.metrics):
                if record.get("train/tokens") is not None:
                    summary |= {"steps": record["step"], "tokens": record["train/tokens"]}
        if not directory.resumed:
            directory.begin()
        if status != "unsupported" or not summary["steps"]:
            directory.write_json(SUMMARY, summary)
    finally:
        directory.close()
    return summary


def _end_with_parent() -> None:
    """In the child process: receive SIGTERM when the parent dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
