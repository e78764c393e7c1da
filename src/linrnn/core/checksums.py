"""Checksums of files. An exported model has them in the format of `sha256sum`, and loading it checks them."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from linrnn.core.errors import DataError

CHECKSUMS = "SHA256SUMS"
THREADS = 4  # at about 1.4 GB/s each


def sha256(path: Path) -> str:
    """The SHA-256 checksum of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_all(files: Iterable[Path]) -> list[str]:
    """The SHA-256 checksum of each file, in hex."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(sha256, files))


def write_checksums(directory: Path) -> None:
    """Write SHA256SUMS, which holds a checksum for every file of a directory."""
    lines = [f"{sha256(path)}  {path.name}\n" for path in sorted(directory.iterdir())]
    (directory / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def check_checksums(directory: Path) -> None:
    """Compare the files of a directory with SHA256SUMS. A directory without SHA256SUMS passes the check.

    Raises:
        DataError: a file is missing or has changed, or SHA256SUMS cannot be read.
    """
    record = directory / CHECKSUMS
    if not record.is_file():
        return
    try:
        for line in record.read_text(encoding="utf-8").splitlines():
            checksum, _, name = line.partition("  ")
            if not (directory / name).is_file():
                raise DataError(f"{directory / name} is missing", "export the model again")
            if sha256(directory / name) != checksum:
                remedy = f"export the model again, or delete {CHECKSUMS} if the file was changed on purpose"
                raise DataError(f"{directory / name} does not match its checksum", remedy)
    except (OSError, ValueError) as error:
        raise DataError(f"{record} cannot be checked ({error})", "export the model again") from error
