"""Read a run's model with its validation text, for benchmarks and the study."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from linrnn.config import data_for, read_config
from linrnn.config.schema import Config
from linrnn.data import Batch, BatchesOnce, PreparedData
from linrnn.inference.load import build, directory_of_tokenizer, open_data
from linrnn.models import LanguageModel, check_supported
from linrnn.training import checkpoint
from linrnn.training.runtime import resolve_device, resolve_precision


@dataclass
class Reading:
    """A run's model, and the validation split that it reads.

    Attributes:
        directory: the checkpoint.
        config: the run's configuration, with the data and the device used for reading.
        model: in fp32 and evaluation mode.
        precision: the run's precision, as resolved on `device`.
    """

    directory: Path
    config: Config
    model: LanguageModel
    data: PreparedData
    precision: str
    device: torch.device

    @property
    def step(self) -> int:
        """Optimizer steps behind the checkpoint."""
        return checkpoint.read_progress(self.directory).step

    def batches(self, max_tokens: int | None) -> Sequence[Batch]:
        """The first `max_tokens` labels of the validation split (None: all), in sequences of the run's length."""
        trainer = self.config.trainer
        return BatchesOnce(
            self.data.valid,
            seq_len=trainer.seq_len,
            batch_size=trainer.batch_size,
            max_tokens=max_tokens,
            reset_at_document=self.config.data.reset_at_document,
        )


def open_reading(key: str, source: str, overrides: Sequence[str], device: str) -> Reading:
    """Load a run's model, and its data with `overrides` applied.

    Args:
        key: the configuration key that names `source`, for messages.
        source: a run's directory (its newest checkpoint) or a checkpoint.
        overrides: of the group `data`; see :func:`linrnn.config.data_for`.

    Raises:
        ConfigError: there is no checkpoint, an override is wrong, or the data's tokens are not the model's.
        UnsupportedError: the model cannot run here.
        DataError: the checkpoint or the data is damaged.
    """
    directory = checkpoint.required(key, source)
    config = dataclasses.replace(read_config(directory / "config.yaml"), device=device)
    where = resolve_device(device)
    check_supported(config.model, where)
    data = data_for(config.data, overrides, directory_of_tokenizer(directory))
    prepared = open_data(directory, config.data, data)
    config = dataclasses.replace(config, data=data)
    model = build(directory, config, where)
    model.eval()
    return Reading(directory, config, model, prepared, resolve_precision(config.trainer.precision, where), where)
