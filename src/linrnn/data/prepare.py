"""`prepare`: turn a configuration into memory-mapped tokens. Text is tokenised once.

The result lies in `<data.cache_dir>/<data.name>-<key>/`. The key is a hash of the text (its content, not its place),
the tokenizer and the options that decide which tokens come out. Work in progress has the suffix `.partial`. The last
step removes the suffix, so a directory with its final name is complete. One process works on it, under the lock
`<directory>.lock`; the system releases the lock when that process ends, in whatever way it ends.

A source without validation data gives every k-th document that has text to validation, starting with the first; k =
round(1 / data.valid_fraction). `data.max_tokens` bounds the training tokens: reading stops after the document that
reaches it. Each document is followed by the tokenizer's end token, if there is one.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from linrnn.config.schema import DataConfig, MarkovDataConfig, TextDataConfig, TokenizedDataConfig
from linrnn.core import output
from linrnn.core.errors import DataError
from linrnn.core.files import storing, write_text
from linrnn.data.markov import END, MarkovChain
from linrnn.data.shards import (
    FORMAT_VERSION,
    SPLITS,
    ShardSet,
    SplitWriter,
    read_meta,
    token_dtype,
    write_meta,
)
from linrnn.data.sources import Source, make_source
from linrnn.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

BATCH_CHARACTERS = 4 << 20  # characters that are tokenised together
BATCH_DOCUMENTS = 8192
SECONDS_BETWEEN_LINES = 10
TOKENIZER_SAMPLE_BYTES = 16 << 20  # a tokenizer trained here learns from this many first bytes of the training text
Say = Callable[[str], None]


def to_stderr(line: str) -> None:
    """Print a line about the data to standard error."""
    output.say(f"data: {line}", sys.stderr)


@dataclass(frozen=True)
class PreparedData:
    """Data ready to train on.

    Attributes:
        train, valid: the tokens.
        vocab_size: every id is below it.
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
    fingerprint: str
    description: str
    directory: Path
    token_fingerprint: str
    entropy_floor_nats: float | None = None
    tokenizer: Tokenizer | None = None

    def verify(self) -> None:
        """Read everything and compare it with the recorded hashes.

        Raises:
            DataError: a file differs. The error names it.
        """
        self.train.verify()
        self.valid.verify()


def prepare(config: DataConfig, say: Say = to_stderr) -> PreparedData:
    """Prepare the data that `config` describes, or open it if it is there already.

    Args:
        say: told in lines what is done, every ten seconds how far it is, and how many documents are empty.

    Raises:
        DataError: data or tokenizer is missing, empty, corrupt, or not what the configuration says.
        StorageError: the cache directory cannot be written.
    """
    if isinstance(config, MarkovDataConfig):
        return _prepare_markov(config, say)
    if isinstance(config, TextDataConfig) and config.sources:
        return _prepare_mixture(config, say)
    assert isinstance(config, TokenizedDataConfig), config
    source = make_source(config)
    return _prepare_text(config, source, _tokenizer(config, [source], say), say)


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
def _prepare_mixture(config: TextDataConfig, say: Say) -> PreparedData:
    """Every source as data of its own, which other mixtures share, all with one tokenizer."""
    alone = [replace(config, path=source.path, sources=[]) for source in config.sources]
    found = [make_source(one, "data.sources") for one in alone]
    tokenizer = _tokenizer(config, found, say)
    prepared = [_prepare_text(one, source, tokenizer, say) for one, source in zip(alone, found, strict=True)]
    names, weights = [source.description for source in found], [source.weight for source in config.sources]
    train = ShardSet.mixture(names, [one.train for one in prepared], weights)
    valid = prepared[0].valid
    if config.valid_path is None:
        valid = ShardSet.mixture(names, [one.valid for one in prepared], weights)
    shares = [f"{w / sum(weights):.1%} of {one.description}" for w, one in zip(weights, prepared, strict=True)]
    return replace(
        prepared[0],
        train=train,
        valid=valid,
        fingerprint=train.fingerprint,
        description="a mixture: " + "; ".join(shares),
        directory=prepared[0].directory.parent,
    )


def _prepare_text(config: TokenizedDataConfig, source: Source, tokenizer: Tokenizer, say: Say) -> PreparedData:
    recipe = {
        "source": source.identity,
        "holdout_period": source.period,
        "max_tokens": config.max_tokens,
        "tokenizer_sha256": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
    }

    def write(directory: Path) -> dict[str, Any]:
        (directory / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
        return _tokenise(directory, source, tokenizer, config.max_tokens, say)

    directory = _prepared(config, recipe, write, say)
    ends = "no end token" if tokenizer.eos_id is None else f"end token {tokenizer.eos_token} = {tokenizer.eos_id}"
    which = f"tokenizer {tokenizer.name}, {ends}"
    return _open(directory, source.description, which, token_fingerprint=tokenizer.hash, tokenizer=tokenizer)


def _tokenizer(config: TokenizedDataConfig, sources: Sequence[Source], say: Say) -> Tokenizer:
    """The tokenizer that `config` names, or a BPE trained on the first training text. The cache directory keeps it.

    Each source gives an equal part of that text.
    """
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer)
    entries = config.tokenizer_vocab_size
    text = [word for source in sources for word in (source.identity, source.period)]
    name = f"tokenizer-{entries}-{_key([*text, entries, TOKENIZER_SAMPLE_BYTES])}.json"

    def train(file: Path) -> None:
        say(f"training a tokenizer of {entries:,} entries")
        samples = (_sample(source, TOKENIZER_SAMPLE_BYTES // len(sources)) for source in sources)
        trained = train_tokenizer(chain.from_iterable(samples), entries)
        if trained.vocab_size < entries:
            say(f"the text is too small for more than {trained.vocab_size:,} of them")
        write_text(file, json.dumps(json.loads(trained.json), indent=1))

    tokenizer = load_tokenizer(str(_written_once(config, name, train, say)))
    tokenizer.name = f"byte-level BPE of {tokenizer.vocab_size:,} entries trained on it"
    return tokenizer


def _sample(source: Source, most: int) -> Iterator[str]:
    n_bytes = 0
    for split, text in source.training():
        if n_bytes >= most:
            return
        if split == "train":
            yield text
            n_bytes += len(text.encode())


def _tokenise(
    directory: Path, source: Source, tokenizer: Tokenizer, max_tokens: int | None, say: Say
) -> dict[str, list[dict[str, Any]]]:
    """Write the shards of both splits. Returns their entries for meta.json.

    Raises:
        DataError: the text cannot be read, or a split has no two tokens.
    """
    writers = {split: SplitWriter(directory, split, token_dtype(tokenizer.vocab_size)) for split in SPLITS}
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    began = line_at = time.monotonic()
    number = empty = 0  # of documents

    def so_far() -> str:
        done = sum(writer.tokens for writer in writers.values())
        return f"tokenised {number:,} documents, {done:,} tokens, {done / (time.monotonic() - began):,.0f} tokens/s"

    room = sys.maxsize if max_tokens is None else max_tokens
    for batch in _batches(source.documents()):
        for (split, text), ids in zip(batch, tokenizer.encode_batch([text for _, text in batch]), strict=True):
            if room <= 0:
                break
            if not ids:
                empty += 1
                continue
            number += 1
            tokens = np.array(ids + end)
            writers[split].append(tokens, np.array([len(tokens)]), len(text.encode()))
            room -= len(tokens) * (split == "train")
        if time.monotonic() > line_at + SECONDS_BETWEEN_LINES:
            line_at = time.monotonic()
            say(so_far())
        if room <= 0:
            break
    for split, writer in writers.items():
        if writer.tokens < 2:
            raise DataError(f"{source.description} gives {writer.tokens} {split} tokens", "give more text")
    say(so_far())
    if empty:
        say(f"{empty:,} documents hold no token, and are left out")
    return {split: writer.finish() for split, writer in writers.items()}


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Batches that end with the document which brings them to so many characters."""
    batch: list[tuple[str, str]] = []
    held = 0
    for split, text in documents:
        batch.append((split, text))
        held += len(text)
        if held >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


# -------------------------------------------------------------------------------------------------- generated
def _prepare_markov(config: MarkovDataConfig, say: Say) -> PreparedData:
    chain = MarkovChain(config)
    sizes = {"train": config.n_tokens, "valid": config.n_valid_tokens}
    recipe = {
        "source": {"source": "markov", "branching": config.branching, "data_seed": config.data_seed},
        "n_tokens": sizes,
        "vocab_size": config.vocab_size,
        "eos_id": END,
    }

    def write(directory: Path) -> dict[str, Any]:
        splits = {}
        for stream, (split, wanted) in enumerate(sizes.items()):
            writer = SplitWriter(directory, split, token_dtype(config.vocab_size))
            for tokens, ends in chain.documents(stream):
                room = min(len(tokens), wanted - writer.tokens)
                writer.append(tokens[:room], np.append(ends[ends < room], room), 0)
                if writer.tokens == wanted:
                    break
            splits[split] = writer.finish()
        return splits

    directory = _prepared(config, recipe, write, say)
    floor = chain.entropy_rate(reset_at_document=config.reset_at_document)
    what = f"generated text with a vocabulary of {config.vocab_size:,}"
    meaning = _key([recipe["source"], config.vocab_size])
    of_loss = f"no model reaches a loss below {floor:.4f} nats"
    return _open(directory, what, of_loss, token_fingerprint=meaning, entropy_floor_nats=floor)


def _open(directory: Path, what: str, more: str, **about: Any) -> PreparedData:
    meta = read_meta(directory)
    train, valid = (ShardSet.open(directory, meta, split) for split in SPLITS)
    return PreparedData(
        train=train,
        valid=valid,
        vocab_size=meta["vocab_size"],
        fingerprint=meta["fingerprint"],
        description=f"{what}: {train.n_tokens:,} training and {valid.n_tokens:,} validation tokens; {more}",
        directory=directory,
        **about,
    )


# -------------------------------------------------------------------------------------------------- the cache
def _prepared(config: DataConfig, recipe: dict[str, Any], write: Callable[[Path], dict[str, Any]], say: Say) -> Path:
    """The directory for `recipe`. `write` writes shards into a directory, and returns the splits for meta.json."""

    def whole(directory: Path) -> None:
        directory.mkdir()
        write_meta(directory, {"format": FORMAT_VERSION, **recipe, "splits": write(directory)})

    return _written_once(config, f"{config.name}-{_key([FORMAT_VERSION, recipe])}", whole, say)


def _written_once(config: DataConfig, name: str, write: Callable[[Path], None], say: Say) -> Path:
    """A file or directory of the cache. If it does not exist, one process writes it, aside."""
    path = Path(config.cache_dir).expanduser() / name
    if path.exists():
        return path
    partial = path.with_name(path.name + ".partial")
    lock = FileLock(path.with_name(path.name + ".lock"))  # its file stays: without it two processes could hold a lock
    with storing(path, "free space or set data.cache_dir elsewhere, then run the same command again"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            say("waiting for another process that prepares the same data")
            lock.acquire()
        try:
            shutil.rmtree(partial, ignore_errors=True)  # of a killed attempt
            if not path.exists():
                write(partial)
                os.rename(partial, path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            lock.release()
    return path


def _key(content: Any) -> str:
    """A short hash of `content`: everything that decides which tokens are written."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
