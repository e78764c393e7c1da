"""Formulas of a loss's memory, traffic and products, for forecasts.

A formula takes (loss, N tokens, D dimensions, V tokens of the vocabulary, bytes per element of
hidden states, weight and logits).

* Memory: the peak bytes of the forward and of the backward pass beyond hidden states, weight and labels. The gradients
  of hidden states and weight are included. Every term is a tensor that the backend holds.
* Traffic: bytes of HBM, if every operand is read once and every result written once. Tiles that are read again cost
  more. Caches save nothing if tensors are larger than the caches.

Scalars per token are left out. E = N·D, W = V·D, L = N·V elements. A product reads two factors and writes its result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FP32, BF16 = 4, 2  # bytes
Bytes = tuple[int, int]  # (forward pass, backward pass)
Formula = Callable[[Any, int, int, int, int], Bytes]


def three_products(*_: Any) -> int:
    """The logits, and the gradients of both factors: nothing is computed twice."""
    return 3


@dataclass(frozen=True)
class LossFormulas:
    """The formulas of a loss. For a loss without them, forecasts say *unknown*.

    Attributes:
        memory: bytes of both passes.
        traffic: bytes of both passes; None if they depend on the data or on the tiling of other people's code.
        products: N x D x V products of both passes: 3, and 1 for every time that logits are computed again. Exact for
            losses that do not filter; a filter skips a share that depends on the data.
    """

    memory: Formula
    traffic: Formula | None = None
    products: Callable[[Any, int, int, int, int], int] = three_products


def logits_traffic(n_tokens: int, d: int, vocab: int, compute: int) -> tuple[int, int]:
    """Bytes of the logits' product, and of the logits."""
    logits = n_tokens * vocab * compute
    return (n_tokens + vocab) * d * compute + logits, logits


def traffic_in_chunks_of_tokens(
    chunks: int, fp32_gradient: bool, n_tokens: int, d: int, vocab: int, compute: int
) -> Bytes:
    """Traffic of a loss that computes all gradients in the forward pass.

    For each chunk the weight is read, and its gradient is read and written.
    """
    e, w, logits = n_tokens * d * compute, vocab * d * compute, n_tokens * vocab * compute
    gradient = vocab * d * FP32 if fp32_gradient else w
    # logits; softmax in place (read, written); dE; dC, added to that of earlier chunks
    return 3 * (e + logits) + 2 * logits + chunks * (2 * w + 2 * gradient), 0


def ceil_division(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def power_of_two_from(number: int) -> int:
    """The smallest power of two that is not below `number` (> 0)."""
    return 1 << (number - 1).bit_length()
