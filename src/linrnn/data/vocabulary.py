"""The size of a data source's vocabulary, without reading its text."""

from linrnn.config.schema import DataConfig, MarkovDataConfig, TokenizedDataConfig
from linrnn.tokenizer import load_tokenizer


def vocabulary_size(config: DataConfig) -> int:
    """Entries of the vocabulary that :func:`linrnn.data.prepare` will report for `config`.

    Raises:
        DataError: the tokenizer cannot be loaded.
    """
    if isinstance(config, MarkovDataConfig):
        return config.vocab_size
    if isinstance(config, TokenizedDataConfig):
        return config.tokenizer_vocab_size if config.tokenizer is None else load_tokenizer(config.tokenizer).vocab_size
    raise TypeError(f"{type(config).__name__} has no vocabulary")
