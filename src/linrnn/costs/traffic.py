"""HBM traffic of a training step from formulas. Every operand is read once and every result written once.

This is the traffic of a perfect kernel of each scheme. Caches save nothing if the tensors are larger than the caches.
Tiles that are read again cost more. Scalars per token are left out.
"""

from linrnn.config.schema import LossConfig
from linrnn.losses.formulas import Bytes
from linrnn.losses.registry import FORMULAS_OF_LOSSES


def loss_traffic(loss: LossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> Bytes | None:
    """Bytes of HBM that both passes of a loss move; None if they depend on the data, or without formulas."""
    formulas = FORMULAS_OF_LOSSES.get(loss.name)
    if formulas is None or formulas.traffic is None:
        return None
    return formulas.traffic(loss, n_tokens, d, vocab, compute)
