"""Token shards on disk: written once, then memory-mapped.

A prepared data set is a directory:

    train-00000.bin        token ids: little-endian uint16 (vocabulary up to 65,536) or uint32
    train-00000.ends.npy   int64: the end of each document in the shard (exclusive, in tokens from the shard's start)
    valid-00000.bin …      the same for the validation split
    tokenizer.json         the tokenizer (absent for generated data)
    meta.json              vocabulary, tokenizer hash, sources, options, and size and sha256 of every shard

Documents are packed one after another. A document lies in one shard; a block of tokens may span two.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from linrnn.core.checksums import sha256
from linrnn.core.errors import DataError, StorageError
from linrnn.core.files import write_text
from linrnn.data.tokenizer import TokenBytes

FORMAT_VERSION = 1
META = "meta.json"
SPLITS = ("train", "valid")
HASHING_THREADS = 4  # at about 1.4 GB/s each
COUNTED_TOKENS = 1 << 22  # tokens whose bytes are added up at once
SHARD_TOKENS = 1 << 27  # a shard is closed by the document that reaches this many tokens


@dataclass(frozen=True)
class ShardMeta:
    """One shard in meta.json. `bytes` are the UTF-8 bytes of its text; `size` and `ends_size` are sizes of files."""

    file: str
    tokens: int
    documents: int
    bytes: int
    size: int
    sha256: str
    ends_size: int
    ends_sha256: str

    @property
    def ends_file(self) -> str:
        return Path(self.file).with_suffix(".ends.npy").name


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest supported type that holds every id of the vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def sha256_of_all(files: Iterable[Path]) -> list[str]:
    """The sha256 of each file, in hex."""
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return list(pool.map(sha256, files))


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn a failed write under `path` into a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write {error.filename or path}: {error.strerror or error}",
            "free space or set data.cache_dir elsewhere, then run the same command again",
        ) from error


class SplitWriter:
    """Appends documents to the shards of one split.

    Attributes:
        tokens, documents: written so far.
    """

    def __init__(self, directory: Path, split: str, dtype: np.dtype) -> None:
        self._directory, self._split, self._dtype = directory, split, dtype
        self._finished: list[dict[str, Any]] = []
        self._ids: Any = None  # the open shard's file
        self._ends: list[np.ndarray] = []
        self._tokens = self._bytes = self.tokens = self.documents = 0

    def append(self, ids: np.ndarray, ends: np.ndarray, n_bytes: int) -> None:
        """Append whole documents.

        Args:
            ids: the documents' tokens, concatenated.
            ends: (documents,) end of each document in `ids`, exclusive; the last is len(ids).
            n_bytes: UTF-8 bytes of the documents' text.
        """
        self._ids = self._ids or open(self._path(".bin"), "wb")  # noqa: SIM115  finish() closes it
        self._ids.write(ids.astype(self._dtype, copy=False).tobytes())
        self._ends.append(ends + self._tokens)
        self._tokens += len(ids)
        self._bytes += n_bytes
        self.tokens += len(ids)
        self.documents += len(ends)
        if self._tokens >= SHARD_TOKENS:
            self._finish_shard()

    def finish(self) -> list[dict[str, Any]]:
        """Close the last shard. Returns the entries of all shards for meta.json."""
        if self._ids:
            self._finish_shard()
        return self._finished

    def _path(self, suffix: str) -> Path:
        return self._directory / f"{self._split}-{len(self._finished):05d}{suffix}"

    def _finish_shard(self) -> None:
        ids, ends, of_documents = self._path(".bin"), self._path(".ends.npy"), np.concatenate(self._ends).astype("<i8")
        with open(ends, "wb") as file:
            np.save(file, of_documents)
            for written in (self._ids, file):
                written.flush()
                os.fsync(written.fileno())
        self._ids.close()
        counts = {"tokens": self._tokens, "documents": len(of_documents), "bytes": self._bytes}
        of_ids = {"size": ids.stat().st_size, "sha256": sha256(ids)}
        of_ends = {"ends_size": ends.stat().st_size, "ends_sha256": sha256(ends)}
        self._finished.append({"file": ids.name, **counts, **of_ids, **of_ends})
        self._ids, self._ends, self._tokens, self._bytes = None, [], 0, 0


@dataclass(frozen=True)
class Part:
    """A source: its tokens [start, start + n_tokens) of a split, and its weight among the sources."""

    name: str
    start: int
    n_tokens: int
    weight: float


class ShardSet:
    """All tokens of one split as one long, memory-mapped sequence; of a mixture, of one source after another.

    Attributes:
        fingerprint: hex; identifies the whole prepared data set and this split of it.
        dtype: type of the token ids on disk.
        shards: paths and entries of meta.json.
        parts: the sources that batches are drawn from.
    """

    def __init__(
        self, fingerprint: str, dtype: np.dtype, shards: list[tuple[Path, ShardMeta]], parts: list[Part]
    ) -> None:
        self.fingerprint, self.dtype, self.shards, self.parts = fingerprint, dtype, shards, parts
        # Plain arrays over the mapping: each slice of an np.memmap costs microseconds of Python.
        self._tokens = [np.asarray(np.memmap(path, dtype, "r")) for path, _ in shards]
        self._starts = np.cumsum([0] + [shard.tokens for _, shard in shards])

    @classmethod
    def open(cls, directory: Path, meta: dict[str, Any], split: str) -> "ShardSet":
        """The split "train" or "valid" of a directory with this content of meta.json.

        Raises:
            DataError: a shard is missing, or has not the size that meta.json records.
        """
        shards = [(directory / shard["file"], ShardMeta(**shard)) for shard in meta["splits"][split]]
        for path, shard in shards:
            for file, size in ((path, shard.size), (path.with_name(shard.ends_file), shard.ends_size)):
                if not file.is_file():
                    raise _broken(file, "is missing")
                if file.stat().st_size != size:
                    raise _broken(file, f"has {file.stat().st_size:,} bytes, meta.json says {size:,}")
        part = Part("the training text", 0, sum(shard.tokens for _, shard in shards), 1.0)
        return cls(f"{meta['fingerprint']}-{split}", token_dtype(meta["vocab_size"]), shards, [part])

    @classmethod
    def mixture(cls, names: Sequence[str], sets: Sequence["ShardSet"], weights: Sequence[float]) -> "ShardSet":
        """The same split of several prepared sources, all with tokens of one tokenizer.

        Args:
            names: of the sources, for messages.
            weights: decide how often each is drawn from, in relation to the others.
        """
        starts = np.cumsum([0] + [one.n_tokens for one in sets]).tolist()
        described = zip(names, starts, sets, weights, strict=False)  # the last start is the end
        parts = [Part(name, start, one.n_tokens, weight) for name, start, one, weight in described]
        fingerprint = _fingerprint({"sources": [one.fingerprint for one in sets], "weights": list(weights)})
        return cls(fingerprint, sets[0].dtype, [shard for one in sets for shard in one.shards], parts)

    @property
    def n_tokens(self) -> int:
        return int(self._starts[-1])

    @property
    def n_documents(self) -> int:
        return sum(shard.documents for _, shard in self.shards)

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of the text these tokens stand for (0 for generated tokens)."""
        return sum(shard.bytes for _, shard in self.shards)

    @cached_property
    def document_ends(self) -> np.ndarray:
        """(documents,) int64: exclusive end of every document, in tokens from the start of the split."""
        shards = zip(self.shards, self._starts[:-1], strict=True)
        return np.concatenate([np.load(path.with_name(shard.ends_file)) + start for (path, shard), start in shards])

    def read_into(self, start: int, out: np.ndarray) -> None:
        """Copy the tokens [start, start + len(out)) into `out`. They may span several shards."""
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        offset, filled = start - int(self._starts[shard]), 0
        while filled < len(out):
            piece = self._tokens[shard][offset : offset + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard, offset = shard + 1, 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens [start, stop) as int64."""
        if not 0 <= start <= stop <= self.n_tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.n_tokens}")
        out = np.empty(stop - start, np.int64)
        if len(out):
            self.read_into(start, out)
        return out

    def verify(self) -> None:
        """Compare every byte with the sha256 in meta.json.

        Raises:
            DataError: a file differs. The error names it.
        """
        recorded = {path: shard.sha256 for path, shard in self.shards}
        recorded |= {path.with_name(shard.ends_file): shard.ends_sha256 for path, shard in self.shards}
        for (path, written), here in zip(recorded.items(), sha256_of_all(recorded), strict=True):
            if here != written:
                raise _broken(path, "differs from its sha256 in meta.json")

    def misspelt(self, token_bytes: TokenBytes) -> str | None:
        """The difference in words, if the tokens of a shard stand for more or fewer bytes than its text has."""
        for (path, shard), tokens in zip(self.shards, self._tokens, strict=True):
            pieces = (tokens[first : first + COUNTED_TOKENS] for first in range(0, len(tokens), COUNTED_TOKENS))
            spelt = sum(token_bytes.count(piece, 0) for piece in pieces) - shard.documents * token_bytes.put_first
            if spelt != shard.bytes:
                return f"the tokens of {path.name} stand for {spelt:,} bytes, its text has {shard.bytes:,}"
        return None


def _broken(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}", f"delete {path.parent} and run the same command: the data is prepared again")


def write_meta(directory: Path, meta: dict[str, Any]) -> None:
    """Write meta.json with a fingerprint: the sha256 of the other entries, which hold the hash of every shard."""
    write_text(directory / META, json.dumps({**meta, "fingerprint": _fingerprint(meta)}, indent=1))


def read_meta(directory: Path) -> dict[str, Any]:
    """Read and check meta.json.

    Raises:
        DataError: meta.json cannot be parsed, was altered, or has another format.
    """
    path = directory / META
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        fingerprint = meta.pop("fingerprint")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _broken(path, f"cannot be read ({type(error).__name__}: {error})") from None
    if meta.get("format") != FORMAT_VERSION:
        raise _broken(path, f"has format {meta.get('format')}, this version reads {FORMAT_VERSION}")
    if fingerprint != _fingerprint(meta):
        raise _broken(path, "was altered after it was written")
    return {**meta, "fingerprint": fingerprint}


def _fingerprint(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
