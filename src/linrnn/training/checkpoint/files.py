"""Checkpoint directories: find them, and check their files."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from linrnn.config.compose import nearest
from linrnn.core.checksums import sha256
from linrnn.core.errors import ConfigError, DataError
from linrnn.core.output import say

TENSORS, RNG, STATE, CONFIG = "tensors", "rng.safetensors", "state.json", "config.yaml"
PREFIX, PARTIAL = "step_", ".partial"
HASHING_THREADS = 4


def directory_of(root: Path, step: int) -> Path:
    return root / f"{PREFIX}{step:08d}"


def found(root: Path) -> list[Path]:
    """Complete checkpoint directories below `root`, oldest first."""
    return sorted(path for path in root.glob(f"{PREFIX}*") if path.suffix != PARTIAL and (path / STATE).exists())


def newest(root: Path) -> Path | None:
    """The newest checkpoint below `root` whose files match their checksums. Damaged ones are reported and skipped."""
    for path in reversed(found(root)):
        if (damage := damaged(path)) is None:
            return path
        say(f"skipping {path}: {damage}")
    return None


def resolve(source: Path) -> Path | None:
    """The checkpoint that `source` means: itself, or the newest of a run directory or its checkpoints/; else None.

    Raises:
        DataError: `source` itself is a checkpoint and is damaged, or all checkpoints there are.
    """
    if (source / STATE).exists():
        if damage := damaged(source):
            raise DataError(f"{source} is damaged: {damage}", "name another checkpoint of the run, or the run itself")
        return source
    roots = (source / "checkpoints", source)
    for root in roots:
        if path := newest(root):
            return path
    if names := [path.name for root in roots for path in found(root)]:
        raise DataError(
            f"{source} has only damaged checkpoints ({', '.join(names)})",
            "copy the run again, or name another one; its own command trains it again from step 0",
        )
    return None


def required(key: str, source: str, remedy: str = "name a run's directory or one of its checkpoints/step_*") -> Path:
    """:func:`resolve`, where there must be a checkpoint.

    Args:
        key: the configuration key that names `source`, for messages.
        remedy: what else to name. The run nearby whose name is most like `source` is added.

    Raises:
        ConfigError: there is none.
        DataError: as for `resolve`.
    """
    path = Path(source)
    if directory := resolve(path):
        return directory
    wrong = "holds no complete checkpoint" if path.is_dir() else "is no directory"
    if (path / "config.json").is_file():
        wrong = "is a Hugging Face directory, and no run"
    roots = [*path.parent.glob("*/checkpoints"), *path.glob("*/checkpoints"), *path.glob("*/*/checkpoints")]
    if runs := nearest(source, sorted(str(root.parent) for root in roots if found(root)), 1):
        remedy = f"{remedy}, as {runs[0]}"
    raise ConfigError(f"{key}={source} {wrong}", remedy)


def remove_partial(root: Path) -> None:
    """Delete the checkpoint that an earlier, killed process of this run was writing."""
    for path in root.glob(f"{PREFIX}*{PARTIAL}"):
        shutil.rmtree(path)


def damaged(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    try:
        recorded = read_state(path)["sha256"]
    except DataError as error:
        return error.cause
    for name in recorded:
        if not (path / name).is_file():
            return f"{name} is missing"
    found = checksums(path, recorded)
    different = [name for name, checksum in recorded.items() if found[name] != checksum]
    if surplus := {str(file.relative_to(path)) for file in (path / TENSORS).glob("*")} - recorded.keys():
        return f"{min(surplus)} is not one of its files"
    return f"{different[0]} does not match its checksum" if different else None


def write_state(directory: Path, state: dict[str, Any]) -> None:
    """Write `state` with a checksum of itself. `state["sha256"]` has the checksums of all other files."""
    text = json.dumps(state)
    (directory / STATE).write_text(json.dumps([hashlib.sha256(text.encode()).hexdigest(), text]), encoding="utf-8")


def read_state(directory: Path) -> dict[str, Any]:
    """The state that :func:`write_state` wrote.

    Raises:
        DataError: the file is missing or has changed.
    """
    try:
        checksum, text = json.loads((directory / STATE).read_text(encoding="utf-8"))
        if hashlib.sha256(text.encode()).hexdigest() != checksum:
            raise ValueError
        return json.loads(text)
    except (ValueError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise DataError(f"{STATE} does not match its checksum", f"name another checkpoint than {directory}") from error


def checksums(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """sha256 of files below `directory`, by name."""
    names = list(names)
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return dict(zip(names, pool.map(sha256, (directory / name for name in names)), strict=True))


def sync(path: Path) -> None:
    """Flush a file or a directory, so that the next rename never precedes the data on disk.

    Some file systems cannot flush a directory (EINVAL, as FUSE and SMB may say) and order renames themselves.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
