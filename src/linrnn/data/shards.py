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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

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


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn a failed write under `path` into a StorageError. What is written stays for the next attempt."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write {error.filename or path}: {error.strerror or error}",
            "free space or set data.cache_dir elsewhere, then run the same command: preparation continues",
        ) from error


def write_json(path: Path, content: Any) -> None:
    """Write JSON whole or not at all. No newline ends the file: a tokenizer's hash is that of all its bytes."""
    write_text(path, json.dumps(content, indent=1))


class SplitWriter:
    """Appends documents to the shards of one split. The state that `commit()` returns is enough to continue.

    A writer made with a state cuts off whatever was written after that state was taken. The same documents therefore
    give the same bytes, however often the work was interrupted.

    Attributes:
        finished: the shards that are complete.
    """

    def __init__(self, directory: Path, split: str, dtype: np.dtype, state: dict[str, Any] | None = None) -> None:
        self._directory, self._split, self._dtype = directory, split, dtype
        state = state or {"finished": [], "open": {"tokens": 0, "documents": 0, "bytes": 0}}
        self.finished = [ShardMeta(**shard) for shard in state["finished"]]
        self._open_shard(**state["open"])

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.finished) + self._tokens

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.finished) + self._documents

    def append(self, ids: np.ndarray, ends: np.ndarray, n_bytes: int) -> None:
        """Append whole documents.

        Args:
            ids: the documents' tokens, concatenated.
            ends: (documents,) end of each document in `ids`, exclusive; the last is len(ids).
            n_bytes: UTF-8 bytes of the documents' text.
        """
        self._ids_file.write(ids.astype(self._dtype, copy=False).tobytes())
        self._ends_file.write((ends + self._tokens).astype("<i8").tobytes())
        self._tokens += len(ids)
        self._documents += len(ends)
        self._bytes += n_bytes
        if self._tokens >= SHARD_TOKENS:
            self._finish_shard()
            self._open_shard()

    def commit(self) -> dict[str, Any]:
        """Make everything appended so far durable, and return the state that continues from here."""
        for file in (self._ids_file, self._ends_file):
            _flush(file)
        shard = {"tokens": self._tokens, "documents": self._documents, "bytes": self._bytes}
        return {"finished": [asdict(done) for done in self.finished], "open": shard}

    def finish(self) -> list[dict[str, Any]]:
        """Close the last shard. The writer is done. Returns the entries of all shards for meta.json."""
        if self._tokens:
            self._finish_shard()
        else:
            self.close()
            self._path(".bin").unlink()
        return [asdict(shard) for shard in self.finished]

    def close(self) -> None:
        """Close the files. Without `finish` before, everything written after the last `commit` is lost."""
        for file in (self._ids_file, self._ends_file):
            with suppress(OSError):  # commit() has flushed everything that is needed
                file.close()

    def _path(self, suffix: str) -> Path:
        return self._directory / f"{self._split}-{len(self.finished):05d}{suffix}"

    def _open_shard(self, tokens: int = 0, documents: int = 0, bytes: int = 0) -> None:
        self._tokens, self._documents, self._bytes = tokens, documents, bytes
        # Document ends stay in a plain .part file until the shard is finished. These files are removed at the very end.
        self._ids_file = _open_at(self._path(".bin"), tokens * self._dtype.itemsize)
        self._ends_file = _open_at(self._path(".ends.part"), documents * 8)

    def _finish_shard(self) -> None:
        self.commit()
        self.close()
        ids, ends = self._path(".bin"), self._path(".ends.npy")
        with open(ends, "wb") as file:
            np.save(file, np.fromfile(self._path(".ends.part"), dtype="<i8"))
            _flush(file)
        counts = (self._tokens, self._documents, self._bytes)
        of_ends = (ends.stat().st_size, sha256(ends))
        self.finished.append(ShardMeta(ids.name, *counts, ids.stat().st_size, sha256(ids), *of_ends))
        self._tokens = self._documents = self._bytes = 0


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _open_at(path: Path, size: int) -> Any:
    """Open a file for appending at byte `size`, and cut off what lies beyond. The file must have at least `size`
    bytes."""
    path.touch()
    if path.stat().st_size < size:
        raise DataError(f"{path} is shorter than its progress record", f"delete {path.parent} and prepare again")
    os.truncate(path, size)
    return open(path, "ab")


class Part(NamedTuple):
    """A source of a mixture: its tokens [start, start + n_tokens) of a split, and its weight among the sources."""

    name: str
    start: int
    n_tokens: int
    weight: float


class ShardSet:
    """All tokens of one split as one long, memory-mapped sequence.

    Args:
        directory: where the shards are.
        meta: the content of its meta.json.
        split: "train" or "valid".

    Attributes:
        fingerprint: hex; identifies the whole prepared data set and this split of it.
        dtype: type of the token ids on disk.
        shards: the entries of meta.json.

    Raises:
        DataError: a shard is missing, or has not the size that meta.json records.
    """

    def __init__(self, directory: Path, meta: dict[str, Any], split: str) -> None:
        self.directory, self.fingerprint = directory, f"{meta['fingerprint']}-{split}"
        self.dtype = token_dtype(meta["vocab_size"])
        self.shards = [ShardMeta(**shard) for shard in meta["splits"][split]]
        for shard in self.shards:
            for path, size in ((directory / shard.file, shard.size), (directory / shard.ends_file, shard.ends_size)):
                if not path.is_file():
                    raise _broken(path, "is missing")
                if path.stat().st_size != size:
                    raise _broken(path, f"has {path.stat().st_size:,} bytes, meta.json says {size:,}")
        # Plain arrays over the mapping: each slice of an np.memmap costs microseconds of Python.
        self._tokens = [np.asarray(np.memmap(directory / s.file, self.dtype, "r")) for s in self.shards]
        self._starts = np.cumsum([0] + [shard.tokens for shard in self.shards])

    @property
    def n_tokens(self) -> int:
        return int(self._starts[-1])

    @property
    def parts(self) -> list[Part]:
        """What batches are drawn from: all of it, or the sources of a :class:`Mixture`."""
        return [Part("the training text", 0, self.n_tokens, 1.0)]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(shard.size + shard.ends_size for shard in self.shards)

    @property
    def n_documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of the text these tokens stand for (0 for generated tokens)."""
        return sum(shard.bytes for shard in self.shards)

    @cached_property
    def document_ends(self) -> np.ndarray:
        """(documents,) int64: exclusive end of every document, in tokens from the start of the split."""
        ends = [
            np.load(self.directory / shard.ends_file) + start
            for shard, start in zip(self.shards, self._starts[:-1], strict=True)
        ]
        return np.concatenate(ends) if ends else np.zeros(0, np.int64)

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
        recorded = {shard.file: shard.sha256 for shard in self.shards}
        recorded |= {shard.ends_file: shard.ends_sha256 for shard in self.shards}
        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            found = pool.map(sha256, (self.directory / name for name in recorded))
            for (name, written), here in zip(recorded.items(), found, strict=True):
                if here != written:
                    raise _broken(self.directory / name, "differs from its sha256 in meta.json")

    def misspelt(self, token_bytes: TokenBytes, max_tokens: int | None) -> str | None:
        """Find a shard whose tokens stand for more or fewer bytes than its text has.

        Only shards that a validation pass of `max_tokens` reads are checked. Returns the difference in words, or None
        if every shard agrees.
        """
        for shard, start, tokens in zip(self.shards, self._starts, self._tokens, strict=False):
            if max_tokens is not None and start > max_tokens:
                break
            pieces = (tokens[first : first + COUNTED_TOKENS] for first in range(0, len(tokens), COUNTED_TOKENS))
            spelt = sum(token_bytes.count(piece, 0) for piece in pieces) - shard.documents * token_bytes.put_first
            if spelt != shard.bytes:
                return f"the tokens of {shard.file} stand for {spelt:,} bytes, its text has {shard.bytes:,}"
        return None


class Mixture(ShardSet):
    """The same split of several prepared sources, one after another. Each is a part with its weight.

    Args:
        names: of the sources, for messages.
        sets: their shards, all with tokens of one tokenizer.
        weights: decide how often each is drawn from, in relation to the others.
    """

    def __init__(self, names: Sequence[str], sets: Sequence[ShardSet], weights: Sequence[float]) -> None:
        self._sets, self.dtype = sets, sets[0].dtype
        self.fingerprint = _fingerprint({"sources": [one.fingerprint for one in sets], "weights": list(weights)})
        self.shards = [shard for one in sets for shard in one.shards]
        self._tokens = [tokens for one in sets for tokens in one._tokens]
        self._starts = np.cumsum([0] + [shard.tokens for shard in self.shards])
        sizes = [one.n_tokens for one in sets]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self._parts = [Part(*part) for part in zip(names, starts, sizes, weights, strict=True)]

    @property
    def parts(self) -> list[Part]:
        return self._parts

    @cached_property
    def document_ends(self) -> np.ndarray:
        sets = zip(self._sets, self._parts, strict=True)
        return np.concatenate([one.document_ends + part.start for one, part in sets])

    def verify(self) -> None:
        for one in self._sets:
            one.verify()

    def misspelt(self, token_bytes: TokenBytes, max_tokens: int | None) -> str | None:
        return next((why for one in self._sets if (why := one.misspelt(token_bytes, max_tokens))), None)


def _broken(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}", f"delete {path.parent} and run the same command: the data is prepared again")


def write_meta(directory: Path, meta: dict[str, Any]) -> None:
    """Write meta.json with a fingerprint: the sha256 of the other entries, which hold the hash of every shard."""
    write_json(directory / META, {**meta, "fingerprint": _fingerprint(meta)})


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
