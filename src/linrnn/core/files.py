"""Files that other processes read: written whole or not at all, and read with errors that name the file."""

import contextlib
import json
import lzma
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from linrnn.core.errors import DataError, StorageError, first_line


@contextlib.contextmanager
def storing(path: Path, remedy: str = "free disk space or choose another results_dir, then resume") -> Iterator[None]:
    """Name what is written here, if that fails.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror or error})", remedy) from error


def write_text(path: Path, text: str) -> None:
    """Write a file. Whatever happens, its place holds the old content or the whole new one, also on a full disk.

    Raises:
        OSError: the file cannot be written.
    """
    write_bytes(path, text.encode())


def write_json(path: Path, content: Any) -> None:
    """Write JSON, compressed if the name ends with `.xz`, as :func:`write_text`."""
    text = (json.dumps(content, indent=1) + "\n").encode()
    write_bytes(path, lzma.compress(text) if path.suffix == ".xz" else text)


def write_bytes(path: Path, content: bytes) -> None:
    """As :func:`write_text`: write beside the file, flush, then rename. Of two processes the later one wins."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(beside, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:  # Ctrl-C, too
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def read_json(path: Path, remedy: str = "move the file away, or fetch it again") -> Any:
    """The content of a JSON file, also of a compressed one (`.xz`).

    Raises:
        DataError: the file is missing, cut short, not JSON, or nested too deeply.
    """
    try:
        content = path.read_bytes()
        return json.loads((lzma.decompress(content) if path.suffix == ".xz" else content).decode())
    except (OSError, EOFError, lzma.LZMAError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({first_line(error)})", remedy) from error


def read_object(path: Path, keys: tuple[str, ...] = (), remedy: str = "move the file away, or fetch it again") -> Any:
    """The JSON object of a file; it must have all `keys`.

    Raises:
        DataError: as :func:`read_json`, or the content is not an object, or one of `keys` is missing.
    """
    content = read_json(path, remedy)
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no JSON object", remedy)
    if missing := [key for key in keys if key not in content]:
        raise DataError(f"{path} lacks {', '.join(missing)}", remedy)
    return content


def whole_lines(content: bytes) -> bytes:
    """A file's lines of JSON, without a last line that was cut off (by a kill or a full disk). Each line has its end.

    A last line without its end is whole if it is JSON. A line that has its end stays, whatever it holds.
    """
    lines, end, last = content.rpartition(b"\n")
    try:
        json.loads(last)
    except (ValueError, RecursionError):
        return lines + end
    return content + b"\n"
