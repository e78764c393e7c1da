"""Formulas of a loss's memory and products, for forecasts.

A formula takes (loss, N tokens, D dimensions, V tokens of the vocabulary, bytes per element of
hidden states, weight and logits).

* Memory: the peak bytes of the forward and of the backward pass beyond hidden states, weight and labels. The gradients
  of hidden states and weight are included. Every term is a tensor that the backend holds.

Scalars per token are left out.
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
        products: N x D x V products of both passes: 3, and 1 for every time that logits are computed again. Exact for
            losses that do not filter; a filter skips a share that depends on the data.
    """

    memory: Formula
    products: Callable[[Any, int, int, int, int], int] = three_products


def ceil_division(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def power_of_two_from(number: int) -> int:
    """The smallest power of two that is not below `number` (> 0)."""
    return 1 << (number - 1).bit_length()
