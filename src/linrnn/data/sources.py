"""Where text comes from: local files, Python's standard library, or a data set of the Hugging Face hub.

A source yields documents, always in the same order. Its `identity` changes when its text does.
"""

import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from linrnn.config.schema import HubDataConfig, StdlibDataConfig, TextDataConfig, TokenizedDataConfig
from linrnn.core.checksums import sha256
from linrnn.core.errors import ConfigError, DataError, LinrnnError, first_line
from linrnn.data.readers import DECOMPRESSORS, Document, cut_place, find_files, is_text, read_documents, text_of
from linrnn.data.shards import write_json

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}


class Source:
    """Text in documents.

    Attributes:
        description: a few words for humans.
        identity: JSON-able; equal for equal text, wherever its files lie.
        has_validation: whether the source has its own validation documents.
        remote: whether reading may fail for a passing reason, so that a second attempt makes sense.
        remarks: lines for the user, about what is not read.
        text_bytes: about how many bytes all documents are as plain text; 0 if only reading would tell.
    """

    description: str
    identity: dict[str, Any]
    has_validation = False
    remote = False
    remarks: Sequence[str] = ()
    text_bytes = 0

    def documents(self, split: str) -> Iterator[Document]:
        """The documents of "train", or of "valid" if the source has its own."""
        raise NotImplementedError


def make_source(config: TokenizedDataConfig, key: str = "data.path") -> Source:
    """The source that a configuration names. `key` has its path, for messages."""
    if isinstance(config, StdlibDataConfig):
        return StdlibSource()
    if isinstance(config, TextDataConfig):
        return TextSource(config, key)
    assert isinstance(config, HubDataConfig), config
    return HubSource(config)


class TextSource(Source):
    """`data=text`: local files.

    Without `valid_path`, documents that are many and stand alone (rows, or whole files) leave it to the tokenisation to
    hold out every k-th. Else the end of the text is held out here: `valid_fraction` of its characters.
    """

    def __init__(self, config: TextDataConfig, key: str = "data.path") -> None:
        self._text_field, self._separator = config.text_field, config.document_separator
        remarks: list[str] = []
        self.remarks = remarks
        self._files = {"train": find_files(config.path, key, remarks.append)}
        if config.valid_path is not None:
            self._files["valid"] = find_files(config.valid_path, "data.valid_path", remarks.append)
        files = [file for of_split in self._files.values() for file in of_split]
        hashes = dict(zip(files, file_hashes(files, config.cache_dir), strict=True))
        self.identity = {"source": "text", "text_field": config.text_field}
        self.identity |= {split: [hashes[file] for file in of_split] for split, of_split in self._files.items()}
        if any(map(is_text, files)):
            self.identity["document_separator"] = self._separator
        elif self._separator is not None:
            cause = (
                f"data.document_separator={self._separator!r} is given, and {config.path} holds rows, each a document"
            )
            raise ConfigError(cause, "leave data.document_separator out")
        self._held_out = 0.0
        if config.valid_path is None and config.valid_fraction and not self._stand_alone(1 / config.valid_fraction):
            self._held_out = self.identity["end_held_out"] = config.valid_fraction
        self.has_validation = config.valid_path is not None or self._held_out > 0
        if all(is_text(file) and file.suffix.lower() not in DECOMPRESSORS for file in files):
            self.text_bytes = sum(file.stat().st_size for file in files)
        paths = [config.path] if isinstance(config.path, str) else config.path
        self.description = f"{', '.join(paths)} ({_files(len(self._files['train']))})"

    def documents(self, split: str) -> Iterator[Document]:
        if not self._held_out:
            yield from self._read(split)
            return
        for part, document in self._parted():
            if part == split:
                yield document
            elif split == "train":
                return

    def _parted(self) -> Iterator[tuple[str, Document]]:
        """The documents with their splits. The one in which the held-out end begins is cut there, if far within."""
        total = sum(len(document.text) for document in self._read("train"))
        wanted = max(1, round(total * self._held_out))
        left = total - wanted  # characters of training text
        for document in self._read("train"):
            if len(document.text) <= left:
                left -= len(document.text)
                yield "train", document
                continue
            cut = cut_place(document.text, left, wanted // 2) if left > wanted // 2 else 0
            if cut:
                yield "train", Document(document.text[:cut], document.fraction)
            yield "valid", Document(document.text[cut:], document.fraction)
            left = -1

    def _read(self, split: str) -> Iterator[Document]:
        return read_documents(self._files[split], self._text_field, self._separator)

    def _stand_alone(self, count: float) -> bool:
        """Whether the training text has at least `count` (rounded) documents that are whole files or rows."""
        if any(map(is_text, self._files["train"])):
            return self._separator is None and len(self._files["train"]) >= round(count)
        return sum(1 for _ in islice((d for d in self._read("train") if d.text), round(count))) == round(count)


class StdlibSource(Source):
    """`data=stdlib`: the .py files of the running interpreter's library, without its tests. Each file is one
    document."""

    def __init__(self) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        self._texts: dict[str, str] = {}
        for file in sorted(root.rglob("*.py")):
            if NOT_LIBRARY.isdisjoint((name := file.relative_to(root)).parts):
                with suppress(UnicodeDecodeError):  # a handful of old modules declare another encoding
                    self._texts[name.as_posix()] = file.read_bytes().decode("utf-8")
        if not self._texts:
            raise DataError(f"{root} holds no Python sources", "use data=markov or data=text")
        self.text_bytes = sum(map(len, self._texts.values()))
        digest = hashlib.sha256(json.dumps(self._texts).encode()).hexdigest()
        self.identity = {"source": "stdlib", "files": len(self._texts), "sha256": digest}
        version = ".".join(map(str, sys.version_info[:3]))
        self.description = f"Python {version}'s library ({_files(len(self._texts))})"

    def documents(self, split: str) -> Iterator[Document]:
        for done, text in enumerate(self._texts.values(), start=1):
            yield Document(text, done / len(self._texts))


class HubSource(Source):
    """`data=wikitext103` and `data=fineweb_edu`: a hub data set, or a local directory of the same layout."""

    remote = True

    def __init__(self, config: HubDataConfig) -> None:
        self._config = config
        self._splits = {"train": config.train_split}
        if config.valid_split is not None:
            self._splits["valid"] = config.valid_split
        self.has_validation = config.valid_split is not None
        try:
            self._starts = None if config.document_start is None else re.compile(config.document_start)
        except re.error as error:
            cause = f"data.document_start={config.document_start!r} is not a regular expression: {error}"
            raise ConfigError(cause, "correct it, or use null to make each row a document") from None
        self.identity = {
            "source": "hub",
            "path": config.path,
            "subset": config.subset,
            "splits": self._splits,
            "text_field": config.text_field,
            "document_start": config.document_start,
            "empty_row": config.empty_row,
        }
        self._local = Path(config.path).expanduser()
        if self._local.is_dir():
            files = [file for file in sorted(self._local.rglob("*")) if file.is_file()]
            names = [file.relative_to(self._local).as_posix() for file in files]
            hashes = file_hashes(files, config.cache_dir)
            self.identity |= {"path": None, "files": [list(pair) for pair in zip(names, hashes, strict=True)]}
        subset = "" if config.subset is None else f", {config.subset}"
        self.description = f"{config.path}{subset}, {config.train_split}"

    def documents(self, split: str) -> Iterator[Document]:
        """Rows as documents. With `document_start`, a document joins the rows from one match to the next.

        Rows before the first match belong to the first document.
        """
        rows: list[str] = []
        matched, fraction = False, None
        for text, fraction in self._rows(self._splits[split]):
            if self._starts is None:
                yield Document(text, fraction)
                continue
            if self._starts.search(text):
                if matched:
                    yield Document("".join(rows), fraction)
                    rows = []
                matched = True
            rows.append(text)
        if rows:
            yield Document("".join(rows), fraction)

    def _rows(self, split: str) -> Iterator[Document]:
        config, dataset = self._config, self._load(split)
        n_rows = len(dataset) if hasattr(dataset, "__len__") else None  # unknown when streaming
        where = f"{config.path}, split {split}"
        try:
            for number, row in enumerate(dataset, start=1):
                text = text_of(row, config.text_field, f"{where}, row {number}")
                yield Document(text or config.empty_row, None if n_rows is None else number / n_rows)
        except LinrnnError:
            raise
        except Exception as error:  # datasets, hub and network errors share no base class
            remedy = "run the same command again: preparation continues"
            raise DataError(f"reading {where} failed: {first_line(error)}", remedy) from error

    def _load(self, split: str) -> Any:
        import datasets

        config, local = self._config, self._local.is_dir()
        try:
            # Streaming reads a local directory in place. Otherwise `datasets` would copy it to its own cache.
            path, streaming = (str(self._local), True) if local else (config.path, config.streaming)
            splits = datasets.load_dataset(path, config.subset, streaming=streaming)
        except Exception as error:  # datasets, hub and network errors share no base class
            raise DataError(
                f"cannot load {config.path} ({config.subset}): {first_line(error)}",
                "check data.path, data.subset and the connection, or give a local directory in data.path",
            ) from error
        if split not in splits:
            raise DataError(
                f"{config.path} ({config.subset}) has no split {split!r}, only: {', '.join(splits)}",
                "set data.train_split and data.valid_split, or give a copy that has it in data.path",
            )
        return splits[split]


def file_hashes(files: Sequence[Path], cache_dir: str) -> list[str]:
    """sha256 of files. They are remembered in the cache directory by absolute path, size and modification time.

    If the cache directory cannot be written they are computed again the next time.
    """
    record = Path(cache_dir).expanduser() / "file_hashes.json"
    known: dict[str, str] = {}
    with suppress(OSError, ValueError, TypeError, RecursionError):
        known = dict(json.loads(record.read_text(encoding="utf-8")))
    stats = [(file, file.stat()) for file in files]
    keys = [f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}" for file, stat in stats]
    if new := {key: sha256(file) for file, key in zip(files, keys, strict=True) if key not in known}:
        known |= new
        with suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            write_json(record, known)
    return [known[key] for key in keys]


def _files(n: int) -> str:
    return f"{n:,} file{'' if n == 1 else 's'}"
