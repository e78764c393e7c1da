"""Find local files, and read them as documents.

Where a document ends:

    .jsonl    each line is one JSON object; its `text_field` is the document. Also .ndjson and .json.
    .parquet  each row is one document: its column `text_field`.
    text      any other file: .txt, .md, .py and so on. The file is one document, or `separator` ends one.

All but .parquet may be compressed (.xz, .gz, .bz2, .zst). Case does not matter in a file's ending. Text must be UTF-8.
Text files give no document without any text. One of more than `LONGEST` characters is cut at a line end.
"""

import bz2
import codecs
import glob
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zstandard

from linrnn.core.errors import DataError, first_line

LONGEST = 4 << 20  # characters of a document; tokenising takes about 130 bytes of memory for each
BLANK_LINE = "blank_line"  # a separator: blank lines end a document, and belong to it, so no byte of the file is lost
CHUNK = 1 << 16
DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    ".gz": lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),
    ".bz2": bz2.BZ2Decompressor,
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj(),  # of zstd --long=31
}
DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)


# ------------------------------------------------------------------------------------------------ which files
def find_files(paths: str | list[str], key: str) -> list[Path]:
    """The data files that one or several paths name: files, folders (searched to any depth, through links) or globs.

    A folder's files are sorted. If there are .jsonl or .parquet files, they and .txt files are its data; if there are
    none, all its text files are. Hidden and empty files are left out, and no file comes twice.

    Args:
        key: the configuration key of the paths, for messages.

    Raises:
        DataError: there is no data file, or one that is named is empty or cannot be read twice.
    """
    found: dict[Path, Path] = {}
    for pattern in [paths] if isinstance(paths, str) else paths:
        path = Path(pattern).expanduser()
        named = os.path.exists(path)
        matches = [path] if named else sorted(map(Path, glob.glob(str(path), recursive=True)))
        if not matches:
            remedy = f"give a file, folder or glob in {key}, or a list of them"
            raise DataError(f"{key}={pattern} does not exist", remedy)
        files: list[Path] = []
        for match in matches:
            if match.is_dir():
                files += _in_folder(match)
            elif named or _fits(match):
                files.append(match)
        if not files:
            remedy = f"put text, .jsonl or .parquet files there, or name the files in {key}"
            raise DataError(f"{key}={pattern} holds no data files", remedy)
        for file in files:
            found.setdefault(file.resolve(), file)
    for file in found.values():
        if not file.is_file():
            raise DataError(f"{file} is no file that can be read twice", "save it to disk first")
        if file.stat().st_size == 0:
            raise DataError(f"{file} is empty", f"remove it from {key} or fetch it again")
    return list(found.values())


def is_text(file: Path) -> bool:
    """Whether a file is read as text, and not as rows."""
    return _suffix(file) not in ROWS


def _suffix(file: Path) -> str:
    """The ending of a file's name without that of its compression, in lower case."""
    name = Path(file.name.lower())
    return Path(name.stem).suffix if name.suffix in DECOMPRESSORS else name.suffix


def _in_folder(folder: Path) -> list[Path]:
    """The data files of a folder, sorted."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read ({error.strerror})", "make it readable, or name other files")

    files: list[Path] = []
    read: set[Path] = set()
    for place, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        if (real := Path(place).resolve()) in read:  # a link leads to a folder above, or a second one to the same
            folders.clear()
            continue
        read.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += filter(_fits, (Path(place, name) for name in names))
    if not all(map(is_text, files)):
        files = [file for file in files if not is_text(file) or _suffix(file) == ".txt"]
    return sorted(files)


def _fits(file: Path) -> bool:
    """Whether a file of a folder or glob is data."""
    if file.name.startswith(".") or not file.is_file() or not file.stat().st_size or _suffix(file) == ".json":
        return False
    return not is_text(file) or _suffix(file) == ".txt" or _begins_as_text(file)


def _begins_as_text(file: Path) -> bool:
    """Whether a file begins as UTF-8 without a zero byte."""
    try:
        start = next(filter(None, read_pieces(file)), b"")[: 1 << 12]
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except (UnicodeDecodeError, *DAMAGE):
        return False
    return b"\0" not in start


# ------------------------------------------------------------------------------------------- their documents
def read_documents(files: list[Path], text_field: str, separator: str | None = None) -> Iterator[str]:
    """The documents of all files, in order.

    Args:
        separator: ends a document of a text file: `BLANK_LINE`, or a string, which is then no part of the document.
            None: a text file is one document.

    Raises:
        DataError: a file is corrupt, not UTF-8, not of its format, or lacks `text_field`. The error names the line or
            row.
    """
    for file in files:
        yield from _read_text(file, separator) if is_text(file) else ROWS[_suffix(file)](file, text_field)


def cut_place(text: str, near: int, window: int) -> int:
    """Where to cut a text, at most `window` characters before `near`: behind a line, else behind a word, else there."""
    places = (text.rfind(mark, near - window, near) + 1 for mark in ("\n", " "))
    return next((place for place in places if place), near)


def _read_text(path: Path, separator: str | None) -> Iterator[str]:
    held, after_blank = "", False
    for _, line in _read_lines(path):
        whole: list[str] = []
        if separator == BLANK_LINE:
            if after_blank and line.strip() and held.strip():
                whole, held = [held], ""
            after_blank = not line.strip()
        held += line
        if separator not in (None, BLANK_LINE) and held.find(separator, -len(line) - len(separator)) >= 0:
            *whole, held = held.split(separator)
        *more, held = _pieces(held)
        pieces = [*(piece for document in whole for piece in _pieces(document)), *more]
        yield from (piece for piece in pieces if piece.strip())
    if held.strip():
        yield held


def _pieces(text: str) -> list[str]:
    """A text, cut where it is longer than `LONGEST`."""
    pieces, start = [], 0
    while len(text) - start > LONGEST:
        end = cut_place(text, start + LONGEST, LONGEST)
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _read_lines_of_json(path: Path, text_field: str) -> Iterator[str]:
    for number, line in _read_lines(path):
        if not line.strip():
            continue
        where, remedy = f"{path}, line {number}", 'each line must be an object like {"text": "…"} (jq -c .[] writes so)'
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON: {first_line(error)}", remedy) from None
        if not isinstance(record, dict):
            raise DataError(f"{where}: not a JSON object", remedy)
        yield text_of(record, text_field, where)


def _read_parquet(path: Path, text_field: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names, row = file.schema_arrow.names, 0
            for batch in file.iter_batches(columns=[text_field] if text_field in names else names):
                for record in batch.to_pylist():
                    row += 1
                    yield text_of(record, text_field, f"{path}, row {row}")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not an intact parquet file: {error}", "unpack it or fetch it again") from None


ROWS = {".parquet": _read_parquet, **dict.fromkeys((".jsonl", ".ndjson", ".json"), _read_lines_of_json)}


def text_of(record: dict[str, Any], text_field: str, where: str) -> str:
    """The text of a row.

    Raises:
        DataError: it has no field `text_field`, or that is no string that UTF-8 can encode.
    """
    if text_field not in record:
        raise DataError(f"{where} has no field {text_field!r}", f"set data.text_field to one of: {', '.join(record)}")
    if not isinstance(text := record[text_field], str):
        remedy = "correct it, or name another data.text_field"
        raise DataError(f"{where}: {text_field} is of type {type(text).__name__}, not text", remedy)
    try:
        text.encode()
    except UnicodeEncodeError:
        cause = f"{where}: {text_field} has half of a surrogate pair, which is not Unicode text"
        raise DataError(cause, "correct or remove it") from None
    return text


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers, from 1, and their line ends."""
    number = 0
    try:
        for number, line in enumerate(_lines(read_pieces(path)), start=1):
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        remedy = f"convert it to UTF-8; the name of a compressed file ends with {', '.join(DECOMPRESSORS)}"
        raise DataError(f"{path}, line {number}: not UTF-8: {error}", remedy) from None
    except DAMAGE as error:
        cause = f"{path} is corrupt or cut short after line {number}: {first_line(error)}"
        raise DataError(cause, "fetch the file again, or give it the ending of what it holds") from None


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    held: list[bytes] = []  # the beginning of a line
    for piece in pieces:
        *whole, last = piece.split(b"\n")
        for line in whole:
            yield b"".join([*held, line, b"\n"])
            held = []
        held.append(last)
    if rest := b"".join(held):
        yield rest


def read_pieces(path: Path) -> Iterator[bytes]:
    """A file's content, decompressed if its name says that it is compressed: all streams, one after another.

    The libraries' own readers pass over a damaged stream after the first.

    Raises:
        one of `DAMAGE`: the file cannot be read, is damaged or has no end.
    """
    new = DECOMPRESSORS.get(path.suffix.lower())
    with open(path, "rb") as raw:
        data = raw.read(CHUNK)
        while data:
            if new is None:
                yield data
                data = raw.read(CHUNK)
                continue
            stream = new()
            while not stream.eof:
                if not (data := data or raw.read(CHUNK)):
                    raise EOFError("a stream has no end")
                yield stream.decompress(data)
                data = b""
            data = stream.unused_data.lstrip(b"\0")  # streams may be padded with zeros
            while not data and (chunk := raw.read(CHUNK)):
                data = chunk.lstrip(b"\0")
