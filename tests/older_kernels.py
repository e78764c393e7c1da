"""The default workspace of the kernels that the committed runs were measured with, before commit ab6bf2f."""

import math
from dataclasses import replace

from linrnn.config.schema import LossConfig
from linrnn.losses.cce import CceKahanLossConfig

MIB = 2**20


def third_of_the_logits(loss: LossConfig, n: int, d: int, v: int) -> LossConfig:
    """The loss with the default workspace of the committed runs: the exponentials of a third of the token rows, or all
    that fit 256 MiB with their sums."""
    if type(loss) is not CceKahanLossConfig or loss.workspace_mib is not None:
        return loss
    rows = math.ceil(math.ceil(n / 3) / 128) * 128
    sums = ((n + v) * d + 2 * rows * d) / MIB
    return replace(loss, workspace_mib=max(256.0, 2 * rows * v / MIB, sums))


def further_bytes(n: int, d: int, v: int) -> int:
    """Bytes that those kernels held in the backward pass, and today's do not: fp32 sums of the targets' gradients, and
    with one chunk the rounding errors of sums."""
    one_chunk = 2 * n * v <= 256 * MIB
    return n * d * 4 // 16 + ((n + v) * d if one_chunk else 0)
