"""What a run starts from instead of random weights: `init_from` (weights only) or `continue_from` (all state).

Weights know token ids, not text. They are useful only if the data's ids mean the same as in their training.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from linrnn.core.errors import ConfigError
from linrnn.data import PreparedData
from linrnn.data.tokenizer import Tokenizer, load_tokenizer
from linrnn.models import LanguageModel, find_pretrained, load_weights, pretrained_vocab_size
from linrnn.training import checkpoint

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Weights:
    """Weights from a run's checkpoint or from a Hugging Face directory.

    Attributes:
        source: the value of `init_from` or `continue_from`.
        directory: the checkpoint, or the Hugging Face directory.
        is_checkpoint: which of the two `directory` is.
        remark: a line for the log about what is unknown about their tokens; None if there is nothing to say.
    """

    source: str
    directory: Path
    is_checkpoint: bool
    remark: str | None = None

    def load(self, model: LanguageModel) -> None:
        """Copy the weights into `model`.

        Raises:
            ConfigError: the weights are for another architecture.
            DataError: a file cannot be read.
        """
        if self.is_checkpoint:
            checkpoint.load_model(self.directory, model.hf)
        else:
            load_weights(model, self.source)


def find_weights(source: str, data: PreparedData) -> Weights:
    """The weights that `init_from` names, after a check that they fit the tokens of `data`.

    Args:
        source: a run's directory (its newest checkpoint), a checkpoint, a Hugging Face directory in FLA's format, or
            the name of one on the hub.

    Raises:
        ConfigError: the weights were trained with another tokenizer.
        DataError: `source` has no weights, or they are damaged.
    """
    if directory := checkpoint.resolve(Path(source)):
        check_tokens(directory, data)
        return Weights(source, directory, is_checkpoint=True)
    directory = find_pretrained(source)
    return Weights(source, directory, is_checkpoint=False, remark=_check_pretrained(directory, source, data))


def continue_from(
    source: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: PreparedData
) -> checkpoint.Progress:
    """Restore the weights and the optimizer's state of another run. Returns that run's progress.

    Every rank calls it, and reads its own part of model and optimizer.

    Args:
        source: a run's directory (its newest checkpoint) or a checkpoint.

    Raises:
        ConfigError: there is no checkpoint, or its model or tokenizer differs.
        DataError: the checkpoint is damaged.
    """
    directory = checkpoint.resolve(Path(source))
    if directory is None:
        raise ConfigError(
            f"continue_from={source} {'holds no complete checkpoint' if Path(source).is_dir() else 'is no directory'}",
            "name a run's directory or one of its checkpoints/step_*; init_from= takes weights alone, as of an export",
        )
    progress = checkpoint.read_progress(directory)
    check_tokens(directory, data)
    checkpoint.load_model(directory, model)
    checkpoint.load_optimizer(directory, model, optimizer)
    return progress


def as_continued(progress: checkpoint.Progress) -> dict[str, Any]:
    """What a run records about the checkpoint that it continues: run, step, and all tokens behind the weights."""
    before = progress.continues["tokens"] if progress.continues else 0
    return {"run": progress.run, "step": progress.step, "tokens": before + progress.tokens}


def check_tokens(directory: Path, data: PreparedData) -> None:
    """Reject data whose token ids differ from those that a checkpoint was trained with.

    Raises:
        ConfigError: the ids differ. The remedy names the tokenizer to use, if the run's tokenizer is there.
        DataError: an earlier version wrote the checkpoint.
    """
    wanted = checkpoint.read_progress(directory).token_fingerprint
    if wanted != data.token_fingerprint:
        raise _other_tokens(directory, data, wanted, directory.parent.parent)


def _check_pretrained(directory: Path, source: str, data: PreparedData) -> str | None:
    """:func:`check_tokens` for a Hugging Face directory. Returns a remark if the directory has no tokenizer."""
    if (directory / TOKENIZER).is_file():
        wanted = load_tokenizer(str(directory)).hash
        if wanted != data.token_fingerprint:
            raise _other_tokens(Path(source), data, wanted, directory)
        return None
    entries = pretrained_vocab_size(directory, source)
    if entries != data.vocab_size:
        raise ConfigError(
            f"init_from={source} carries no tokenizer, and has {entries:,} entries where the data has "
            f"{data.vocab_size:,}: its ids stand for other text",
            f"put the {TOKENIZER} of its training beside its config.json, and use data.tokenizer={source}",
        )
    return f"init_from={source} carries no tokenizer: whether its {entries:,} ids are those of the data is not known"


def _other_tokens(source: Path, data: PreparedData, wanted: str, files: Path) -> ConfigError:
    """The error for data with another tokenizer than the weights at `source`; `files` may hold their tokenizer."""
    theirs = load_tokenizer(str(files)) if (files / TOKENIZER).is_file() else None
    its_own = f"with {data.tokenizer.name}" if data.tokenizer else "as generated text"
    cause = f"the data is tokenised {its_own}, and {source} was trained with another tokenizer"
    if data.tokenizer is None and theirs is None:
        cause = f"the data is generated by another chain than {source} was trained on"
    if theirs is None:
        return ConfigError(cause, "use the data that it was trained on, or its tokenizer (data.tokenizer=…)")
    return ConfigError(cause, f"use data.tokenizer={_place(files, theirs, wanted)}")


def _place(files: Path, tokenizer: Tokenizer, wanted: str) -> Path:
    """The value of data.tokenizer for the tokenizer with the hash `wanted`.

    It is the tokenizer's file, or its directory if only tokenizer_config.json names the end token.
    """
    alone = Tokenizer(tokenizer.json, tokenizer.name)
    return files / TOKENIZER if alone.hash == wanted else files
