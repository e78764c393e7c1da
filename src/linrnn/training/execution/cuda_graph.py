"""`trainer.cuda_graph=true`: a step's forward and backward pass, captured once and then replayed by one launch.

A small model's step is many short kernels, and the GPU waits for the host to launch them. A replay launches the same
kernels with the same arguments, so losses stay the same bit for bit. The pass is captured in the last step of the
warm-up (`trainer.warmup_measurement_steps`), when all its kernels are compiled. Gradient clipping and the optimizer run
as always.

With several ranks each captures its own graph. The collectives that gather parameters and sum gradients are part of the
graph, so the ranks' GPUs wait for each other and no host launches a collective.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from linrnn.config.schema import Config, FsdpConfig
from linrnn.core.errors import ConfigError, UnsupportedError, first_line, ran_out_of_memory
from linrnn.data import Batch
from linrnn.losses import check_capturable
from linrnn.training.runtime import synchronize

Passes = Callable[[Batch], tuple[Tensor, dict[str, Tensor]]]
WHAT = "trainer.cuda_graph=true"
OFF = "use trainer.cuda_graph=false"


def check_cuda_graph(config: Config, device: torch.device, world_size: int, total_steps: int) -> None:
    """Reject what cannot be captured.

    Raises:
        UnsupportedError: the device is a CPU, or the loss's host may wait for the GPU.
        ConfigError: a key of the configuration changes the passes from step to step, or was not tried with a graph.
    """
    if device.type != "cuda":  # first: no other remedy would help
        raise UnsupportedError(f"{WHAT} needs a GPU, and this run is on the CPU", OFF)
    trainer, parallel = config.trainer, config.parallel
    groups = isinstance(parallel, FsdpConfig) and parallel.ranks_of_model(world_size) < world_size
    early = min(trainer.warmup_measurement_steps, total_steps - 1) < 2
    again = "a replay overwrites the gradients of the micro-step before"
    warm_up = "the last step of the warm-up is captured, and the first one compiles kernels"
    random = "activation checkpointing reads the state of the random numbers, which a capture forbids"
    for found, cause, remedy in (
        (parallel.name == "ddp" and world_size > 1, "parallel=ddp was not tried with a CUDA graph", "parallel=fsdp"),
        (groups, "several groups of ranks were not tried with a CUDA graph", f"parallel.shard_ranks={world_size}"),
        (trainer.accumulation_steps > 1, again, "trainer.accumulation_steps=1"),
        (config.data.reset_at_document, "every batch gets other sequences", "data.reset_at_document=false"),
        (trainer.activation_checkpointing != "none", random, "trainer.activation_checkpointing=none"),
        (trainer.compile != "none", f"trainer.compile={trainer.compile} was not tried with it", "trainer.compile=none"),
        (early, warm_up, "trainer.warmup_measurement_steps=2 or more and at least three steps"),
    ):
        if found:
            raise ConfigError(f"{WHAT}: {cause}", f"use {remedy}, or trainer.cuda_graph=false")
    check_capturable(config.loss)


class GraphedPasses:
    """The passes of a micro-step on tensors at fixed addresses.

    Args:
        passes: forward and backward pass of one batch on the GPU: leaves gradients, returns the loss and statistics.
        parameters: of the model. Their gradients are the same tensors after every replay.
        batch: one of this run's batches; all others have its shape.
        reshard: frees gathered parameters (`Ranks.reshard`). It is called before the capture, so that the graph
            gathers parameters, and before every replay, so that no later pass uses parameters gathered before it.
    """

    def __init__(
        self,
        passes: Passes,
        parameters: Sequence[nn.Parameter],
        batch: Batch,
        device: torch.device,
        reshard: Callable[[], None],
    ) -> None:
        self._passes, self._parameters, self._reshard = passes, parameters, reshard
        self._ids, self._labels = (tensor.to(device) for tensor in (batch.input_ids, batch.labels))
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """As `passes`. The first call captures them. The results are overwritten by the next call.

        The graph keeps the memory of its activations, gradients and results as long as this object lives.

        Raises:
            UnsupportedError: an operation cannot be captured, for example because the host waits for its result.
        """
        for there, tensor in ((self._ids, batch.input_ids), (self._labels, batch.labels)):
            there.copy_(tensor.pin_memory() if there.is_cuda else tensor, non_blocking=True)
        self._reshard()
        if self._graph is None:
            self._graph = self._captured(batch)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._results

    def drop(self) -> None:
        """Free the graph: the ranks cannot leave NCCL while it holds their collectives.

        A rank that freed its graph while collectives waited for a lost rank hung on two H200s. So did the thread of
        :mod:`linrnn.distributed.watch`, which had to end it. So a rank waits for its GPU first, without Python's lock.
        """
        with contextlib.suppress(RuntimeError):  # the device's error has ended the run already
            synchronize(self._ids.device)
        self._graph = None

    def _captured(self, batch: Batch) -> torch.cuda.CUDAGraph:
        """Nothing is computed here: kernels are recorded. Other threads may go on with their own work."""
        for parameter in self._parameters:
            parameter.grad = None
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._ids.device) if self._ids.is_cuda else None
        try:
            # A capture that fails leaves its own stream as the current one; the outer block takes this one back.
            with torch.cuda.stream(stream), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._results = self._passes(Batch(self._ids, self._labels, None, batch.n_tokens))
        except RuntimeError as error:
            if ran_out_of_memory(error):
                raise
            raise UnsupportedError(
                f"{WHAT}: the model or the loss does what a CUDA graph cannot hold ({first_line(error)})", OFF
            ) from error
        self._gradients = [parameter.grad for parameter in self._parameters]
        return graph
