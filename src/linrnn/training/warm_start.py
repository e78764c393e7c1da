"""What a run starts from instead of random weights: `init_from` (weights) and `continue_from` (all state).

Weights know token ids, not text: they are of use only where the data's ids stand for what they stood for in training.
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
    """Weights of a run's checkpoint, or of a Hugging Face directory.

    Attributes:
        source: what `init_from` or `continue_from` names.
        directory: the checkpoint, or the Hugging Face directory.
        is_checkpoint: which of the two.
        remark: what cannot be known of their tokens, in a line for the log; None if there is nothing to say.
    """

    source: str
    directory: Path
    is_checkpoint: bool
    remark: str | None = None

    def load(self, model: LanguageModel) -> None:
        """Copy the weights into `model`.

        Raises:
            ConfigError: another architecture.
            DataError: a file cannot be read.
        """
        if self.is_checkpoint:
            checkpoint.load_model(self.directory, model.hf)
        else:
            load_weights(model, self.source)


def find_weights(source: str, data: PreparedData) -> Weights:
    """The weights that `init_from` names, once it is known that they are of use with the tokens of `data`.

    Args:
        source: a run's directory (its newest checkpoint), a checkpoint, a Hugging Face directory in FLA's format, or
            the name of one on the hub.

    Raises:
        ConfigError: they were trained with another tokenizer.
        DataError: there is nothing, or it is damaged.
    """
    if directory := checkpoint.resolve(Path(source)):
        check_tokens(directory, data)
        return Weights(source, directory, is_checkpoint=True)
    directory = find_pretrained(source)
    return Weights(source, directory, is_checkpoint=False, remark=_check_pretrained(directory, source, data))


def continue_from(
    source: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: PreparedData
) -> checkpoint.Progress:
    """Restore the weights and the optimizer's state of another run; returns where that run stood.

    Every rank calls it, and reads what it holds of model and optimizer.

    Args:
        source: a run's directory (its newest checkpoint) or a checkpoint.

    Raises:
        ConfigError: there is no checkpoint, or it is of another model or tokenizer.
        DataError: it is damaged.
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
    """What a run records of the checkpoint that it continues: run, step, and all tokens behind the weights."""
    before = progress.continues["tokens"] if progress.continues else 0
    return {"run": progress.run, "step": progress.step, "tokens": before + progress.tokens}


def check_tokens(directory: Path, data: PreparedData) -> None:
    """Refuse data whose token ids are not those that a checkpoint was trained with.

    Raises:
        ConfigError: the remedy names the tokenizer to use, where the run's is at hand.
        DataError: an earlier version wrote the checkpoint.
    """
    wanted = checkpoint.read_progress(directory).token_fingerprint
    if wanted != data.token_fingerprint:
        raise _other_tokens(directory, data, wanted, directory.parent.parent)


def _check_pretrained(directory: Path, source: str, data: PreparedData) -> str | None:
    """The same for a Hugging Face directory; what to say where it carries no tokenizer."""
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
    """The refusal of data that is not tokenised as the weights at `source` were; `files` may hold their tokenizer."""
    theirs = load_tokenizer(str(files)) if (files / TOKENIZER).is_file() else None
    its_own = f"with {data.tokenizer.name}" if data.tokenizer else "as generated text"
    cause = f"the data is tokenised {its_own}, and {source} was trained with another tokenizer"
    if data.tokenizer is None and theirs is None:
        cause = f"the data is generated by another chain than {source} was trained on"
    if theirs is None:
        return ConfigError(cause, "use the data that it was trained on, or its tokenizer (data.tokenizer=…)")
    return ConfigError(cause, f"use data.tokenizer={_place(files, theirs, wanted)}")


def _place(files: Path, tokenizer: Tokenizer, wanted: str) -> Path:
    """Where data.tokenizer finds the tokenizer with the hash `wanted`: its file, or the directory where
    tokenizer_config.json names an end token that the file alone does not tell."""
    alone = Tokenizer(tokenizer.json, tokenizer.name)
    return files / TOKENIZER if alone.hash == wanted else files
