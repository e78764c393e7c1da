"""`prepare`: turn a configuration into memory-mapped tokens. Text is tokenised once.

The result lies in `<data.cache_dir>/<data.name>-<key>/`. The key is a hash of the text (its content, not its place),
the tokenizer and the options that decide which tokens come out. Work in progress has the suffix `.partial`. The last
step removes the suffix, so a directory with its final name is complete. One process works on it, under the lock
`<directory>.lock`; the system releases the lock when that process ends, in whatever way it ends.

A source without validation data gives every k-th document that has tokens to validation, starting with the first; k =
round(1 / data.valid_fraction). `data.max_tokens` bounds the training tokens: reading stops after the document that
reaches it.
Each document is followed by the tokenizer's end token, if there is one.

After every batch of documents `progress.json` records the valid length of each file and the number of documents read.
The next attempt cuts off anything longer, skips that many documents (reading is far faster than tokenising) and goes
on. The bytes are the same however often the work was interrupted.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from linrnn.config.schema import DataConfig, MarkovDataConfig, TextDataConfig, TokenizedDataConfig
from linrnn.core.errors import ConfigError, DataError, StorageError
from linrnn.core.machine import GIB, free_disk
from linrnn.data.markov import END, MarkovChain
from linrnn.data.progress import Meter, Progress, Report
from linrnn.data.readers import Document
from linrnn.data.shards import (
    FORMAT_VERSION,
    META,
    SPLITS,
    Mixture,
    ShardSet,
    SplitWriter,
    read_meta,
    storage_errors,
    token_dtype,
    write_json,
    write_meta,
)
from linrnn.data.sources import Source, make_source
from linrnn.data.tokenizer import TokenBytes, Tokenizer, load_tokenizer, train_tokenizer

PARTIAL = ".partial"
KEPT_SECONDS = 7 * 24 * 3600  # how long interrupted work waits for the same command to continue it
BATCH_CHARACTERS = 4 << 20  # characters that are tokenised and committed together
BATCH_DOCUMENTS = 8192
RECORD = "progress.json"
TOKENIZER_SAMPLE_BYTES = 16 << 20  # a tokenizer trained here learns from this many first bytes of the training text


@dataclass(frozen=True)
class PreparedData:
    """Data ready to train on.

    Attributes:
        train, valid: the tokens.
        vocab_size: every id is below it.
        eos_id: the token that ends a document, None if the tokenizer has none.
        fingerprint: hex; changes with any byte of text, tokenizer or options.
        description: one line for humans.
        directory: the directory of the prepared data.
        token_fingerprint: identifies the meaning of ids: the tokenizer, or the chain of generated text. A model trained
            on other data can read these tokens only if both have the same `token_fingerprint`.
        entropy_floor_nats: the lowest mean loss that any model can reach; None if unknown.
        tokenizer: None for generated data.
    """

    train: ShardSet
    valid: ShardSet
    vocab_size: int
    eos_id: int | None
    fingerprint: str
    description: str
    directory: Path
    token_fingerprint: str
    entropy_floor_nats: float | None = None
    tokenizer: Tokenizer | None = None

    def verify(self, progress: Report | None = None) -> None:
        """Read everything and compare it with the recorded hashes.

        Raises:
            DataError: a file differs. The error names it.
        """
        if progress and (size := self.train.size + self.valid.size) > GIB:
            progress(Progress(f"comparing {size / GIB:.1f} GiB with their hashes", finished=True))
        self.train.verify()
        self.valid.verify()

    def token_bytes(self, shards: ShardSet, max_tokens: int | None, say: Callable[[str], None]) -> TokenBytes | None:
        """The bytes of each token, to count the bytes of the labels in a validation pass of `max_tokens` over `shards`.

        None for generated data, or if the count would differ from the text's bytes. `say` is then told why.
        """
        if self.tokenizer is None:
            return None
        token_bytes = self.tokenizer.token_bytes()
        why: str | None = "its tokens stand for no bytes"
        if token_bytes is not None and (why := shards.misspelt(token_bytes, max_tokens)) is None:
            return token_bytes
        say(f"no bits per byte with tokenizer {self.tokenizer.name}: {why}")
        say("  -> data.tokenizer=… of byte-level BPE without a normalizer keeps every byte; null trains one")
        return None


def prepare(config: DataConfig, *, progress: Report | None = None) -> PreparedData:
    """Prepare the data that `config` describes, or open it if it is there already.

    Args:
        progress: called with a `Progress` from time to time while there is work to do.

    Raises:
        DataError: data or tokenizer is missing, empty, corrupt, or not what the configuration says.
        StorageError: the cache directory cannot be written. The next attempt continues.
    """
    report = progress or (lambda _: None)
    if isinstance(config, MarkovDataConfig):
        return _prepare_markov(config, report)
    if isinstance(config, TextDataConfig) and config.sources:
        return _prepare_mixture(config, report)
    if isinstance(config, TokenizedDataConfig):
        source = make_source(config)
        period = _holdout_period(config, source)
        return _prepare_text(config, source, period, _tokenizer(config, [(source, period)], report), report)
    raise TypeError(f"cannot prepare {type(config).__name__}")


def vocabulary_size(config: DataConfig) -> int:
    """The `vocab_size` that :func:`prepare` will report for `config`, without reading its text.

    A tokenizer that is trained on small text may get a smaller vocabulary than named here.

    Raises:
        DataError: the tokenizer cannot be loaded.
    """
    if isinstance(config, MarkovDataConfig):
        return config.vocab_size
    assert isinstance(config, TokenizedDataConfig), config
    return config.tokenizer_vocab_size if config.tokenizer is None else _vocabulary_of(config.tokenizer)


@lru_cache
def _vocabulary_of(tokenizer: str) -> int:
    """The size of a tokenizer's vocabulary. It is cached, because a sweep asks for every point."""
    return load_tokenizer(tokenizer).vocab_size


# ------------------------------------------------------------------------------------------------------- text
def _prepare_mixture(config: TextDataConfig, report: Report) -> PreparedData:
    """Every source as data of its own, which other mixtures share, all with one tokenizer."""
    alone = [replace(config, path=source.path, sources=[]) for source in config.sources]
    found = [(source := make_source(one, "data.sources"), _holdout_period(one, source)) for one in alone]
    tokenizer = _tokenizer(config, found, report)
    prepared = [_prepare_text(one, *of_one, tokenizer, report) for one, of_one in zip(alone, found, strict=True)]
    first, names, weights = prepared[0], [s.description for s, _ in found], [s.weight for s in config.sources]
    train = Mixture(names, [one.train for one in prepared], weights)
    own = config.valid_path is None
    shares = [
        f"{weight / sum(weights):.1%} of {one.description}" for weight, one in zip(weights, prepared, strict=True)
    ]
    return replace(
        first,
        train=train,
        valid=Mixture(names, [one.valid for one in prepared], weights) if own else first.valid,
        fingerprint=train.fingerprint,
        description="a mixture: " + "; ".join(shares),
        directory=first.directory.parent,
    )


def _holdout_period(config: TokenizedDataConfig, source: Source) -> int | None:
    """Every how many documents one is held out; None if the source has validation text."""
    if source.has_validation:
        return None
    if config.valid_fraction == 0:
        cause = f"data={config.name} has no validation text of its own and data.valid_fraction is 0"
        raise ConfigError(cause, "set data.valid_fraction (0.01, say), or name validation data")
    return round(1 / config.valid_fraction)


def _prepare_text(
    config: TokenizedDataConfig, source: Source, period: int | None, tokenizer: Tokenizer, report: Report
) -> PreparedData:
    for remark in source.remarks:
        report(Progress(remark, finished=True))
    recipe = {
        "source": source.identity,
        "holdout_period": period,
        "max_tokens": config.max_tokens,
        "tokenizer_sha256": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
    }
    # 8 bytes of text per token; tokens of a large vocabulary average 4 to 5.
    least_tokens = min(source.text_bytes // 8, config.max_tokens or source.text_bytes)
    least = least_tokens * token_dtype(tokenizer.vocab_size).itemsize

    def write(directory: Path) -> dict[str, Any]:
        if not tokenizer.keeps_every_character():
            why = "it has no token for some bytes, or a normalizer that removes some"
            report(Progress(f"tokenizer {tokenizer.name} may lose characters of the text: {why}", finished=True))
        try:
            splits = tokenise(directory, source, tokenizer, period, config.max_tokens, report)
        except DataError:
            if not source.remote:  # a repaired local file is another text, so nothing would continue this attempt
                shutil.rmtree(directory, ignore_errors=True)
            raise
        (directory / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
        return splits

    room = (least, f"the text of {source.description}, tokenised,", "lower data.max_tokens")
    directory = _written_once(config, recipe, room, write, report)
    ends = "no end token" if tokenizer.eos_id is None else f"end token {tokenizer.eos_token} = {tokenizer.eos_id}"
    which = f"tokenizer {tokenizer.name}, {ends}"
    return _open(directory, source.description, which, token_fingerprint=tokenizer.hash, tokenizer=tokenizer)


def _tokenizer(config: TokenizedDataConfig, sources: Sequence[tuple[Source, int | None]], report: Report) -> Tokenizer:
    """The tokenizer that `config` names, or a BPE trained on the first training text. The cache directory keeps it.

    Args:
        sources: each gives an equal part of the text, without every k-th document, which is held out; None: with all.
    """
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer)
    entries = config.tokenizer_vocab_size
    text = [word for source, period in sources for word in (source.identity, period)]
    key = _key([*text, entries, TOKENIZER_SAMPLE_BYTES])
    path = _cache(config) / f"tokenizer-{entries}-{key}.json"
    if not path.is_file():
        with _locked(path, report):
            if not path.is_file():  # nobody else has trained it meanwhile
                report(Progress(f"training a tokenizer of {entries:,} entries", finished=True))
                n_bytes = TOKENIZER_SAMPLE_BYTES // len(sources)
                samples = (_sample(source, period, n_bytes) for source, period in sources)
                tokenizer = train_tokenizer(chain.from_iterable(samples), entries)
                if tokenizer.vocab_size < entries:
                    few = f"the text is too small for more than {tokenizer.vocab_size:,} of them"
                    report(Progress(few, finished=True))
                with storage_errors(path):
                    write_json(path, json.loads(tokenizer.json))
    tokenizer = load_tokenizer(str(path))
    tokenizer.name = f"byte-level BPE of {tokenizer.vocab_size:,} entries trained on it"
    return tokenizer


def _sample(source: Source, period: int | None, most: int) -> Iterator[str]:
    n_bytes = 0
    texts = (document.text for document in source.documents("train") if document.text)
    for number, text in enumerate(texts):
        if split_of("train", number, period) == "train":
            yield text
            n_bytes += len(text.encode())
            if n_bytes >= most:
                return


def split_of(phase: str, document: int, period: int | None) -> str:
    """The split of the `document`-th document (from 0) among those of `phase` that have tokens."""
    if period is None:
        return phase
    return "valid" if document % period == 0 else "train"


def tokenise(
    directory: Path, source: Source, tokenizer: Tokenizer, period: int | None, max_tokens: int | None, report: Report
) -> dict[str, Any]:
    """Write the shards of both splits, or what an earlier attempt left to do. Returns their entries for meta.json.

    Args:
        directory: where the shards and the progress record are.
        tokenizer: its end token, if it has one, follows every document.
        period: every period-th document is held out for validation; None if the source has validation text.
        max_tokens: reading ends with the document that brings the training split to this many tokens.
        report: called after every batch.

    Raises:
        DataError: the text cannot be read, or a split has no two tokens.
    """
    record = directory / RECORD
    state: dict[str, Any] = {"phase": 0, "documents": 0, "empty": 0, "splits": {}}
    if record.is_file():
        state = json.loads(record.read_text(encoding="utf-8"))
    dtype, splits = token_dtype(tokenizer.vocab_size), state["splits"]
    writers = {split: SplitWriter(directory, split, dtype, splits.get(split)) for split in SPLITS}

    def done() -> tuple[int, int]:
        return sum(w.documents for w in writers.values()), sum(w.tokens for w in writers.values())

    meter = Meter("tokenising", report, done()[1])
    phases = ["train"] if period is not None else ["valid", "train"]
    try:
        for phase in phases[state["phase"] :]:
            limit = max_tokens if phase == "train" else None
            for batch in _batches(islice(source.documents(phase), state["documents"], None)):
                room = None if limit is None else limit - writers["train"].tokens
                if room is not None and room <= 0:
                    break
                state["empty"] += _append([d.text for d in batch], tokenizer, writers, phase, period, room)
                state["splits"] = {split: writer.commit() for split, writer in writers.items()}
                state["documents"] += len(batch)
                write_json(record, state)
                fraction = batch[-1].fraction if phase == "train" else None
                if limit is not None:
                    fraction = max(fraction or 0.0, min(1.0, writers["train"].tokens / limit))
                meter.update(*done(), fraction)
            state |= {"phase": state["phase"] + 1, "documents": 0}
        shards = {split: writer.finish() for split, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.close()
    meter.update(*done(), 1.0, finished=True)
    for split, writer in writers.items():
        if writer.tokens < 2:
            raise DataError(f"{source.description} gives {writer.tokens} {split} tokens", "give more text")
    if state["empty"]:
        report(Progress(f"{state['empty']:,} documents hold no token, and are left out", finished=True))
    return shards


def _append(
    texts: list[str],
    tokenizer: Tokenizer,
    writers: dict[str, SplitWriter],
    phase: str,
    period: int | None,
    room: int | None,
) -> int:
    """Append the texts' tokens, until the training split has `room` more. Returns how many texts have none."""
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    documents: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    n_bytes = dict.fromkeys(SPLITS, 0)
    number, empty = sum(writer.documents for writer in writers.values()), 0
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        if room is not None and room <= 0:
            break
        if not ids:
            empty += 1
            continue
        split = split_of(phase, number, period)
        number += 1
        documents[split].append(np.array(ids + end, dtype=np.uint32))
        n_bytes[split] += len(text.encode())
        if room is not None and split == "train":
            room -= len(ids + end)
    for split, writer in writers.items():
        if documents[split]:
            ends = np.cumsum([len(document) for document in documents[split]])
            writer.append(np.concatenate(documents[split]), ends, n_bytes[split])
    return empty


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Batches that end with the document which brings them to so many characters."""
    batch: list[Document] = []
    held = 0
    for document in documents:
        batch.append(document)
        held += len(document.text)
        if held >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


# -------------------------------------------------------------------------------------------------- generated
def _prepare_markov(config: MarkovDataConfig, report: Report) -> PreparedData:
    chain = MarkovChain(config)
    sizes = {"train": config.n_tokens, "valid": config.n_valid_tokens}
    recipe = {
        "source": {"source": "markov", "branching": config.branching, "data_seed": config.data_seed},
        "n_tokens": sizes,
        "vocab_size": config.vocab_size,
        "eos_id": END,
    }
    dtype, total = token_dtype(config.vocab_size), sum(sizes.values())

    def write(directory: Path) -> dict[str, Any]:
        meter, n_documents, n_tokens, splits = Meter("generating", report), 0, 0, {}
        for stream, (split, wanted) in enumerate(sizes.items()):
            writer = SplitWriter(directory, split, dtype)
            for tokens, ends in chain.documents(stream):
                room = min(len(tokens), wanted - writer.tokens)
                ends = np.append(ends[ends < room], room)
                writer.append(tokens[:room], ends, 0)
                n_documents, n_tokens = n_documents + len(ends), n_tokens + room
                meter.update(n_documents, n_tokens, n_tokens / total, finished=n_tokens == total)
                if writer.tokens == wanted:
                    break
            splits[split] = writer.finish()
        return splits

    room = (total * dtype.itemsize, f"data=markov of {total:,} tokens", "lower data.n_tokens")
    directory = _written_once(config, recipe, room, write, report)
    floor = chain.entropy_rate(reset_at_document=config.reset_at_document)
    what, of_loss = (
        f"generated text of {config.vocab_size:,} tokens' vocabulary",
        f"no model can go below {floor:.4f} nats",
    )
    meaning = _key([recipe["source"], config.vocab_size])
    return _open(directory, what, of_loss, token_fingerprint=meaning, entropy_floor_nats=floor)


def _open(directory: Path, what: str, more: str, **about: Any) -> PreparedData:
    meta = read_meta(directory)
    train, valid = (ShardSet(directory, meta, split) for split in SPLITS)
    return PreparedData(
        train=train,
        valid=valid,
        vocab_size=meta["vocab_size"],
        eos_id=meta["eos_id"],
        fingerprint=meta["fingerprint"],
        description=f"{what}: {train.n_tokens:,} training and {valid.n_tokens:,} validation tokens; {more}",
        directory=directory,
        **about,
    )


# -------------------------------------------------------------------------------------------------- the cache
def _written_once(
    config: DataConfig,
    recipe: dict[str, Any],
    room: tuple[int, str, str],
    write: Callable[[Path], dict[str, Any]],
    report: Report,
) -> Path:
    """The directory for `recipe`. If it does not exist, one process writes it.

    Args:
        room: the least bytes that will be written; what needs them, and what would need fewer, for the message.
        write: writes shards into a directory, and returns the splits for meta.json.
    """
    directory = _cache(config) / f"{config.name}-{_key([FORMAT_VERSION, recipe])}"
    if not directory.is_dir():
        with _locked(directory, report), storage_errors(directory):
            if not directory.is_dir():
                _remove_abandoned(directory.parent, report)
                partial = directory.with_name(directory.name + PARTIAL)
                if not partial.is_dir():
                    _check_room(directory.parent, *room)
                    partial.mkdir()
                if not (partial / META).is_file():  # meta.json is written last
                    write_meta(partial, {"format": FORMAT_VERSION, **recipe, "splits": write(partial)})
                for leftover in [*partial.glob("*.part"), *partial.glob("*.tmp"), *partial.glob(RECORD)]:
                    leftover.unlink()
                os.rename(partial, directory)
    return directory


def _check_room(cache: Path, n_bytes: int, what: str, remedy: str) -> None:
    """Raise a StorageError if the disk of `cache` has fewer free bytes, before the first one is written."""
    if n_bytes > (free := free_disk(cache)):
        raise StorageError(
            f"{what} needs {n_bytes / GIB:,.1f} GiB in {cache}, and {free / GIB:,.1f} GiB are free there",
            f"{remedy}, free space, or set data.cache_dir on a larger disk",
        )


def _remove_abandoned(cache: Path, report: Report) -> None:
    """Remove what killed preparations left. A living one writes into its directory every few seconds."""
    for partial in cache.glob(f"*{PARTIAL}"):
        with suppress(FileNotFoundError):  # another process has finished or removed it meanwhile
            if time.time() - partial.stat().st_mtime > KEPT_SECONDS:  # noqa: TID251  a file has no other clock
                report(Progress(f"removing {partial}, which a killed preparation left", finished=True))
                shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """Hold the lock `<path>.lock`. Its file stays: removing it would let two processes hold a lock each."""
    lock = FileLock(path.with_name(path.name + ".lock"))
    with storage_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            report(Progress("waiting for another process that prepares the same data", finished=True))
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _cache(config: DataConfig) -> Path:
    return Path(config.cache_dir).expanduser()


def _key(content: Any) -> str:
    """A short hash of `content`: everything that decides which tokens are written."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
