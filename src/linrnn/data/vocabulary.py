"""The size of a data source's vocabulary, without reading its text."""

from functools import lru_cache

from linrnn.config.schema import DataConfig, MarkovDataConfig, TokenizedDataConfig
from linrnn.data.tokenizer import load_tokenizer


def vocabulary_size(config: DataConfig) -> int:
    """The `vocab_size` that :func:`linrnn.data.prepare` will report for `config`.

    Raises:
        DataError: the tokenizer cannot be loaded.
    """
    if isinstance(config, MarkovDataConfig):
        return config.vocab_size
    if isinstance(config, TokenizedDataConfig):
        return config.tokenizer_vocab_size if config.tokenizer is None else _entries(config.tokenizer)
    raise TypeError(f"{type(config).__name__} has no vocabulary")


@lru_cache
def _entries(tokenizer: str) -> int:
    """The size of a tokenizer's vocabulary. It is cached, because a sweep asks for every point."""
    return load_tokenizer(tokenizer).vocab_size
