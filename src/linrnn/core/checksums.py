"""Checksums of files. Checkpoints and exported models have them in the format of `sha256sum`; loading checks them."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from linrnn.core.errors import DataError, StorageError

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
    files = sorted(path for path in directory.iterdir() if path.name != CHECKSUMS)
    lines = [f"{checksum}  {file.name}\n" for checksum, file in zip(sha256_of_all(files), files, strict=True)]
    (directory / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def check_checksums(directory: Path) -> set[str]:
    """Compare the files of a directory with SHA256SUMS. A directory without SHA256SUMS passes the check.

    Returns:
        the names that SHA256SUMS lists.

    Raises:
        DataError: a file is missing or has changed, or SHA256SUMS is no text.
        StorageError: a file cannot be read, perhaps only now. That says nothing about what it holds.
    """
    record = directory / CHECKSUMS
    if not record.is_file():
        return set()
    try:
        lines = (line.partition("  ") for line in record.read_text(encoding="utf-8").splitlines())
        listed = {name: checksum for checksum, _, name in lines}
        for name in listed:
            if not (directory / name).is_file():
                raise DataError(f"{directory / name} is missing", "export the model again")
        for name, checksum in zip(listed, sha256_of_all(directory / name for name in listed), strict=True):
            if checksum != listed[name]:
                remedy = f"export the model again, or delete {CHECKSUMS} if the file was changed on purpose"
                raise DataError(f"{directory / name} does not match its checksum", remedy)
    except ValueError as error:
        raise DataError(f"{record} cannot be checked ({error})", "export the model again") from error
    except OSError as error:
        remedy = "run the same command again; if that does not help, move the directory away"
        raise StorageError(f"{directory} cannot be read ({error.strerror or error})", remedy) from error
    return set(listed)
