"""Validation: one deterministic pass over held-out tokens. Results: nats per token, perplexity and bits per byte."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from linrnn.core.errors import DataError, DivergedError
from linrnn.data import Batch, BatchesOnce
from linrnn.distributed import Ranks
from linrnn.losses import IGNORE_INDEX, LossBackend
from linrnn.models import LanguageModel, tuning
from linrnn.models.language_model import loss_inputs
from linrnn.runs.metrics import bits_per_byte, perplexity


@dataclass
class Evaluation:
    """Result of :func:`evaluate`. `bits_per_byte` is None if the labels stand for no text."""

    loss_nats: float
    perplexity: float
    bits_per_byte: float | None
    n_tokens: int

    def check_finite(self, step: int) -> None:
        """Check the last validation of a run, after `step`.

        Raises:
            DivergedError: its loss is not finite.
        """
        if not math.isfinite(self.loss_nats):
            raise DivergedError(
                f"validation after step {step}: loss {self.loss_nats}",
                "lower optimizer.lr or optimizer.max_grad_norm, or raise schedule.warmup_steps, and start again with "
                "trainer.resume=never",
            )

    def metrics(self) -> dict[str, float | None]:
        """The results under their metric names."""
        return {
            "valid/loss_nats": self.loss_nats,
            "valid/perplexity": self.perplexity,
            "valid/bits_per_byte": self.bits_per_byte,
            "valid/tokens": self.n_tokens,
        }

    def __str__(self) -> str:
        text = f"loss {self.loss_nats:.4f}, perplexity {self.perplexity:.3f}"
        if self.bits_per_byte is not None:
            text += f", {self.bits_per_byte:.4f} bits per byte"
        return f"{text} over {self.n_tokens:,} tokens"


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    loss: LossBackend,
    batches: BatchesOnce,
    *,
    precision: str,
    device: torch.device,
    ranks: Ranks | None = None,
    before_batch: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Mean loss over every label of `batches` (each counts once), in evaluation mode.

    Args:
        batches: the same batches on all ranks.
        ranks: share the batches; each rank gets the same result.
        before_batch: called before every batch, equally often on all ranks. If it raises, the pass ends.

    Raises:
        DataError: no batch has a label.
    """
    ranks = ranks or Ranks()
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    done = n_tokens = 0
    n_batches = math.ceil(len(batches) / ranks.world_size)
    with tuning.during(lambda: f"evaluated {done:,} of {n_batches:,} batches"):
        for batch in ranks.share(batches, _without_labels):
            before_batch()
            output = loss(*loss_inputs(model, batch, precision, device))
            total += output.sum_nats.double()
            n_tokens += batch.n_tokens
            done += 1
        sum_nats, n_labels = ranks.sum_on_host(float(total), n_tokens)
    model.train()
    if not n_labels:
        raise DataError("the text to evaluate on has no token to predict", "give more text, or longer documents")
    nats = sum_nats / n_labels
    return Evaluation(
        loss_nats=nats,
        perplexity=perplexity(nats),
        bits_per_byte=bits_per_byte(sum_nats, batches.n_bytes),
        n_tokens=int(n_labels),
    )


def _without_labels(batch: Batch) -> Batch:
    return replace(batch, labels=torch.full_like(batch.labels, IGNORE_INDEX), n_tokens=0)
