"""Read local files as documents: .txt, .jsonl and .parquet. The first two may be compressed (.xz, .gz, .zst).

Where a document ends:

    .txt      after a blank line. Blank lines belong to the document before them, so no byte of the file is lost.
    .jsonl    each line is one JSON object; its `text_field` is the document. Blank lines are skipped.
    .parquet  each row is one document: its column `text_field`.

Text must be UTF-8. Documents without any text are skipped.
"""

import glob
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import zstandard

from linrnn.core.errors import DataError


class Document(NamedTuple):
    """One document, and the share of the source that has been read with it (0 to 1, None if unknown)."""

    text: str
    fraction: float | None


COMPRESSED = (".xz", ".gz", ".zst")
PLAIN = (".txt", ".jsonl", ".parquet")
KNOWN = f"{', '.join(PLAIN)}, and .txt or .jsonl with {', '.join(COMPRESSED)}"


def find_files(pattern: str, key: str) -> list[Path]:
    """The data files that a path names, sorted. The path is a file, a directory (searched to any depth) or a glob.

    In a directory, hidden files and files of unknown type are skipped. A file or a glob must name data files only.

    Args:
        key: the configuration key of the path, for messages.

    Raises:
        DataError: there is no file, a file is empty, or its type is unknown.
    """
    path = Path(pattern).expanduser()
    if path.is_dir():
        inside = (file for file in path.rglob("*") if file.is_file() and _format_of(file) is not None)
        files = sorted(f for f in inside if not any(part.startswith(".") for part in f.relative_to(path).parts))
        if not files:
            raise DataError(f"{key}={pattern} holds no data files", f"put files there of type {KNOWN}")
    elif path.exists():
        files = [path]
    else:
        files = sorted(Path(found) for found in glob.glob(str(path), recursive=True) if os.path.isfile(found))
        if not files:
            raise DataError(f"{key}={pattern} does not exist", f"give a file, directory or glob in {key}")
    for file in files:
        if _format_of(file) is None:
            raise DataError(f"{file} is of unknown type", f"known types: {KNOWN}")
        if file.stat().st_size == 0:
            raise DataError(f"{file} is empty", f"remove it from {key} or fetch it again")
    return files


def read_documents(files: list[Path], text_field: str) -> Iterator[Document]:
    """The documents of all files, in order.

    Raises:
        DataError: a file is corrupt, not UTF-8, not of its format, or lacks `text_field`. The error names the line or
            row.
    """
    sizes = [file.stat().st_size for file in files]
    total, done = sum(sizes), 0
    for file, size in zip(files, sizes, strict=True):
        read = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}[cast(str, _format_of(file))]
        for text, position in read(file, text_field):
            yield Document(text, (done + position) / total)
        done += size


def _format_of(path: Path) -> str | None:
    suffixes = path.suffixes
    plain = path.with_suffix("").suffix if suffixes and suffixes[-1] in COMPRESSED else path.suffix
    if plain not in PLAIN or (plain == ".parquet" and path.suffix != ".parquet"):
        return None
    return plain


# Each reader yields a document's text and the bytes of the file read so far.
def _read_txt(path: Path, _text_field: str) -> Iterator[tuple[str, int]]:
    lines: list[str] = []
    has_text = after_blank = False
    position = 0
    for _, line, position in _read_lines(path):
        blank = not line.strip()
        if has_text and after_blank and not blank:
            yield "".join(lines), position
            lines, has_text = [], False
        lines.append(line)
        has_text, after_blank = has_text or not blank, blank
    if has_text:
        yield "".join(lines), position


def _read_jsonl(path: Path, text_field: str) -> Iterator[tuple[str, int]]:
    for number, line, position in _read_lines(path):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: not JSON: {error}", "correct or remove that line") from None
        except RecursionError:
            raise DataError(f"{where}: JSON nested too deeply", "correct or remove that line") from None
        if not isinstance(record, dict):
            raise DataError(f"{where}: not a JSON object", 'each line must be like {"text": "…"}')
        if text_field not in record:
            raise _no_field(where, text_field, list(record))
        yield checked_text(record[text_field], where, text_field), position


def _read_parquet(path: Path, text_field: str) -> Iterator[tuple[str, int]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if text_field not in file.schema_arrow.names:
                raise _no_field(str(path), text_field, file.schema_arrow.names)
            size, row, n_rows = path.stat().st_size, 0, file.metadata.num_rows
            for batch in file.iter_batches(columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield checked_text(text, f"{path}, row {row}", text_field), size * row // n_rows
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not an intact parquet file: {error}", "fetch the file again") from None


def checked_text(text: Any, where: str, text_field: str) -> str:
    """`text`, after a check that it is a string that UTF-8 can encode."""
    if not isinstance(text, str):
        raise DataError(
            f"{where}: {text_field} is {'null' if text is None else type(text).__name__}, not text",
            "correct it, or name another data.text_field",
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        cause = f"{where}: {text_field} has half of a surrogate pair, which is not Unicode text"
        raise DataError(cause, "correct or remove it") from None
    return text


def _no_field(where: str, text_field: str, there: list[str]) -> DataError:
    return DataError(f"{where} has no field {text_field!r}", f"set data.text_field to one of: {', '.join(there)}")


def _read_lines(path: Path) -> Iterator[tuple[int, str, int]]:
    """For each line: its number (from 1), its text with the line end, and the bytes of the file read so far."""
    number = 0
    with ExitStack() as stack:
        try:
            raw = stack.enter_context(open(path, "rb"))
            data = stack.enter_context(_decompress(raw, path.suffix))
            for line in data:
                number += 1
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield number, text, raw.tell()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, line {number}: not UTF-8: {error}", "convert the file to UTF-8") from None
        except (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            raise DataError(
                f"{path} is corrupt or cut short after line {number}: {error}", "fetch the file again"
            ) from None


def _decompress(raw: BinaryIO, suffix: str) -> Any:
    if suffix == ".xz":
        return lzma.open(raw)
    if suffix == ".gz":
        return gzip.open(raw)
    if suffix == ".zst":
        return io.BufferedReader(_ZstdReader(raw), 1 << 20)
    return raw


class _ZstdReader(io.RawIOBase):
    """Reads all frames of a .zst file, and raises if the file was cut short (zstandard's own reader just ends)."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            compressed = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            compressed = compressed or self._raw.read(1 << 18)
            if not compressed:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("the last zstd frame is incomplete")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._ready = memoryview(self._frame.decompress(compressed))
        n = min(len(buffer), len(self._ready))
        buffer[:n] = self._ready[:n]
        self._ready = self._ready[n:]
        return n
