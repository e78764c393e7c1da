"""Where text comes from: local files, Python's standard library, or a data set of the Hugging Face hub."""

import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from linrnn.config.schema import HubDataConfig, TextDataConfig, TokenizedDataConfig
from linrnn.core.checksums import sha256_of_all
from linrnn.core.errors import ConfigError, DataError, LinrnnError, first_line
from linrnn.data.readers import cut_place, find_files, is_text, read_documents, text_of

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """Text in documents.

    Attributes:
        description: a few words for humans.
        identity: JSON-able; equal for equal text, wherever its files lie.
        read: from a split's name, "train" or "valid", to its documents, always in the same order.
        period: every period-th document with text is held out of "train"; None if there is a split "valid".
    """

    description: str
    identity: dict[str, Any]
    read: Callable[[str], Iterator[str]]
    period: int | None

    def documents(self) -> Iterator[tuple[str, str]]:
        """Every document with the split that it belongs to. All of a validation split come first."""
        if self.period is None:
            yield from (("valid", text) for text in self.read("valid"))
        yield from self.training()

    def training(self) -> Iterator[tuple[str, str]]:
        """The documents that are read for training, some of them held out."""
        number = 0
        for text in self.read("train"):
            held_out = self.period and text and number % self.period == 0
            yield "valid" if held_out else "train", text
            number += bool(text)


def make_source(config: TokenizedDataConfig, key: str = "data.path") -> Source:
    """The source that a configuration names. `key` has its path, for messages.

    Raises:
        ConfigError: there is no validation text, and nothing is held out.
        DataError: there is no text.
    """
    if isinstance(config, TextDataConfig):
        return _text(config, key)
    return _hub(config) if isinstance(config, HubDataConfig) else _stdlib(config)


def _period(config: TokenizedDataConfig, has_validation: bool) -> int | None:
    """Every how many documents one is held out; None if the source has a validation split."""
    if has_validation:
        return None
    if config.valid_fraction == 0:
        cause = f"data={config.name} has no validation text of its own and data.valid_fraction is 0"
        raise ConfigError(cause, "set data.valid_fraction (0.01, say), or name validation data")
    return round(1 / config.valid_fraction)


def _text(config: TextDataConfig, key: str) -> Source:
    """`data=text`: local files.

    Without `valid_path`, documents that are many and stand alone (rows, or whole files) leave it to the tokenisation to
    hold out every k-th. Else the end of the text is held out here: `valid_fraction` of its characters.
    """
    separator = config.document_separator
    files = {"train": find_files(config.path, key)}
    if config.valid_path is not None:
        files["valid"] = find_files(config.valid_path, "data.valid_path")
    identity: dict[str, Any] = {"source": "text", "text_field": config.text_field}
    identity |= {split: sha256_of_all(of_split) for split, of_split in files.items()}
    if any(is_text(file) for of_split in files.values() for file in of_split):
        identity["document_separator"] = separator
    elif separator is not None:
        cause = f"data.document_separator={separator!r} is given, and {config.path} holds rows, each a document"
        raise ConfigError(cause, "leave data.document_separator out")

    def read(split: str) -> Iterator[str]:
        return read_documents(files[split], config.text_field, separator)

    def stand_alone(count: int) -> bool:
        """Whether the training text has at least `count` documents that are whole files or rows."""
        if any(map(is_text, files["train"])):
            return separator is None and len(files["train"]) >= count
        return sum(1 for _ in islice(filter(None, read("train")), count)) == count

    paths = [config.path] if isinstance(config.path, str) else config.path
    description = f"{', '.join(paths)} ({_files(len(files['train']))})"
    share = config.valid_fraction
    if config.valid_path is None and share and not stand_alone(round(1 / share)):
        identity["end_held_out"] = share
        return Source(description, identity, lambda split: _parted(read, share, split), None)
    return Source(description, identity, read, _period(config, config.valid_path is not None))


def _parted(read: Callable[[str], Iterator[str]], share: float, split: str) -> Iterator[str]:
    """The documents of a split: the held-out end, or what is before it.

    The document in which that end begins is cut there, if this is far within.
    """
    total = sum(map(len, read("train")))
    wanted = max(1, round(total * share))
    left = total - wanted  # characters of training text
    for text in read("train"):
        whole = len(text) <= left
        cut = len(text) if whole else cut_place(text, left, wanted // 2) if left > wanted // 2 else 0
        left = left - cut if whole else -1
        if part := text[:cut] if split == "train" else text[cut:]:
            yield part


def _stdlib(config: TokenizedDataConfig) -> Source:
    """`data=stdlib`: the .py files of the running interpreter's library, without its tests, a document each."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, str] = {}
    for file in sorted(root.rglob("*.py")):
        if NOT_LIBRARY.isdisjoint((name := file.relative_to(root)).parts):
            with suppress(UnicodeDecodeError):  # a handful of old modules declare another encoding
                texts[name.as_posix()] = file.read_bytes().decode("utf-8")
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    version = ".".join(map(str, sys.version_info[:3]))
    identity = {"source": "stdlib", "files": len(texts), "sha256": digest}
    description = f"Python {version}'s library ({_files(len(texts))})"
    return Source(description, identity, lambda split: iter(texts.values()), _period(config, False))


def _hub(config: HubDataConfig) -> Source:
    """`data=wikitext103` and `data=fineweb_edu`: a hub data set, or a local directory of the same layout.

    Rows are documents. With `document_start`, a document joins the rows from one match to the next; rows before the
    first match belong to the first document.
    """
    splits = {"train": config.train_split}
    if config.valid_split is not None:
        splits["valid"] = config.valid_split
    try:
        starts = None if config.document_start is None else re.compile(config.document_start)
    except re.error as error:
        cause = f"data.document_start={config.document_start!r} is not a regular expression: {error}"
        raise ConfigError(cause, "correct it, or use null to make each row a document") from None
    identity: dict[str, Any] = {"source": "hub", "path": config.path, "subset": config.subset, "splits": splits}
    identity |= {key: getattr(config, key) for key in ("text_field", "document_start", "empty_row")}
    local = Path(config.path).expanduser()
    if local.is_dir():
        files = [file for file in sorted(local.rglob("*")) if file.is_file()]
        pairs = zip(files, sha256_of_all(files), strict=True)
        identity |= {"path": None, "files": [[file.relative_to(local).as_posix(), found] for file, found in pairs]}

    def documents(split: str) -> Iterator[str]:
        rows: list[str] = []
        matched = False
        for text in _rows(config, splits[split]):
            if starts is None:
                yield text
                continue
            if starts.search(text):
                if matched:
                    yield "".join(rows)
                    rows = []
                matched = True
            rows.append(text)
        if rows:
            yield "".join(rows)

    subset = "" if config.subset is None else f", {config.subset}"
    description = f"{config.path}{subset}, {config.train_split}"
    return Source(description, identity, documents, _period(config, config.valid_split is not None))


def _rows(config: HubDataConfig, split: str) -> Iterator[str]:
    import datasets

    where, local = f"{config.path}, split {split}", Path(config.path).expanduser()
    try:
        # Streaming reads a local directory in place. Otherwise `datasets` would copy it to its own cache.
        path, streaming = (str(local), True) if local.is_dir() else (config.path, config.streaming)
        splits = datasets.load_dataset(path, config.subset, streaming=streaming)
        if split not in splits:
            raise DataError(
                f"{config.path} ({config.subset}) has no split {split!r}, only: {', '.join(splits)}",
                "set data.train_split and data.valid_split, or give a copy that has it in data.path",
            )
        for number, row in enumerate(splits[split], start=1):
            yield text_of(row, config.text_field, f"{where}, row {number}") or config.empty_row
    except LinrnnError:
        raise
    except Exception as error:  # datasets, hub and network errors share no base class
        raise DataError(
            f"{where} ({config.subset}) cannot be read: {first_line(error)}",
            "check data.path, data.subset and the connection, and run the same command again, or give a local "
            "directory in data.path",
        ) from error


def _files(n: int) -> str:
    return f"{n:,} file{'' if n == 1 else 's'}"
