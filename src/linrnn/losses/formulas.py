"""What forecasts may know of a loss: formulas of its memory, its traffic and its products.

A formula takes (loss, N tokens, D dimensions, V entries, bytes of an element of hidden states, weight and logits).

* Memory is the most that the forward and the backward pass hold beyond hidden states, weight and labels, in bytes. The
  gradients of hidden states and weight are included. Every term is a tensor that the backend holds.
* Traffic is bytes of HBM: every operand read once, every result written once. Tiles that are read again cost more. A
  cache saves nothing where tensors are larger than it.

Scalars per token are left out. E = N·D, W = V·D, L = N·V elements; a product reads two factors and writes its result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FP32, BF16 = 4, 2  # bytes
Bytes = tuple[int, int]  # of the forward and of the backward pass
Formula = Callable[[Any, int, int, int, int], Bytes]


def three_products(*_: Any) -> int:
    """Nothing is computed twice: the logits, and the gradients of both factors."""
    return 3


@dataclass(frozen=True)
class LossFormulas:
    """The formulas of a loss; a loss without them is *unknown* to forecasts.

    Attributes:
        memory: bytes of both passes.
        traffic: bytes of both passes; None where it depends on the data or on blocks of another's code.
        products: N x D x V products of both passes: 3, or 4 where the logits are computed again in the backward pass.
            Exact for losses that do not filter: a filter skips a share that depends on the data.
        freed: what the backward pass has let go of before it is at its peak: nothing | hidden (the hidden states) |
            inputs (the head as well).
    """

    memory: Formula
    traffic: Formula | None = None
    products: Callable[[Any, int, int, int, int], int] = three_products
    freed: str = "nothing"


def logits_traffic(n_tokens: int, d: int, vocab: int, compute: int) -> tuple[int, int]:
    """(the logits' product, the logits), bytes."""
    logits = n_tokens * vocab * compute
    return (n_tokens + vocab) * d * compute + logits, logits


def traffic_in_chunks_of_tokens(
    chunks: int, fp32_gradient: bool, n_tokens: int, d: int, vocab: int, compute: int
) -> Bytes:
    """Of a loss that makes all gradients in the forward pass.

    The weight is read and its gradient read and written once a chunk.
    """
    e, w, logits = n_tokens * d * compute, vocab * d * compute, n_tokens * vocab * compute
    gradient = vocab * d * FP32 if fp32_gradient else w
    # logits; softmax in place (read, written); dE; dC, added to what the earlier chunks gave
    return 3 * (e + logits) + 2 * logits + chunks * (2 * w + 2 * gradient), 0


def ceil_division(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def power_of_two_from(number: int) -> int:
    """The smallest power of two that is not below `number` (> 0)."""
    return 1 << (number - 1).bit_length()
