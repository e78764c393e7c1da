"""Load a trained model from a run, a checkpoint or a Hugging Face directory in FLA's format, with tokenizer or data."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from linrnn.config import read_config
from linrnn.config.schema import Config, DataConfig, MarkovDataConfig
from linrnn.core.errors import ConfigError
from linrnn.data import PreparedData, prepare
from linrnn.data.markov import END
from linrnn.data.tokenizer import Tokenizer, load_tokenizer
from linrnn.models import BlankModel, LanguageModel, open_pretrained
from linrnn.models.architecture import Architecture
from linrnn.training import checkpoint
from linrnn.training.plan import check_reading_fits
from linrnn.training.runtime import resolve_device
from linrnn.training.starting import TOKENIZER, check_tokens, trained_architecture, vocab_size


@dataclass
class Trained:
    """A trained model.

    Attributes:
        model: FLA's causal language model (a transformers `PreTrainedModel`), in evaluation mode.
        tokenizer: None for generated data, and if none was found.
        eos_id: the token that ends a document; None if there is none or it is unknown.
        config: the run's configuration; None for a Hugging Face directory.
        source: the directory that was read.
    """

    model: Any
    tokenizer: Tokenizer | None
    eos_id: int | None
    config: Config | None
    source: Path

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without end tokens; token ids if there is no tokenizer."""
        kept = [token for token in tokens if token != self.eos_id]
        return self.tokenizer.decode(kept) if self.tokenizer else " ".join(map(str, kept))


def load_trained(source: str | Path, device: torch.device | str = "auto") -> Trained:
    """Load the model that `source` names. Nothing is downloaded, and only safetensors and JSON are read.

    Args:
        source: a directory that scripts/export.py wrote, a run's directory, or one of its checkpoints.
        device: `auto` is the GPU if there is one, else the CPU.

    Raises:
        UnsupportedError: there is no such device, or the model has no CPU form.
        ConfigError: there is neither a checkpoint nor a model.
        DataError: the model is damaged.
    """
    path, device = Path(source), resolve_device(device) if isinstance(device, str) else device
    if (path / "config.json").is_file():
        model = open_pretrained(path, device)  # compares checksums first
        tokenizer = _tokenizer_in(path)
        eos_id = tokenizer.eos_id if tokenizer else model.config.eos_token_id
        return Trained(model.eval(), tokenizer, eos_id, None, path)
    remedy = "name a directory that scripts/export.py wrote, a run's directory, or one of its checkpoints/step_*"
    return _from_run(checkpoint.required("checkpoint", str(source), remedy), device)


def _from_run(directory: Path, device: torch.device) -> Trained:
    config = read_config(directory / "config.yaml")
    arch = trained_architecture(directory, config)
    check_reading_fits(arch, device)
    model = read_model(directory, arch, device)
    model.set_softcap(config.loss.softcap)
    tokenizer = _tokenizer_in(directory.parent.parent)
    generated = isinstance(config.data, MarkovDataConfig)
    eos_id = END if generated else tokenizer.eos_id if tokenizer else None
    for settings in (model.hf.config, model.hf.generation_config):  # FLA's defaults: 1 begins a text, and 2 ends it
        settings.bos_token_id, settings.eos_token_id, settings.pad_token_id = None, eos_id, eos_id
    return Trained(model.hf.eval(), tokenizer, eos_id, config, directory)


def read_model(
    directory: Path, arch: Architecture, device: torch.device, dtype: torch.dtype = torch.float32
) -> LanguageModel:
    """The model of a checkpoint. No initial weights are drawn, because every parameter is read.

    Raises:
        ConfigError: names or shapes differ from those of `arch`.
        DataError: a file cannot be read.
    """
    model = BlankModel(arch, device=device, dtype=dtype).model
    checkpoint.load_model(directory, model.hf)
    return model


def open_data(directory: Path, own: DataConfig, data: DataConfig) -> PreparedData:
    """Data to read with the model of a checkpoint. The checkpoint's run was trained on `own`.

    Raises:
        ConfigError: the data's tokens are not the model's.
        DataError: the data is damaged or missing.
    """
    generated, its_own = (isinstance(one, MarkovDataConfig) for one in (data, own))
    if generated != its_own:
        kinds = "generated tokens", "text"
        raise ConfigError(
            f"data={data.name} gives {kinds[not generated]}, and {directory} was trained on {kinds[generated]}",
            "leave data out for the run's own, or choose data like it",
        )
    prepared = prepare(data)
    if prepared.tokenizer:  # not checked for generated text: a model may read the text of another chain
        check_tokens(directory, prepared)
    if prepared.vocab_size > (entries := vocab_size(directory)):
        raise ConfigError(
            f"data={data.name} has a vocabulary of {prepared.vocab_size:,}, the model of {directory} one of "
            f"{entries:,}",
            "leave data out for the run's own",
        )
    return prepared


def directory_of_tokenizer(of_checkpoint: Path) -> Path | None:
    """The directory of a checkpoint's run, if the run's tokenizer lies there."""
    run = of_checkpoint.parent.parent
    return run if (run / TOKENIZER).is_file() else None


def _tokenizer_in(directory: Path) -> Tokenizer | None:
    if not (directory / TOKENIZER).is_file():
        return None
    return load_tokenizer(str(directory))
