"""Tokens on disk: written once, then memory-mapped.

A prepared data set is a directory:

    train-00000.bin        token ids: little-endian uint16 (vocabulary up to 65,536) or uint32
    train-00000.ends.npy   int64: the end of each document (exclusive)
    valid-00000.bin …      the same for the validation split
    tokenizer.json         the tokenizer (absent for generated data)
    meta.json              vocabulary, tokenizer hash, sources, options, and size and sha256 of every file

Documents are packed one after another.
"""

import hashlib
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from linrnn.core.checksums import sha256, sha256_of_all
from linrnn.core.errors import DataError
from linrnn.core.files import read_object, write_text

FORMAT_VERSION = 1
META = "meta.json"
SPLITS = ("train", "valid")


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest supported type that holds every id of the vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class SplitWriter:
    """Writes the documents of one split.

    Attributes:
        tokens: written so far.
    """

    def __init__(self, directory: Path, split: str, dtype: np.dtype) -> None:
        self._path, self._dtype = directory / f"{split}-00000.bin", dtype
        self._ids = open(self._path, "wb")  # noqa: SIM115  finish() closes it
        self._ends = array("q")
        self.tokens = self._bytes = 0

    def append(self, ids: np.ndarray, ends: np.ndarray, n_bytes: int) -> None:
        """Append whole documents.

        Args:
            ids: the documents' tokens, concatenated.
            ends: (documents,) end of each document in `ids`, exclusive; the last is len(ids).
            n_bytes: UTF-8 bytes of the documents' text.
        """
        self._ids.write(ids.astype(self._dtype, copy=False).tobytes())
        self._ends.extend((ends + self.tokens).tolist())
        self.tokens += len(ids)
        self._bytes += n_bytes

    def finish(self) -> list[dict[str, Any]]:
        """Flush both files. Returns the split's list of entries for meta.json: a single one."""
        ends, of_documents = _ends_of(self._path), np.array(self._ends, "<i8")
        with self._ids, open(ends, "wb") as file:
            np.save(file, of_documents)
            for written in (self._ids, file):
                written.flush()
                os.fsync(written.fileno())
        counts = {"tokens": self.tokens, "documents": len(of_documents), "bytes": self._bytes}
        of_ids = {"size": self._path.stat().st_size, "sha256": sha256(self._path)}
        of_ends = {"ends_size": ends.stat().st_size, "ends_sha256": sha256(ends)}
        return [{"file": self._path.name, **counts, **of_ids, **of_ends}]


def _ends_of(path: Path) -> Path:
    """The file of the documents' ends beside a file of token ids."""
    return path.with_suffix(".ends.npy")


@dataclass(frozen=True)
class Part:
    """The tokens of one source, [start, start + n_tokens) of a split.

    Attributes:
        path: the file of its token ids.
        entry: its entry in meta.json.
        weight: how often it is drawn from, in relation to the other sources.
    """

    path: Path
    entry: dict[str, Any]
    name: str = "the training text"
    weight: float = 1.0
    start: int = 0

    @property
    def n_tokens(self) -> int:
        return self.entry["tokens"]


class ShardSet:
    """All tokens of one split, memory-mapped; of a mixture, of one source after another.

    Attributes:
        fingerprint: hex; identifies the whole prepared data set and this split of it.
        dtype: type of the token ids on disk.
        parts: the sources.
        n_tokens, n_documents: of all sources.
        n_bytes: UTF-8 bytes of the text these tokens stand for (0 for generated tokens).
    """

    def __init__(self, fingerprint: str, dtype: np.dtype, parts: list[Part]) -> None:
        self.fingerprint, self.dtype, self.parts = fingerprint, dtype, parts
        # Plain arrays over the mapping: each slice of an np.memmap costs microseconds of Python.
        self._tokens = [np.asarray(np.memmap(part.path, dtype, "r")) for part in parts]
        self._starts = [part.start for part in parts]
        totals = (sum(part.entry[key] for part in parts) for key in ("tokens", "documents", "bytes"))
        self.n_tokens, self.n_documents, self.n_bytes = totals

    @classmethod
    def open(cls, directory: Path, meta: dict[str, Any], split: str) -> "ShardSet":
        """The split "train" or "valid" of a directory with this content of meta.json.

        Raises:
            DataError: a file is missing, or has not the size that meta.json records.
        """
        entry, *more = meta["splits"][split]
        if more:
            raise _broken(directory / META, f"lists several files of the split {split}, this version writes one")
        path = directory / entry["file"]
        for file, size in ((path, entry["size"]), (_ends_of(path), entry["ends_size"])):
            if not file.is_file():
                raise _broken(file, "is missing")
            if file.stat().st_size != size:
                raise _broken(file, f"has {file.stat().st_size:,} bytes, meta.json says {size:,}")
        return cls(f"{meta['fingerprint']}-{split}", token_dtype(meta["vocab_size"]), [Part(path, entry)])

    @classmethod
    def mixture(cls, names: Sequence[str], sets: Sequence["ShardSet"], weights: Sequence[float]) -> "ShardSet":
        """The same split of several prepared sources, all with tokens of one tokenizer.

        Args:
            names: of the sources, for messages.
            weights: decide how often each is drawn from, in relation to the others.
        """
        starts = np.cumsum([0] + [one.n_tokens for one in sets]).tolist()
        described = zip(names, starts, sets, weights, strict=False)  # the last start is the end
        parts = [replace(one.parts[0], name=n, start=start, weight=weight) for n, start, one, weight in described]
        fingerprint = _fingerprint({"sources": [one.fingerprint for one in sets], "weights": list(weights)})
        return cls(fingerprint, sets[0].dtype, parts)

    @cached_property
    def document_ends(self) -> np.ndarray:
        """(documents,) int64: exclusive end of every document, in tokens from the start of the split."""
        return np.concatenate([np.load(_ends_of(part.path)) + part.start for part in self.parts])

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens [start, stop) of one source, as they lie on the disk."""
        number = bisect_right(self._starts, start) - 1
        return self._tokens[number][start - self._starts[number] : stop - self._starts[number]]

    def verify(self) -> None:
        """Compare every byte with the sha256 in meta.json.

        Raises:
            DataError: a file differs. The error names it.
        """
        recorded = {part.path: part.entry["sha256"] for part in self.parts}
        recorded |= {_ends_of(part.path): part.entry["ends_sha256"] for part in self.parts}
        for (path, written), here in zip(recorded.items(), sha256_of_all(recorded), strict=True):
            if here != written:
                raise _broken(path, "differs from its sha256 in meta.json")


def _broken(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}", _prepare_again(path))


def _prepare_again(path: Path) -> str:
    return f"delete {path.parent} and run the same command: the data is prepared again"


def write_meta(directory: Path, meta: dict[str, Any]) -> None:
    """Write meta.json with a fingerprint: the sha256 of the other entries, which hold the hash of every file."""
    write_text(directory / META, json.dumps({**meta, "fingerprint": _fingerprint(meta)}, indent=1))


def read_meta(directory: Path) -> dict[str, Any]:
    """Read and check meta.json.

    Raises:
        DataError: meta.json cannot be parsed, was altered, or has another format.
    """
    path = directory / META
    meta = read_object(path, ("fingerprint", "format"), _prepare_again(path))
    if meta["format"] != FORMAT_VERSION:
        raise _broken(path, f"has format {meta['format']}, this version reads {FORMAT_VERSION}")
    if meta["fingerprint"] != _fingerprint({key: value for key, value in meta.items() if key != "fingerprint"}):
        raise _broken(path, "was altered after it was written")
    return meta


def _fingerprint(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
