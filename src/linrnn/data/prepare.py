"""`prepare`: turn a configuration into memory-mapped tokens. Text is tokenised once.

The result lies in `<data.cache_dir>/<data.name>-<key>/`. The key is a hash of the text (its content, not its place),
the tokenizer and the options that decide which tokens come out. Work in progress has the suffix `.partial`. The last
step removes the suffix, so a directory with its final name is complete.

A source without validation data gives every k-th document that has tokens to validation, starting with the first; k =
round(1 / data.valid_fraction). `data.max_tokens` bounds the training tokens: reading stops after the document that
reaches it.
Each document is followed by the tokenizer's end token, if there is one.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from linrnn.config.schema import DataConfig, MarkovDataConfig, TokenizedDataConfig
from linrnn.core.errors import ConfigError, DataError
from linrnn.data.cache import check_disk, key_of, locked, write_once
from linrnn.data.markov import END, MarkovChain
from linrnn.data.progress import Meter, Progress, ProgressCallback
from linrnn.data.shards import (
    SPLITS,
    ShardSet,
    SplitWriter,
    open_split,
    storage_errors,
    token_dtype,
    write_json,
)
from linrnn.data.sources import Source, make_source
from linrnn.data.tokenise import Tokenisation, split_of
from linrnn.data.tokenizer import TokenBytes, Tokenizer, load_tokenizer, train_tokenizer

TOKENIZER_SAMPLE_BYTES = 16 << 20  # a tokenizer trained here learns from this many first bytes of the training text


@dataclass(frozen=True)
class PreparedData:
    """Data ready to train on.

    Attributes:
        train, valid: the tokens.
        vocab_size: every id is below it.
        eos_id: the token that ends a document, None if the tokenizer has none.
        fingerprint: hex; changes with any byte of text, tokenizer or options.
        token_fingerprint: identifies the meaning of ids: the tokenizer, or the chain of generated text. A model trained
            on other data can read these tokens only if both have the same `token_fingerprint`.
        entropy_floor_nats: the lowest mean loss that any model can reach; None if unknown.
        description: one line for humans.
        directory: the directory of the prepared data.
        tokenizer: None for generated data.
    """

    train: ShardSet
    valid: ShardSet
    vocab_size: int
    eos_id: int | None
    fingerprint: str
    token_fingerprint: str
    entropy_floor_nats: float | None
    description: str
    directory: Path
    tokenizer: Tokenizer | None

    def verify(self, progress: ProgressCallback | None = None) -> None:
        """Read everything and compare it with the recorded hashes.

        Raises:
            DataError: a file differs. The error names it.
        """
        if progress and (size := self.train.size + self.valid.size) > 1 << 30:
            progress(Progress(f"comparing {size / 2**30:.1f} GiB with their hashes", finished=True))
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


def prepare(config: DataConfig, *, progress: ProgressCallback | None = None) -> PreparedData:
    """Prepare the data that `config` describes, or open it if it is there already.

    Args:
        progress: called with a `Progress` from time to time while there is work to do.

    Raises:
        DataError: data or tokenizer is missing, empty, corrupt, or not what the configuration says.
        StorageError: the cache directory cannot be written. The next attempt continues.
    """
    if isinstance(config, MarkovDataConfig):
        return _prepare_markov(config, progress)
    if isinstance(config, TokenizedDataConfig):
        return _prepare_text(config, progress)
    raise TypeError(f"cannot prepare {type(config).__name__}")


@lru_cache
def _entries(tokenizer: str) -> int:
    """The size of a tokenizer's vocabulary. It is cached, because a sweep asks for every point."""
    return load_tokenizer(tokenizer).vocab_size


def vocabulary_size(config: DataConfig) -> int:
    """The `vocab_size` that :func:`prepare` will report for `config`, without reading its text.

    A tokenizer that is trained on small text may get a smaller vocabulary than named here.

    Raises:
        DataError: the tokenizer cannot be loaded.
    """
    if isinstance(config, MarkovDataConfig):
        return config.vocab_size
    if isinstance(config, TokenizedDataConfig):
        return config.tokenizer_vocab_size if config.tokenizer is None else _entries(config.tokenizer)
    raise TypeError(f"{type(config).__name__} has no vocabulary")


# ------------------------------------------------------------------------------------------------------- text
def _prepare_text(config: TokenizedDataConfig, progress: ProgressCallback | None) -> PreparedData:
    source = make_source(config)
    if progress:
        for remark in source.remarks:
            progress(Progress(remark, finished=True))
    period = _holdout_period(config, source)
    if config.tokenizer is not None:
        tokenizer = load_tokenizer(config.tokenizer)
    else:
        tokenizer = _tokenizer_trained_here(config, source, period, progress)
    recipe = {
        "source": source.identity,
        "holdout_period": period,
        "max_tokens": config.max_tokens,
        "tokenizer_sha256": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
    }

    def check_room(cache: Path) -> None:
        if (least := _least_bytes(config, source, tokenizer)) is not None:
            check_disk(cache, least, f"the text of {source.description}, tokenised,", "lower data.max_tokens")

    def write_shards(directory: Path) -> dict[str, Any]:
        try:
            splits = Tokenisation(
                directory, source, tokenizer, period=period, max_tokens=config.max_tokens, report=progress
            ).run()
        except DataError:
            if not source.remote:  # a repaired local file is another text, so nothing would continue this attempt
                shutil.rmtree(directory, ignore_errors=True)
            raise
        with storage_errors(directory):
            (directory / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
        return splits

    directory, meta = write_once(config, recipe, check_room, write_shards, progress)
    train, valid = (open_split(directory, meta, split) for split in SPLITS)
    ends = "no end token" if tokenizer.eos_id is None else f"end token {tokenizer.eos_token} = {tokenizer.eos_id}"
    return PreparedData(
        train=train,
        valid=valid,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        fingerprint=meta["fingerprint"],
        token_fingerprint=tokenizer.hash,
        entropy_floor_nats=None,
        description=f"{source.description}: {_sizes(train, valid)}; tokenizer {tokenizer.name}, {ends}",
        directory=directory,
        tokenizer=tokenizer,
    )


def _least_bytes(config: TokenizedDataConfig, source: Source, tokenizer: Tokenizer) -> int | None:
    """The least disk space that the tokenised text will need; None if the amount of text is unknown.

    It assumes 8 bytes of text per token. Tokens of a large vocabulary average 4 to 5.
    """
    if source.text_bytes is None:
        return None
    tokens = min(source.text_bytes // 8, config.max_tokens or source.text_bytes)
    return tokens * token_dtype(tokenizer.vocab_size).itemsize


def _holdout_period(config: TokenizedDataConfig, source: Source) -> int | None:
    """k, if every k-th document is held out for validation. None if the source has validation text."""
    if source.has_validation:
        return None
    if config.valid_fraction == 0:
        raise ConfigError(
            f"data={config.name} has no validation text of its own and data.valid_fraction is 0",
            "set data.valid_fraction (0.01, say), or name validation data",
        )
    return round(1 / config.valid_fraction)


def _tokenizer_trained_here(
    config: TokenizedDataConfig, source: Source, period: int | None, progress: ProgressCallback | None
) -> Tokenizer:
    """A BPE trained on the first part of the training text. It is stored in the cache directory."""
    key = key_of([source.identity, period, config.tokenizer_vocab_size, TOKENIZER_SAMPLE_BYTES])
    path = Path(config.cache_dir).expanduser() / f"tokenizer-{config.tokenizer_vocab_size}-{key}.json"
    if not path.is_file():
        with locked(path, progress):
            if not path.is_file():  # nobody else has trained it meanwhile
                if progress:
                    entries = f"{config.tokenizer_vocab_size:,} entries"
                    progress(Progress(f"training a tokenizer of {entries}", finished=True))
                tokenizer = train_tokenizer(_sample(source, period), config.tokenizer_vocab_size)
                if progress and (learned := tokenizer.vocab_size) < config.tokenizer_vocab_size:
                    progress(Progress(f"the text is too small for more than {learned:,} of them", finished=True))
                with storage_errors(path):
                    write_json(path, json.loads(tokenizer.json))
    tokenizer = load_tokenizer(str(path))
    tokenizer.name = f"byte-level BPE of {tokenizer.vocab_size:,} entries trained on it"
    return tokenizer


def _sample(source: Source, period: int | None) -> Iterator[str]:
    n_bytes = 0
    texts = (document.text for document in source.documents("train") if document.text)
    for number, text in enumerate(texts):
        if split_of("train", number, period) == "train":
            yield text
            n_bytes += len(text.encode())
            if n_bytes >= TOKENIZER_SAMPLE_BYTES:
                return


# -------------------------------------------------------------------------------------------------- generated
def _prepare_markov(config: MarkovDataConfig, progress: ProgressCallback | None) -> PreparedData:
    chain = MarkovChain(config)
    sizes = {"train": config.n_tokens, "valid": config.n_valid_tokens}
    recipe = {
        "source": {"source": "markov", "branching": config.branching, "data_seed": config.data_seed},
        "n_tokens": sizes,
        "vocab_size": config.vocab_size,
        "eos_id": END,
    }

    def check_room(cache: Path) -> None:
        total = config.n_tokens + config.n_valid_tokens
        n_bytes = total * token_dtype(config.vocab_size).itemsize
        check_disk(cache, n_bytes, f"data=markov of {total:,} tokens", "lower data.n_tokens")

    def write_shards(directory: Path) -> dict[str, Any]:
        with storage_errors(directory):
            return _generate(chain, sizes, directory, token_dtype(config.vocab_size), Meter("generating", progress))

    directory, meta = write_once(config, recipe, check_room, write_shards, progress)
    train, valid = (open_split(directory, meta, split) for split in SPLITS)
    floor = chain.entropy_rate(reset_at_document=config.reset_at_document)
    return PreparedData(
        train=train,
        valid=valid,
        vocab_size=config.vocab_size,
        eos_id=END,
        fingerprint=meta["fingerprint"],
        token_fingerprint=key_of([recipe["source"], config.vocab_size]),
        entropy_floor_nats=floor,
        description=f"generated text of {config.vocab_size:,} tokens' vocabulary: {_sizes(train, valid)}; "
        f"no model can go below {floor:.4f} nats",
        directory=directory,
        tokenizer=None,
    )


def _generate(
    chain: MarkovChain, sizes: dict[str, int], directory: Path, dtype: np.dtype, meter: Meter
) -> dict[str, Any]:
    """Write so many tokens of each split to shards; returns the splits' shards for meta.json."""
    n_documents, n_tokens, total = 0, 0, sum(sizes.values())
    splits = {}
    for stream, (split, wanted) in enumerate(sizes.items()):
        writer = SplitWriter(directory, split, dtype, None)
        for tokens, ends in chain.documents(stream):
            room = min(len(tokens), wanted - writer.tokens)
            ends = np.append(ends[ends < room], room)
            writer.append(tokens[:room], ends, 0)
            n_documents, n_tokens = n_documents + len(ends), n_tokens + room
            meter.update(n_documents, n_tokens, n_tokens / total, finished=n_tokens == total)
            if writer.tokens == wanted:
                break
        writer.finish()
        splits[split] = [asdict(shard) for shard in writer.finished]
    return splits


def _sizes(train: ShardSet, valid: ShardSet) -> str:
    return f"{train.n_tokens:,} training and {valid.n_tokens:,} validation tokens"
