"""A run's directory `results/<group>/<run_name>/` is its identity. It holds everything that the run wrote.

Its files: config.yaml, environment.json, metrics.jsonl (the source of truth), summary.json, train.log, checkpoints/.
"""

import contextlib
import itertools
import json
import shlex
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from linrnn.config import Config, identity, place_of, to_yaml
from linrnn.config.naming import HORIZON
from linrnn.core.dates import utc_now
from linrnn.core.errors import ConfigError, LinrnnError
from linrnn.core.files import read_object, storing, write_text
from linrnn.core.output import say
from linrnn.core.redaction import scrub
from linrnn.runs.origins import Process, read_processes, settled

CONFIG = "config.yaml"
IDENTITY = "identity.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
LOG = "train.log"
PICTURE = "progress.png"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"  # the system releases it when the process ends, in whatever way it ends
PATIENCE = 1.0  # seconds that an opener waits: somebody may hold the lock for a moment, to ask whether it is taken
ASIDE = "trainer.resume=never moves the old run aside and starts again"


class RunDirectory:
    """A run's directory: checked when constructed, locked by :meth:`open`, written from :meth:`begin` on.

    Between :meth:`open` and :meth:`begin` a process reads the directory and decides what to do. A finished run keeps
    every byte.

    Args:
        world_size: processes that share the run.
        resume: instead of `trainer.resume`.

    Raises:
        ConfigError: the directory holds another configuration, or `must` finds no run.
    """

    def __init__(self, config: Config, world_size: int = 1, resume: str | None = None) -> None:
        self.path = place_of(config, world_size)
        self._lock = FileLock(self.path / LOCK, thread_local=False)
        self._config, self._identity = config, identity(config, world_size)
        self._resume = resume or config.trainer.resume
        self._is_new = False  # made by this process
        self._check()

    def open(self) -> None:
        """Lock the directory for this process until :meth:`close`.

        Raises:
            ConfigError: another process uses the directory, or it now holds another configuration.
            StorageError: the directory cannot be made.
        """
        with storing(self.path):
            self._is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire(timeout=PATIENCE, poll_interval=0.01)
            except Timeout:
                remedy = f"wait for it, or use {self.another_name} for another run"
                raise ConfigError(f"another process is writing to {self.path}", remedy) from None
        try:
            self._check()
        except LinrnnError:
            self.close()
            raise

    def begin(self) -> None:
        """Write the run's identity and, for people, its configuration. With `never` move the existing run aside first.

        The summary of an earlier process is deleted: it would be false if this process were killed.

        Raises:
            ConfigError: another process has taken the place of the run that was moved.
            StorageError: a file cannot be written.
        """
        if self._resume == "never" and not self._is_new:
            of_old, self._lock = self._lock, FileLock(self.path / LOCK, thread_local=False)
            try:
                with storing(self.path):
                    say(f"moved the existing run to {self.path.rename(_unused(self.path, '.', 1))}")
            finally:
                of_old.release()
            self.open()
        self.write_json(IDENTITY, self._identity)
        self.write_text(CONFIG, to_yaml(self._config))
        (self.path / SUMMARY).unlink(missing_ok=True)

    def begin_process(self, process: Process) -> None:
        """Record the process that continues the run from its `from_step`. Earlier processes keep the steps before that.

        Raises:
            DataError: the record of earlier processes is damaged.
            StorageError: the record cannot be written, as in the next two.
        """
        earlier = read_processes(self.path / ENVIRONMENT) if self.resumed else []
        self._processes = [*settled(earlier, process["from_step"]), process]
        self.add_to_process()

    def add_to_process(self, **facts: Any) -> None:
        """Record what became known of this process after its begin."""
        self._processes[-1] |= facts
        self.write_json(ENVIRONMENT, {"processes": self._processes})

    def end_process(self, step: int) -> None:
        """Record that this process has ended after `step`."""
        self.add_to_process(ended=utc_now(), to_step=step)

    @property
    def started(self) -> str:
        """The start of the first process that has steps left in the run."""
        return str(self._processes[0]["started"])

    def in_use(self) -> bool:
        """Whether another process has the directory open. Asking keeps nobody from opening it."""
        if not (self.path / LOCK).exists():
            return False
        try:
            with FileLock(self.path / LOCK, timeout=0):
                return False
        except Timeout:
            return True

    def close(self) -> None:
        """Release the directory. If this process made it and left it empty, it is removed."""
        if self._is_new and [path.name for path in self.path.glob("*")] == [LOCK]:
            with contextlib.suppress(OSError):
                (self.path / LOCK).unlink()
                self.path.rmdir()
        self._lock.release()

    def _check(self) -> None:
        """Whether this command continues the run that is there, and may."""
        self.resumed = self._resume != "never" and (self.path / IDENTITY).exists()
        if self._resume == "must" and not self.resumed:
            remedy = "use trainer.resume=auto, or check the keys"
            raise ConfigError(f"trainer.resume=must: {self.path} holds no run", remedy)
        if not self.resumed:
            return
        here = json.loads(json.dumps(self._identity))
        changed = differences(read_object(self.path / IDENTITY, remedy=ASIDE), here)
        its_end, end = changed.get(HORIZON, (None, None))
        if len(changed) == 1 and isinstance(its_end, int):  # another horizon alone has remedies of its own
            same = end < its_end and self.steps_done <= end
            own = f"{HORIZON}={its_end} trainer.max_steps={end} continues the run on its own schedule; " if same else ""
            raise ConfigError(
                f"{self.path} holds a run whose schedule ends at step {its_end}, and this command's ends at step "
                f"{end}: its learning rate would jump",
                f"{own}{self.taking_over} trains on from its state under the new schedule; "
                f"{self.another_name} begins another run; {ASIDE}",
            )
        if changed:
            raise ConfigError(
                f"{self.path} holds a run of another configuration ({in_words(changed)})",
                f"{self.another_name} begins another run; {ASIDE}",
            )

    @property
    def another_name(self) -> str:
        """The overrides that give a command a directory of its own beside this one."""
        return f"run_name={_unused(self.path, '-', 2).name}" + (" trainer.resume=auto" * (self._resume == "must"))

    @property
    def taking_over(self) -> str:
        """The overrides with which this command's run takes over the state of the one that is there, elsewhere."""
        source = shlex.quote(f"continue_from={self.path}")
        return f"{source}{' init_from=null' if self._config.init_from else ''} {self.another_name}"

    @property
    def steps_done(self) -> int:
        """The step of the newest checkpoint; 0 without one."""
        names = [path.name.removeprefix("step_") for path in self.checkpoints.glob("step_*")]
        return max((int(name) for name in names if name.isdecimal()), default=0)

    @property
    def begins_anew(self) -> bool:
        """Whether the files of earlier processes are ignored."""
        return self._resume == "never"

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    def read_summary(self) -> dict[str, Any] | None:
        """The summary of an earlier process of this run, if one was written."""
        path = self.path / SUMMARY
        return read_object(path, ("status", "steps"), ASIDE) if path.exists() else None

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        self.write_text(name, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write `text`, whole or not at all. Secrets of the environment are left out.

        Raises:
            StorageError: the file cannot be written.
        """
        with storing(self.path / name):
            write_text(self.path / name, scrub(text))


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Both values of each key that differs between two flattened configurations."""
    absent = "(absent)"
    pairs = {key: (old.get(key, absent), new.get(key, absent)) for key in sorted(old.keys() | new.keys())}
    return {key: (before, after) for key, (before, after) in pairs.items() if before != after}


def in_words(changed: dict[str, tuple[Any, Any]]) -> str:
    """Differences as `key: old -> new; …`."""
    return "; ".join(f"{key}: {before} -> {after}" for key, (before, after) in changed.items())


def _unused(path: Path, joint: str, first: int) -> Path:
    """The first of `<path><joint><number>` that does not exist."""
    names = (path.with_name(f"{path.name}{joint}{number}") for number in itertools.count(first))
    return next(name for name in names if not name.exists())
