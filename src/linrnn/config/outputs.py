"""Check, before anything is built, that a command can write where its configuration says."""

import os
from pathlib import Path
from typing import Any

from linrnn.config.compose import fields_of
from linrnn.core.errors import StorageError


def check_outputs(config: Any) -> None:
    """Check every directory that the command writes to. Nothing is created.

    Raises:
        StorageError: a path is a file, lies below a file, or may not be written.
    """
    for key, field, value in fields_of(config):
        if field.metadata.get("path") == "written" and value is not None:
            _check(key, Path(value).absolute())


def _check(key: str, directory: Path) -> None:
    there = directory
    while not os.path.lexists(there):
        there = there.parent
    if there.is_symlink() and not there.exists():
        raise StorageError(f"{key}: {there} is a link to nothing", f"choose another {key}")
    if not there.is_dir():
        raise StorageError(f"{key}: {there} is a file, not a directory", f"choose another {key}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise StorageError(f"{key}: {there} may not be written", f"choose another {key}")
