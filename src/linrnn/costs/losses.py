"""The formulas of each loss backend by its name.

A new loss gets an entry in `FORMULAS_OF_LOSSES`. Without one its memory, traffic and time are unknown (None): no other
loss's formula takes the place of its own, whatever class its options have.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from linrnn.config.schema import LossConfig
from linrnn.costs.cce import cce_memory, cce_scheme, cce_traffic
from linrnn.costs.loss_memory import (
    cce_apple_memory,
    compiled_memory,
    fla_memory,
    liger_memory,
    standard_memory,
    torch_native_memory,
)
from linrnn.costs.traffic import compiled_traffic, fla_traffic, liger_traffic, standard_traffic

Bytes = tuple[int, int]  # of the forward and of the backward pass


@dataclass(frozen=True)
class LossFormulas:
    """Formulas that take (loss, N tokens, D dimensions, V entries, bytes of an element).

    Attributes:
        memory: see :mod:`linrnn.costs.loss_memory`.
        traffic: see :mod:`linrnn.costs.traffic`; None where it depends on the data or on blocks of another's code.
        products: N x D x V products of both passes: 3, or 4 where the logits are computed again in the backward pass.
            Exact for losses that do not filter: a filter skips a share that depends on the data.
        freed: what the backward pass has let go of before it is at its peak: nothing | hidden (the hidden states) |
            inputs (the head as well).
    """

    memory: Callable[[Any, int, int, int, int], Bytes]
    traffic: Callable[[Any, int, int, int, int], Bytes] | None
    products: Callable[[Any, int, int, int, int], int]
    freed: str = "nothing"


def _three(*_: Any) -> int:
    return 3


FORMULAS_OF_LOSSES = {
    "standard": LossFormulas(standard_memory, standard_traffic, _three),
    "compiled": LossFormulas(compiled_memory, compiled_traffic, _three, "hidden"),
    "liger": LossFormulas(liger_memory, liger_traffic, _three, "inputs"),
    "fla": LossFormulas(fla_memory, fla_traffic, _three, "inputs"),
    "torch_native": LossFormulas(torch_native_memory, None, lambda loss, *_: 4 if loss.reduction == "none" else 3),
    "cce_apple": LossFormulas(cce_apple_memory, None, lambda loss, *_: 3 if loss.variant == "torch_compile" else 4),
    "cce_kahan": LossFormulas(cce_memory, cce_traffic, lambda *shape: cce_scheme(*shape).products),
    "cce_filter": LossFormulas(cce_memory, None, lambda *shape: cce_scheme(*shape).products),
}


def loss_memory(loss: LossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> Bytes | None:
    """The most that both passes of a loss hold beyond their inputs, bytes; None for a loss without formulas.

    Args:
        compute: bytes of an element of hidden states, weight and logits.
    """
    formulas = FORMULAS_OF_LOSSES.get(loss.name)
    return None if formulas is None else formulas.memory(loss, n_tokens, d, vocab, compute)


def loss_traffic(loss: LossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> Bytes | None:
    """Bytes of HBM that both passes of a loss move; None where it depends on the data, or without formulas."""
    formulas = FORMULAS_OF_LOSSES.get(loss.name)
    if formulas is None or formulas.traffic is None:
        return None
    return formulas.traffic(loss, n_tokens, d, vocab, compute)
