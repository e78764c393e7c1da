"""A run's directory is its identity: `results/<group>/<run_name>/` holds everything that the run read and wrote.

config.yaml, environment.json, metrics.jsonl (the source of truth), summary.json, train.log, checkpoints/.
"""

import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import Any

from linrnn.errors import ConfigError, StorageError
from linrnn.redaction import scrub

CONFIG = "config.yaml"
IDENTITY = "identity.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
LOG = "train.log"
CHECKPOINTS = "checkpoints"


class RunDirectory:
    """A run's directory: checked when constructed, created (or reopened, or moved aside) and locked by :meth:`open`.

    Args:
        path: the directory.
        identity: every key that two runs in one directory must share, flattened.
        resume: `auto` (continue an existing run), `never` (move it aside), `must` (fail without one).

    Raises:
        ConfigError: the directory holds another configuration, or `must` finds no run.
    """

    def __init__(self, path: Path, *, identity: dict[str, Any], resume: str) -> None:
        self.path = path
        self._identity, self._resume = identity, resume
        self.resumed = resume != "never" and (path / IDENTITY).exists()
        if resume == "must" and not self.resumed:
            raise ConfigError(f"trainer.resume=must: {path} holds no run", "use trainer.resume=auto, or check the keys")
        if self.resumed:
            self._check_identity()

    def open(self, config_yaml: str) -> None:
        """Make the directory this process's own until :meth:`close`; `config_yaml` is written for people.

        Raises:
            ConfigError: another process uses it.
            StorageError: it cannot be written.
        """
        try:
            self._open(config_yaml)
        except OSError as error:
            raise _not_written(self.path, error) from error

    def _open(self, config_yaml: str) -> None:
        if self._resume == "never" and self.path.exists():
            self._locked()
            self.close()
            print(f"moved the existing run to {_move_aside(self.path)}")
        self.path.mkdir(parents=True, exist_ok=True)
        self._locked()
        self.write_json(IDENTITY, self._identity)
        self.write_text(CONFIG, config_yaml)

    def in_use(self) -> bool:
        """Whether another process has it open."""
        if not self.path.exists():
            return False
        try:
            self._locked()
        except ConfigError:
            return True
        finally:
            self.close()
        return False

    def close(self) -> None:
        """Let others use the directory."""
        os.close(self._lock)

    def _locked(self) -> None:
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process is writing to {self.path}",
                "wait for it, or give this run another run_name or group",
            ) from None

    def _check_identity(self) -> None:
        changed = differences(
            json.loads((self.path / IDENTITY).read_text(encoding="utf-8")), json.loads(json.dumps(self._identity))
        )
        if changed:
            raise ConfigError(
                f"{self.path} holds a run of another configuration ({'; '.join(changed)})",
                "choose another run_name or group, or trainer.resume=never to move the old run aside",
            )

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    def read_summary(self) -> dict[str, Any] | None:
        """The summary of an earlier process of this run, if it got that far."""
        path = self.path / SUMMARY
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        self.write_text(name, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write aside, then rename: a reader never sees half a file. Secrets of the environment are left out.

        Raises:
            StorageError: it cannot be written.
        """
        partial = self.path / f".{name}.partial"
        try:
            partial.write_text(scrub(text), encoding="utf-8")
            partial.replace(self.path / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise _not_written(self.path / name, error) from error


def _not_written(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path} cannot be written ({error.strerror})", "free space or choose another results_dir")


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Keys whose values differ between two flattened configurations, as `key: old -> new`."""
    absent = "(absent)"
    pairs = ((key, old.get(key, absent), new.get(key, absent)) for key in sorted(old.keys() | new.keys()))
    return [f"{key}: {before} -> {after}" for key, before, after in pairs if before != after]


def _move_aside(path: Path) -> Path:
    number = 1
    while (target := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return path.rename(target)
