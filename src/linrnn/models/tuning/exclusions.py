"""Configurations of FLA's kernels that are never used: too slow to compile, or compiled wrongly by Triton."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# FLA's activations are tried with up to 256 elements in a thread. From 64 on ptxas compiles them slowly, and the last
# for minutes.
ACTIVATIONS, MOST_ELEMENTS_OF_A_THREAD = "fla.modules.activations.ops", 32
# On Hopper four warps multiply with wgmma instructions. For tiles of 32 columns Triton 3.7.1 compiles this kernel
# wrongly: the GPU reports an illegal memory access (triton-lang/triton, issue 11366), or the gradients are not those of
# two warps. results/log/2026-11-28.md has the measurement.
GRADIENTS_OF_QK, WARPS_OF_WGMMA, NARROW = "fla.ops.common.chunk_o:chunk_bwd_kernel_dqkwg", 4, 32
# GLA's kernel for dv multiplies a chunk's scores by the output's gradients in IEEE fp32, so without tensor cores, and
# unrolls the product. With 128 tokens, two warps and 128 value dimensions each thread has 32,768 multiply-adds, which
# take minutes to compile. This is the most of any configuration with 64 tokens.
GRADIENTS_OF_V, UNROLLED_MULTIPLY_ADDS = "fla.ops.gla.chunk:chunk_gla_bwd_kernel_dv", 8192


def without_excluded(kernel: str, sizes: Mapping[str, Any], configs: Sequence[Any]) -> list[Any]:
    """The configurations that may be used.

    Args:
        kernel: its module and function, `module:function`.
        sizes: the arguments of the call that the kernel is tuned for, by name.
        configs: of the kernel's autotuner.
    """
    if kernel.startswith(f"{ACTIVATIONS}:"):
        return [config for config in configs if config.kwargs["B"] <= MOST_ELEMENTS_OF_A_THREAD * 32 * config.num_warps]
    if kernel == GRADIENTS_OF_V:
        of_thread = UNROLLED_MULTIPLY_ADDS * 32
        return [c for c in configs if sizes["BT"] ** 2 * c.kwargs["BV"] <= of_thread * c.num_warps]
    if kernel == GRADIENTS_OF_QK and sizes["BK"] <= NARROW and _on_hopper():
        return [config for config in configs if config.num_warps < WARPS_OF_WGMMA]
    return list(configs)


def _on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
