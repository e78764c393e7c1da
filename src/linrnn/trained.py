"""A trained model and its tokenizer, from a run, a checkpoint or a Hugging Face directory in FLA's format."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from linrnn import checkpoint
from linrnn.architecture import resolve
from linrnn.config import read_config
from linrnn.config.schema import Config, MarkovDataConfig
from linrnn.data.markov import END
from linrnn.errors import ConfigError
from linrnn.models import LanguageModel, build_model, open_pretrained
from linrnn.tokenizer import Tokenizer, load_tokenizer

EMBEDDING = "model.embeddings.weight"


@dataclass
class Trained:
    """A model to use.

    Attributes:
        model: FLA's causal language model (a transformers `PreTrainedModel`), in evaluation mode.
        tokenizer: None for generated data, and where none was found.
        eos_id: the token that ends a document; None if there is none or it is not known.
        config: of the run; None for a Hugging Face directory.
        source: the directory that was read.
    """

    model: Any
    tokenizer: Tokenizer | None
    eos_id: int | None
    config: Config | None
    source: Path


def load_trained(source: str, device: torch.device) -> Trained:
    """Load what `source` names; nothing is fetched, and nothing but safetensors and JSON is read.

    Raises:
        ConfigError: there is neither a checkpoint nor a model.
        DataError: it is damaged.
    """
    path = Path(source)
    if directory := checkpoint.resolve(path):
        return _from_run(directory, device)
    if (path / "config.json").is_file():
        tokenizer = _tokenizer_in(path)
        model = open_pretrained(path, device)
        eos_id = tokenizer.eos_id if tokenizer else model.config.eos_token_id
        return Trained(model.eval(), tokenizer, eos_id, None, path)
    raise ConfigError(
        f"checkpoint={source} holds no complete checkpoint and no config.json",
        "name a run's directory, one of its checkpoints/step_*, or a directory that scripts/export.py wrote",
    )


def _from_run(directory: Path, device: torch.device) -> Trained:
    config = read_config(directory / "config.yaml")
    model = build(directory, config, device)
    tokenizer = _tokenizer_in(directory.parent.parent)
    generated = isinstance(config.data, MarkovDataConfig)
    eos_id = END if generated else tokenizer.eos_id if tokenizer else None
    return Trained(model.hf.eval(), tokenizer, eos_id, config, directory)


def build(directory: Path, config: Config, device: torch.device) -> LanguageModel:
    """The model of a checkpoint, in fp32. Its chunk size, a matter of speed in training, is FLA's own."""
    vocab_size = checkpoint.shapes(directory / checkpoint.TENSORS)[EMBEDDING][0]
    arch = resolve(dataclasses.replace(config.model, chunk_size=None), config.size, vocab_size)
    model = build_model(arch, device=device, seed=0)
    checkpoint.load_model(directory, model.hf)
    return model


def _tokenizer_in(directory: Path) -> Tokenizer | None:
    if not (directory / "tokenizer.json").is_file():
        return None
    return load_tokenizer(str(directory))
