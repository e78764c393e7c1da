"""A training step on a fixed batch, without a run: no data, no directory, no schedule."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from linrnn.data import Batch
from linrnn.distributed import Ranks
from linrnn.losses import LossBackend, check_capturable
from linrnn.models import LanguageModel
from linrnn.profiling import LossObserver
from linrnn.training.execution.cuda_graph import GraphedPasses
from linrnn.training.optimizer import clip_gradients
from linrnn.training.trainer import forward_backward


def random_batch(sequences: int, seq_len: int, vocab_size: int, seed: int) -> Batch:
    """Uniform tokens and their successors as labels, each (sequences, seq_len), on the CPU."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (sequences, seq_len + 1), generator=random)
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), None, sequences * seq_len)


class TrainingStep:
    """The steps of one model and one optimizer on one batch, with any loss.

    A step does what `linrnn.training.trainer.Trainer.train_step` does: forward, loss, backward, clipping, optimizer.

    Args:
        model: it trains. With several ranks it is parallelized already.
        replica: the model as the ranks share it; None: `model` itself.
        optimizer: of the model.
        batch: on the CPU. It is sent to the device in every step.
        tokens: labels of a step on all ranks.
        precision: `trainer.precision` without `auto`.
        max_grad_norm: `optimizer.max_grad_norm`.
        ranks: that share the step; None: this process alone.
    """

    def __init__(
        self,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        batch: Batch,
        *,
        tokens: int,
        precision: str,
        device: torch.device,
        max_grad_norm: float | None,
        replica: Any = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.model, self.optimizer, self.batch, self.tokens = model, optimizer, batch, tokens
        self.replica = model if replica is None else replica
        self.precision, self.device, self.max_grad_norm = precision, device, max_grad_norm
        self.ranks = ranks or Ranks()
        self.parameters = list(model.parameters())

    def __call__(self, loss: LossBackend, *observers: LossObserver) -> None:
        """One step. The host does not wait for the device, unless the loss does."""
        self.gradients(loss, *observers)
        self._update()

    def graphed(self, loss: LossBackend) -> Callable[[], None]:
        """A step whose passes are a CUDA graph, as with trainer.cuda_graph=true. Its first call captures them.

        The graph keeps the activations and gradients of the passes until the returned function is forgotten.
        """
        check_capturable(loss.config)  # a capture that fails may leave CUDA in a state that other losses' steps meet

        def passes(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            return self._passes(loss, batch)

        replayed = GraphedPasses(passes, self.parameters, self.batch, self.device, self.ranks.reshard)
        # Pinned once: a capture empties the cache of pinned memory, and allocating it anew may wait for the GPU.
        batch = self.batch
        if self.device.type == "cuda":
            batch = replace(batch, input_ids=batch.input_ids.pin_memory(), labels=batch.labels.pin_memory())

        def step() -> None:
            replayed(batch)
            self._update()

        return step

    def gradients(self, loss: LossBackend, *observers: LossObserver) -> Tensor:
        """Forward and backward pass. Returns this rank's share of the step's mean loss, in nats, on the device."""
        return self._passes(loss, self.batch, *observers)[0]

    def _passes(self, loss: LossBackend, batch: Batch, *observers: LossObserver) -> tuple[Tensor, dict[str, Tensor]]:
        return forward_backward(
            self.replica, loss, batch, n_tokens=self.tokens, scale=self.ranks.loss_scale, precision=self.precision,
            device=self.device, observers=observers,
        )  # fmt: skip

    def _update(self) -> None:
        self.clip()
        self.optimizer.step()
        self.drop_gradients()

    def clip(self) -> Tensor:
        """Clip the gradients. Returns their norm before, on the device."""
        return clip_gradients(self.parameters, self.max_grad_norm)

    def drop_gradients(self) -> None:
        """As between two steps."""
        self.ranks.zero_gradients(self.optimizer)
