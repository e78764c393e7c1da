"""Before the first step: compile the kernels of the model on all cores. One after the other they take half a minute."""

from typing import Any

import torch

from linrnn.config.schema import Config, FlaModelConfig
from linrnn.core.machine import cores_of_rank, seconds_since_start
from linrnn.data import Batch
from linrnn.losses import LossBackend
from linrnn.models import tuning
from linrnn.models.facts import FACTS
from linrnn.profiling import watched_loss
from linrnn.training.build import BuiltRun
from linrnn.training.runtime import loss_inputs


def compile_kernels(run: BuiltRun) -> None:
    """Rehearse the forward and backward pass of a step on a GPU, so that all its kernels are compiled at once.

    A loss takes part if it is `rehearsable`.
    """
    if not rehearses(run.config, run.device):
        return
    with tuning.compile_ahead(cores_of_rank()):
        rehearse_step(run)
    torch.cuda.empty_cache()
    run.seconds_to["kernels"] = seconds_since_start()


def rehearses(config: Config, device: torch.device) -> bool:
    """Whether a run's kernels are compiled ahead.

    Not those of a model that has no file in linrnn.models.zoo: it may index tensors by what its kernels have written,
    as sparse attention does. Nor those of a model that torch.compile compiles.
    """
    name = config.model.config if isinstance(config.model, FlaModelConfig) else config.model.name
    return device.type == "cuda" and config.trainer.compile == "none" and name in FACTS


def rehearse_step(run: BuiltRun) -> None:
    """Rehearse a step with the next batch. Nothing that the run computes later depends on it."""
    position = run.loader.state_dict()
    batch = next(run.loader)
    run.loader.load_state_dict(position)
    with torch.random.fork_rng(devices=[run.device] if run.device.type == "cuda" else []):
        rehearse(run.replica, batch, run.precision, run.device, run.loss)
    run.ranks.zero_gradients(run.optimizer)


def rehearse(model: Any, batch: Batch, precision: str, device: torch.device, loss: LossBackend | None = None) -> None:
    """One forward and backward pass.

    Without a `rehearsable` loss the sum of all hidden states and of the head takes its place.
    """
    inputs = loss_inputs(model, batch, precision, device)
    if loss is None or not loss.rehearsable:
        (inputs[0].sum() + inputs[1].sum()).backward()
        return
    with loss.rehearsal():
        watched_loss(loss, *inputs).sum_nats.backward()
