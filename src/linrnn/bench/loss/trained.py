"""Problems from a trained model: its hidden states, its head and the labels of its validation split."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from linrnn.bench.loss.problems import Problem, Shape
from linrnn.config.schema import BenchLossConfig
from linrnn.core.errors import ConfigError
from linrnn.inference.load import Reading, open_reading
from linrnn.losses import IGNORE_INDEX
from linrnn.training.runtime import loss_inputs

TRAINED = "trained"  # stands where bench.loss.problems.KINDS stand


@dataclass(frozen=True, eq=False)
class TrainedTensors:
    """The inputs that a model gave to its loss, on the CPU: `batches` problems of `shape.n` labels each.

    Attributes:
        origin: run, step, sizes and precision, for a reader.
        hidden_ND: (batches N, D), in the model's compute dtype.
        weight_VD: (V, D), in the same dtype.
        labels_N: (batches N,).
    """

    shape: Shape
    origin: str
    hidden_ND: Tensor
    weight_VD: Tensor
    labels_N: Tensor

    def problem(
        self,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        gradient_dtype: torch.dtype | None = None,
        batch: int = 0,
    ) -> Problem:
        """One batch as a problem, the vocabulary in an order that `seed` draws.

        Tokenizers number frequent tokens first, and a filter by tiles would profit from this. Labels and head are
        permuted together, so the loss stays the same. Dtypes are those of `bench.loss.problems.make_problem`.
        """
        weight_VD, places_V = _permuted(self, seed, device)
        rows = slice(batch * self.shape.n, (batch + 1) * self.shape.n)
        leaves = [
            x.to(device, dtype).to(gradient_dtype or dtype, copy=True).requires_grad_()
            for x in (self.hidden_ND[rows], weight_VD)
        ]
        return Problem(leaves[0], leaves[1], places_V[self.labels_N[rows]].to(device), dtype)


@lru_cache(maxsize=1)
def _permuted(trained: TrainedTensors, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The head (V, D) on `device` in an order that `seed` draws, and each entry's place in that order (V,) on the CPU.

    All batches share both."""
    order = torch.randperm(trained.shape.v, generator=torch.Generator().manual_seed(seed))
    return trained.weight_VD[order].to(device), order.argsort()


def read_trained(config: BenchLossConfig, batches: int) -> TrainedTensors:
    """Run the model of `config.checkpoint` over the first batches x `config.tokens` labels of the validation split.

    Raises:
        ConfigError: there is no checkpoint, its tokens are not the data's, or the split has fewer labels.
        UnsupportedError: the model cannot run here.
        DataError: the checkpoint or the data is damaged.
    """
    assert config.checkpoint is not None
    reading = open_reading("checkpoint", config.checkpoint, config.data, config.device)
    return _tensors(reading, config.tokens, batches)


def _check_labels(reading: Reading, n_rows: int, batches: int, there: int) -> None:
    """Check that the validation split has enough labels.

    Raises:
        ConfigError: it has `there` labels, which are fewer than `batches` x `n_rows`.
    """
    if batches * n_rows > there:
        raise ConfigError(
            f"{batches} x {n_rows:,} labels (batches, tokens) are more than the {there:,} of the validation split of "
            f"{reading.data.description}",
            "lower tokens or batches, or name longer text: data=text data.valid_path=…",
        )


@torch.no_grad()
def _tensors(reading: Reading, n_rows: int, batches: int) -> TrainedTensors:
    """The first `batches` x `n_rows` rows with a label. The first token of a document may have none."""
    _check_labels(reading, n_rows, batches, reading.data.valid.n_tokens - 1)
    wanted = batches * n_rows
    hidden, labels, weight_VD = [], [], None
    for batch in reading.batches(None):
        hidden_ND, weight_VD, labels_N = loss_inputs(reading.model, batch, reading.precision, reading.device)
        counts_N = labels_N != IGNORE_INDEX
        hidden.append(hidden_ND[counts_N].cpu())
        labels.append(labels_N[counts_N].cpu())
        if sum(map(len, labels)) >= wanted:
            break
    _check_labels(reading, n_rows, batches, sum(map(len, labels)))
    assert weight_VD is not None
    weight_VD = weight_VD.cpu().clone()
    run, config = _run_directory(reading.directory), reading.config
    name = f"{run.parent.name}-{run.name}-step_{reading.step}-{n_rows}"
    origin = (
        f"{config.model.label} {config.size.name} after {reading.step:,} steps (run {run.parent.name}/{run.name}, "
        f"{reading.precision}), on the validation split of data={config.data.name}"
    )
    shape = Shape(name, n_rows, weight_VD.shape[1], weight_VD.shape[0])
    return TrainedTensors(shape, origin, torch.cat(hidden)[:wanted], weight_VD, torch.cat(labels)[:wanted])


def _run_directory(checkpoint: Path) -> Path:
    checkpoint = checkpoint.resolve()
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint
