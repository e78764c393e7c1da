"""What a run starts from: its data, its directory, and state: its own newest checkpoint's, or another run's.

`init_from` takes weights alone, `continue_from` the whole state of another run. Weights know token ids, not text: they
are useful only if the data's ids mean the same as in their training.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from linrnn.config import read_config
from linrnn.config.schema import Config
from linrnn.config.steps import ending_at
from linrnn.core.errors import ConfigError
from linrnn.core.output import say
from linrnn.data import BatchLoader, PreparedData, prepare
from linrnn.data.tokenizer import load_tokenizer
from linrnn.distributed import Launch, Ranks
from linrnn.models import (
    LanguageModel,
    check_dimensions,
    check_finite,
    find_pretrained,
    load_weights,
    pretrained_vocab_size,
)
from linrnn.models.architecture import Architecture, resolve
from linrnn.models.build import WHOLE, RowShard
from linrnn.runs.directory import ASIDE, RunDirectory
from linrnn.runs.summary import finished_lines
from linrnn.training import checkpoint
from linrnn.training.plan import Plan

TOKENIZER = "tokenizer.json"
EMBEDDING = ".embeddings.weight"  # the end of its name; what precedes depends on the model


def prepared_data(config: Config, ranks: Ranks) -> PreparedData:
    """The run's data. The first rank prepares it; one rank of each machine compares all of it with the recorded hashes.

    Raises:
        DataError: the data is unusable or altered.
    """

    def prepared() -> PreparedData:
        data = prepare(config.data) if ranks.is_first else prepare(config.data, lambda line: None)
        if config.data.verify and Launch.from_environment().local_rank == 0:
            data.verify()
        return data

    return ranks.first_then_others(prepared)


# ---------------------------------------------------------------------------------------------- the run's own files
def finished(directory: RunDirectory, plan: Plan, data: PreparedData) -> dict[str, Any] | None:
    """The summary if the run has nothing left to do, else None. Prints how to go on; writes nothing.

    Raises:
        ConfigError: the run has more steps than this command asks for, or was finished on other data.
    """
    summary = None if directory.begins_anew else directory.read_summary()
    if summary is None or summary["status"] != "finished":
        return None
    _check_not_beyond(summary["steps"], plan, directory)
    if summary["steps"] < plan.total_steps:
        return None  # its checkpoint tells other data
    if summary.get("data_fingerprint") not in (None, data.fingerprint):
        raise ConfigError(
            f"{directory.path} holds a finished run on other data: text, tokenizer or options have changed",
            f"{directory.another_name} begins another run; {ASIDE}",
        )
    for line in finished_lines(plan.config, directory, summary["steps"], plan.horizon):
        say(line)
    return summary


def restore(
    plan: Plan,
    ranks: Ranks,
    directory: RunDirectory,
    data: PreparedData,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: BatchLoader,
) -> tuple[str, checkpoint.Progress] | None:
    """Restore the newest undamaged checkpoint of the run, or what `continue_from` names; None: neither is there.

    Every rank calls it, and reads its own part of model and optimizer. It only reads, so that an error leaves the
    directory as it is.

    Returns:
        a line for the user, and the progress of this run: step 0 behind `continue_from`.

    Raises:
        ConfigError: the run has more steps than this command asks for, or `continue_from` names no checkpoint, another
            model or another tokenizer.
        DataError: the checkpoint is damaged.
    """
    newest = None if directory.begins_anew else ranks.from_first(lambda: checkpoint.newest(directory.checkpoints))
    if newest:
        progress = checkpoint.read_progress(newest)
        _check_not_beyond(progress.step, plan, directory)
        loader.load_state_dict(progress.data)
        checkpoint.load(newest, model, optimizer)
        return f"resuming at step {progress.step} from {newest}", progress
    if not (source := plan.config.continue_from):
        return None
    remedy = "init_from= takes weights alone, as of an export; name a run's directory or one of its checkpoints/step_*"
    there = checkpoint.required("continue_from", source, remedy)
    progress = checkpoint.read_progress(there)
    check_tokens(there, data)
    _check_model(f"continue_from={source}", there, plan.architecture(data.vocab_size))
    checkpoint.load_model(there, model)
    check_finite(model.state_dict(), f"continue_from={source}")
    checkpoint.load_optimizer(there, model, optimizer)
    moved = "goes on where it stood" if loader.go_on_after(progress.data) else "begins anew, in its own order"
    line = (
        f"continuing {progress.run} after step {progress.step}: its weights and optimizer state, under a plan of "
        f"{plan.total_steps} steps; the data {moved}"
    )
    before = progress.continues["tokens"] if progress.continues else 0  # all tokens behind the weights count
    continues = {"run": progress.run, "step": progress.step, "tokens": before + progress.tokens}
    return line, replace(progress, step=0, recent_losses=[], continues=continues)


def starting_again(directory: RunDirectory) -> str | None:
    """A line that says why a run begins again at step 0; None for a new run."""
    if not directory.resumed:
        return None
    damaged = ", ".join(path.name for path in checkpoint.found(directory.checkpoints))
    why = f"no checkpoint of this run is sound ({damaged})" if damaged else "this run left no checkpoint"
    return f"{why}: starting again at step 0"


def _check_not_beyond(step: int, plan: Plan, directory: RunDirectory) -> None:
    if step > plan.total_steps:
        raise ConfigError(
            f"{directory.path} holds a run of {step} steps, and this command stops at {plan.total_steps}",
            f"use {ending_at(step, plan.config)}, or {directory.another_name} for another run",
        )


# ---------------------------------------------------------------------------------------------------- other weights
@dataclass(frozen=True)
class Weights:
    """Weights from a run's checkpoint or from a Hugging Face directory.

    Attributes:
        source: the value of `init_from`.
        directory: the checkpoint, or the Hugging Face directory.
        is_checkpoint: which of the two `directory` is.
        remark: a line for the log about what is unknown about their tokens; None if there is nothing to say.
    """

    source: str
    directory: Path
    is_checkpoint: bool
    remark: str | None = None

    def check(self, arch: Architecture) -> None:
        """Check that the weights fit a model of `arch`, before it is built. :meth:`load` checks an export.

        Raises:
            ConfigError: a run's model or dimensions differ.
        """
        if self.is_checkpoint:
            _check_model(f"init_from={self.source}", self.directory, arch)

    def load(self, model: LanguageModel, row_shard: RowShard = WHOLE) -> None:
        """Copy the weights into `model`.

        Args:
            row_shard: the rows of each parameter that `model` holds.

        Raises:
            ConfigError: the weights are for another architecture.
            DataError: a file cannot be read, or a weight is NaN or infinite.
        """
        if self.is_checkpoint:
            checkpoint.load_model(self.directory, model.hf)
            check_finite(model.hf.state_dict(), f"init_from={self.source}")
        else:
            load_weights(model, self.directory, self.source, row_shard)


def find_weights(source: str, data: PreparedData) -> Weights:
    """The weights that `init_from` names, after a check that they fit the tokens of `data`.

    Args:
        source: a run's directory (its newest checkpoint), a checkpoint, a Hugging Face directory in FLA's format, or
            the name of one on the hub.

    Raises:
        ConfigError: the weights were trained with another tokenizer.
        DataError: `source` has no weights, or they are damaged.
    """
    if there := checkpoint.resolve(Path(source)):
        check_tokens(there, data)
        return Weights(source, there, is_checkpoint=True)
    directory = find_pretrained(source)
    if (directory / TOKENIZER).is_file():
        wanted = load_tokenizer(str(directory)).hash
        if data.tokenizer is None or data.tokenizer.hash != wanted:
            raise _other_tokens(source, data, directory)
        return Weights(source, directory, is_checkpoint=False)
    entries, lacks = pretrained_vocab_size(directory, source), f"init_from={source} carries no tokenizer"
    if entries != data.vocab_size:
        raise ConfigError(
            f"{lacks}, and has a vocabulary of {entries:,} where the data has {data.vocab_size:,}: its ids stand for "
            "other text",
            f"put the {TOKENIZER} of its training beside its config.json, and use data.tokenizer={source}",
        )
    remark = f"{lacks}: whether its {entries:,} ids are those of the data is not known"
    return Weights(source, directory, is_checkpoint=False, remark=remark)


def _check_model(given: str, directory: Path, arch: Architecture) -> None:
    """Reject a checkpoint of another model, also one whose parameters have the same names and shapes."""
    check_dimensions(given, trained_architecture(directory, read_config(directory / checkpoint.CONFIG)), arch)


def trained_architecture(directory: Path, config: Config) -> Architecture:
    """The model of a checkpoint. Chunk size only affects the speed of training, so FLA's default is used."""
    return resolve(replace(config.model, chunk_size=None), config.size, vocab_size(directory))


def vocab_size(directory: Path) -> int:
    """The vocabulary size of a checkpoint's model; the data's may be smaller."""
    shapes = checkpoint.shapes(directory)
    return next(shape[0] for name, shape in shapes.items() if name.endswith(EMBEDDING))


def check_tokens(directory: Path, data: PreparedData) -> None:
    """Reject data whose token ids differ from those that a checkpoint was trained with.

    Raises:
        ConfigError: the ids differ. The remedy names the tokenizer to use, if the run's tokenizer is there.
        DataError: the checkpoint cannot be read.
    """
    if checkpoint.read_progress(directory).token_fingerprint != data.token_fingerprint:
        raise _other_tokens(directory, data, directory.parent.parent)


def _other_tokens(source: str | Path, data: PreparedData, files: Path) -> ConfigError:
    """The error for data with another tokenizer than the weights at `source`; `files` may hold their tokenizer."""
    theirs = files / TOKENIZER
    its_own = f"with {data.tokenizer.name}" if data.tokenizer else "as generated text"
    cause = f"the data is tokenised {its_own}, and {source} was trained with another tokenizer"
    if theirs.is_file():
        text = "" if data.tokenizer else "text (data=text data.path=…) and "
        return ConfigError(cause, f"use {text}data.tokenizer={theirs}")
    if data.tokenizer is None:
        cause = f"the data is generated by another chain than {source} was trained on"
    return ConfigError(cause, "use the data that it was trained on, or its tokenizer (data.tokenizer=…)")
