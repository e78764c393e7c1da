"""Before the first step: compile the kernels of the model on all cores. One after the other they take half a minute."""

import contextlib
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from linrnn.config.schema import Config, FlaModelConfig, FsdpConfig
from linrnn.core.errors import LinrnnError, described, ran_out_of_memory
from linrnn.core.machine import cores, ranks_here
from linrnn.data import Batch
from linrnn.distributed import Ranks
from linrnn.losses import LossBackend
from linrnn.models import tuning
from linrnn.models.facts import facts_of
from linrnn.models.language_model import compute_dtype, loss_inputs
from linrnn.training.runtime import synchronize


def compiles_ahead(config: Config, device: torch.device) -> bool:
    """Whether a run's kernels are compiled ahead.

    Not those of a model that torch.compile compiles. Nor, where ranks share one model, those of a model that has no
    CPU form: nobody has rehearsed it there, and an error would end the run.
    """
    if device.type != "cuda" or config.trainer.compile != "none":
        return False
    name = config.model.config if isinstance(config.model, FlaModelConfig) else config.model.name
    return facts_of(name).cpu is not None or not isinstance(config.parallel, FsdpConfig)


def compile_kernels(
    replica: Any,
    batch: Batch,
    ranks: Ranks,
    precision: str,
    device: torch.device,
    say: Callable[[str], None],
    loss: LossBackend | None = None,
) -> bool:
    """Compile all kernels of a step. Returns whether its rehearsal came to its end.

    A rehearsal may read what no kernel has written. Then one line says so, and the kernels are compiled in the step
    itself. The step raises the same error if it has another cause. Ranks that share one model rehearse together: one of
    them cannot give up alone, so any error is raised.

    Args:
        batch: one of the run's, of the shape of all.
        say: prints the line.
        loss: compiles its own kernels, too.

    Raises:
        LinrnnError: the rehearsal raised it.
        RuntimeError: memory ran out, or the GPU is unusable for this process (an illegal memory access).
    """
    failed = ""
    try:
        with tuning.compile_ahead(max(1, cores() // ranks_here())):
            rehearse(replica, batch, ranks, precision, device)
            synchronize(device)
        if loss and loss.compiles_ahead:
            head, n_tokens = getattr(replica, "module", replica).head_weight, batch.input_ids.numel()
            zeros = partial(torch.zeros, dtype=compute_dtype(precision), device=device, requires_grad=True)
            labels = torch.zeros(n_tokens, dtype=torch.int64, device=device)
            loss(zeros(n_tokens, head.shape[1]), zeros(head.shape), labels).sum_nats.backward()
    except Exception as error:
        if ranks.row_shard or isinstance(error, LinrnnError) or ran_out_of_memory(error):
            raise
        synchronize(device)
        failed = described(error)
    if failed:
        say(f"the step compiles its kernels one by one: compiling ahead failed ({failed})")
        gc.collect()  # the error's frames, which hold tensors
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return not failed


def rehearse(replica: Any, batch: Batch, ranks: Ranks, precision: str, device: torch.device) -> None:
    """A forward and backward pass.

    Nothing that the run computes later depends on it. The model's buffers keep their values, even if it counts its
    steps in them. The sum of all hidden states and of the head takes the place of the loss. Ranks with a whole model
    each (DDP) do not sum their gradients here, so that each of them can fail alone.
    """
    buffers = [(name.rpartition("."), buffer, buffer.clone()) for name, buffer in replica.named_buffers()]
    alone = contextlib.nullcontext() if ranks.row_shard else ranks.no_sync(replica)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), alone:
            hidden, weight, _ = loss_inputs(replica, batch, precision, device)
            (hidden.sum() + weight.sum()).backward()
    finally:
        replica.zero_grad()
        with torch.no_grad():
            for (place, _, name), buffer, value in buffers:
                setattr(replica.get_submodule(place), name, buffer.copy_(value))
