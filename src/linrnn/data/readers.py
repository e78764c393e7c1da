"""Find local files, and read them as documents.

Where a document ends:

    .jsonl    each line is one JSON object; its `text_field` is the document. Also .ndjson and .json.
    .parquet  each row is one document: its column `text_field`.
    text      any other file: .txt, .md, .py and so on. The file is one document, or `separator` ends one.

All but .parquet may be compressed (.xz, .gz, .bz2, .zst). Case does not matter in a file's ending. Text must be UTF-8.
Text files give no document without any text. One of more than `LONGEST` characters is cut at a line end.
"""

import codecs
import glob
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from linrnn.core.errors import DataError, first_line
from linrnn.data.compression import DAMAGE, FORMATS, open_file, other_format, remedy_for

LONGEST = 4 << 20  # characters of a document; tokenising takes about 130 bytes of memory for each
BLANK_LINE = "blank_line"  # a separator: blank lines end a document, and belong to it, so no byte of the file is lost
LINES = (".jsonl", ".ndjson", ".json")


class Document(NamedTuple):
    """One document, and the share of the source that has been read with it (0 to 1, None if unknown)."""

    text: str
    fraction: float | None


def find_files(paths: str | list[str], key: str, say: Callable[[str], None] = lambda line: None) -> list[Path]:
    """The data files that one or several paths name: files, folders (searched to any depth, through links) or globs.

    A folder's files are sorted. If there are .jsonl or .parquet files, they and .txt files are its data; if there are
    none, all its text files are. Hidden, empty and other files of folders and globs are left out, and no file comes
    twice.

    Args:
        key: the configuration key of the paths, for messages.
        say: told in one line what was left out, if anything was.

    Raises:
        DataError: there is no data file, or one that is named is empty or of unknown type.
    """
    left_out: Counter[str] = Counter()
    found: list[Path] = []
    several = [paths] if isinstance(paths, str) else paths
    for pattern in several:
        path = Path(pattern).expanduser()
        matches = [path] if os.path.exists(path) else _matching(path)
        if not matches:
            raise DataError(
                f"{key}={pattern} does not exist", f"give a file, folder or glob in {key}, or a list of them"
            )
        before = len(found)
        for match in matches:
            if match.is_dir():
                found += _in_folder(match, left_out)
            elif path is match or not (why := _unfit(match)):
                found.append(match)
            else:
                left_out[why] += 1
        if len(found) == before:
            raise DataError(
                f"{key}={pattern} holds no data files" + (f" ({_counted(+left_out)} left out)" if +left_out else ""),
                f"put text, .jsonl or .parquet files there, or name the files in {key}",
            )
    once = {file.resolve(): file for file in reversed(found)}
    files = [file for file in found if once[file.resolve()] is file]
    left_out["named twice"] += len(found) - len(files)
    for file in files:
        if not file.is_file():
            raise DataError(f"{file} is no file that can be read twice", "save it to disk first")
        if _kind(file) is None:
            raise DataError(f"{file} is of unknown type", "decompress it: only .parquet files as such are read")
        if file.stat().st_size == 0:
            raise DataError(f"{file} is empty", f"remove it from {key} or fetch it again")
    if +left_out:
        say(f"left out of {', '.join(several)}: {_counted(+left_out)}")
    return files


def _matching(pattern: Path) -> list[Path]:
    """The files and folders that a glob matches, sorted. `**` passes through links, and into each folder once."""
    if "**" not in pattern.parts:
        return sorted(map(Path, glob.glob(str(pattern))))
    at = pattern.parts.index("**")
    roots = [root for root in _matching(Path(*pattern.parts[:at])) if root.is_dir()]
    folders = [place for root in roots for place, _ in _walk(root, Counter())]
    return sorted({m for f in folders for m in _matching(Path(glob.escape(str(f)), *pattern.parts[at + 1 :]))})


def _walk(folder: Path, left_out: Counter[str]) -> Iterator[tuple[Path, list[str]]]:
    """A folder and those below it, also through links, each once, with the names of its files."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read ({error.strerror})", "make it readable, or name other files")

    read: set[tuple[int, int]] = set()
    for place, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        state = os.stat(place)
        if (state.st_dev, state.st_ino) in read:  # a link leads to a folder above, or a second one to the same
            left_out["linked folders that are read already"] += 1
            folders.clear()
            continue
        read.add((state.st_dev, state.st_ino))
        left_out["hidden folders"] += sum(name.startswith(".") for name in folders)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(place), names


def _in_folder(folder: Path, left_out: Counter[str]) -> list[Path]:
    """The data files of a folder, sorted; what is left out is counted in `left_out`."""
    files: list[Path] = []
    for place, names in _walk(folder, left_out):
        for name in names:
            if why := _unfit(place / name):
                left_out[why] += 1
            else:
                files.append(place / name)
    rows = any(_kind(file) != "text" for file in files)
    kept = [file for file in files if not rows or _kind(file) != "text" or _plain_suffix(file) == ".txt"]
    left_out.update(_ending(file) for file in set(files) - set(kept))
    return sorted(kept)


def _unfit(file: Path) -> str | None:
    """Why a file of a folder or glob is left out, as a noun in plural; None if it is data."""
    if file.name.startswith("."):
        return "hidden"
    if not file.is_file():
        return "broken links" if file.is_symlink() else "special files"
    if file.stat().st_size == 0:
        return "empty"
    fits = _kind(file) is not None and _plain_suffix(file) != ".json"
    return (
        None if fits and (_kind(file) != "text" or _plain_suffix(file) == ".txt" or _is_text(file)) else _ending(file)
    )


def _is_text(file: Path) -> bool:
    """Whether a file begins as UTF-8 without a zero byte."""
    try:
        with open_file(file) as (content, _):
            start = content.read(1 << 12)
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except (UnicodeDecodeError, DataError, *DAMAGE):
        return False
    return b"\0" not in start


def _counted(left_out: Counter[str]) -> str:
    """Such as `3 .png, 1 hidden`; beyond six kinds, the rest in one number."""
    kinds = [f"{n:,} {what}" for what, n in left_out.most_common(6)]
    rest = left_out.total() - sum(n for _, n in left_out.most_common(6))
    return ", ".join(kinds) + (f", {rest:,} of other kinds" if rest else "")


def read_documents(files: list[Path], text_field: str, separator: str | None = None) -> Iterator[Document]:
    """The documents of all files, in order.

    Args:
        separator: ends a document of a text file: `BLANK_LINE`, or a string, which is then no part of the document.
            None: a text file is one document.

    Raises:
        DataError: a file is corrupt, not UTF-8, not of its format, or lacks `text_field`. The error names the line or
            row.
    """
    sizes = [file.stat().st_size for file in files]
    total, done = sum(sizes), 0
    for file, size in zip(files, sizes, strict=True):
        kind = _kind(file)
        if kind == "text":
            documents = _read_text(file, separator)
        else:
            documents = (_read_parquet if kind == "parquet" else _read_lines_of_json)(file, text_field)
        for text, position in documents:
            yield Document(text, (done + position) / total)
        done += size


def is_text(file: Path) -> bool:
    """Whether a file is read as text, and not as rows."""
    return _kind(file) == "text"


def _plain_suffix(file: Path) -> str:
    """The ending of a file's name without that of its compression, in lower case."""
    name = file.name.lower()
    return Path(name.removesuffix(Path(name).suffix) if Path(name).suffix in FORMATS else name).suffix


def _ending(file: Path) -> str:
    return "".join(file.suffixes[-2:] if file.suffix.lower() in FORMATS else file.suffixes[-1:]) or "without ending"


def _kind(file: Path) -> str | None:
    """How a file is read: as lines of JSON, parquet or text; None: a compressed .parquet file cannot be."""
    suffix = _plain_suffix(file)
    if suffix == ".parquet":
        return None if file.suffix.lower() in FORMATS else "parquet"
    return "lines" if suffix in LINES else "text"


def cut_place(text: str, near: int, window: int) -> int:
    """Where to cut a text, at most `window` characters before `near`: behind a line, else behind a word, else there."""
    places = (text.rfind(mark, near - window, near) + 1 for mark in ("\n", " "))
    return next((place for place in places if place), near)


# Each reader yields a document's text and the bytes of the file read so far.
def _read_text(path: Path, separator: str | None) -> Iterator[tuple[str, int]]:
    held, position, after_blank = "", 0, False
    for _, line, position in _read_lines(path):
        whole: list[str] = []
        if separator == BLANK_LINE:
            blank = not line.strip()
            if after_blank and not blank and held.strip():
                whole, held = [held], ""
            after_blank = blank
        unseen = max(0, len(held) - len(separator or "") + 1)
        held += line
        if separator not in (None, BLANK_LINE) and held.find(separator, unseen) >= 0:
            *whole, held = held.split(separator)
        *more, held = _pieces(held)
        yield from ((text, position) for document in whole for text in _pieces(document) if text.strip())
        yield from ((text, position) for text in more if text.strip())
    if held.strip():
        yield held, position


def _pieces(text: str) -> list[str]:
    """A text, cut where it is longer than `LONGEST`."""
    pieces, start = [], 0
    while len(text) - start > LONGEST:
        end = cut_place(text, start + LONGEST, LONGEST)
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _read_lines_of_json(path: Path, text_field: str) -> Iterator[tuple[str, int]]:
    for number, line, position in _read_lines(path):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line, parse_int=float)  # Python's int refuses one of 4,301 digits
        except ValueError as error:
            remedy = (
                "write each object in one line, as jq -c .[] does"
                if line.strip() in "[{"
                else "correct or remove that line"
            )
            raise DataError(f"{where}: not JSON: {error}", remedy) from None
        except RecursionError:
            raise DataError(f"{where}: JSON nested too deeply", "correct or remove that line") from None
        if not isinstance(record, dict):
            raise DataError(f"{where}: not a JSON object", 'each line must be like {"text": "…"} (jq -c .[] writes so)')
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


_TYPES = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


def checked_text(text: Any, where: str, text_field: str) -> str:
    """`text`, after a check that it is a string that UTF-8 can encode."""
    if not isinstance(text, str):
        raise DataError(
            f"{where}: {text_field} is {_TYPES.get(type(text), type(text).__name__)}, not text",
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
    try:
        with open_file(path) as (content, raw):
            for line in content:
                number += 1
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield number, text, raw.tell()
    except UnicodeDecodeError as error:
        if held := other_format(path) if path.suffix.lower() not in FORMATS else None:
            raise DataError(f"{path} holds {held}, not text", remedy_for(held)) from None
        raise DataError(f"{path}, line {number}: not UTF-8: {error}", "convert the file to UTF-8") from None
    except DAMAGE as error:
        raise DataError(
            f"{path} is corrupt or cut short after line {number}: {first_line(error)}", "fetch the file again"
        ) from None
