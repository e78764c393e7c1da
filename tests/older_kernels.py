"""The default workspace of the kernels that the committed runs were measured with, before commit ab6bf2f."""

import math
from dataclasses import replace

from cce_kernels.planner import splits_alone

from linrnn.config.schema import LossConfig
from linrnn.losses.cce import CceKahanLossConfig

MIB = 2**20
MULTIPROCESSORS = 132  # of an H100 and an H200


def third_of_the_logits(loss: LossConfig, n: int, d: int, v: int) -> LossConfig:
    """The loss with the default workspace of the committed runs: the exponentials of a third of the token rows, or all
    that fit 256 MiB with their sums."""
    if type(loss) is not CceKahanLossConfig or loss.workspace_mib is not None:
        return loss
    rows = math.ceil(math.ceil(n / 3) / 128) * 128
    sums = ((n + v) * d + 2 * rows * d) / MIB
    return replace(loss, workspace_mib=max(256.0, 2 * rows * v / MIB, sums))


def further_bytes(n: int, d: int, v: int) -> int:
    """Bytes that those kernels held in the backward pass, and today's do not: fp32 sums of the targets' gradients. With
    one chunk also the rounding errors of sums, and e times its factors where these lie in dE's memory today."""
    one_chunk = 2 * n * v <= 256 * MIB
    lent = 2 * n * d if splits_alone(n, d, MULTIPROCESSORS) == 1 else 0
    return n * d * 4 // 16 + ((n + v) * d + lent if one_chunk else 0)
