"""`model.chunk_size`: how many tokens FLA's recurrent kernels put in a chunk.

FLA's layers do not pass a chunk size on. They look their kernel up in their module at each call. `with_chunk_size`
replaces the kernel there, during one layer's call, by a version with the chunk size filled in. Models with different
chunk sizes can therefore live in one process.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linrnn.models.cpu_ops import mixers
from linrnn.models.facts import Chunks
from linrnn.models.fla_import import import_fla

# Multiply-adds that a thread of FLA's kernel for dv may unroll: the most of any configuration with 64 tokens.
UNROLLED_MULTIPLY_ADDS = 8192


def with_chunk_size(forward: Callable[..., Any], chunks: Chunks, chunk_size: int) -> Callable[..., Any]:
    """The `forward` of a block, run with kernels of this chunk size."""
    module, name = import_fla(chunks.module), chunks.name
    # torch's compiler takes a second to import: only here
    chosen = torch.compiler.disable(chunks.own) if chunks.own else getattr(module, name)
    kernel = functools.partial(chosen, chunk_size=chunk_size)

    def call(*args: Any, **kwargs: Any) -> Any:
        usual = getattr(module, name)
        setattr(module, name, kernel)
        try:
            return forward(*args, **kwargs)
        finally:
            setattr(module, name, usual)

    return call


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    chunk_size: int,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """FLA's `chunk_gla` with a chunk size of 64 or 128 (FLA fixes 64). Arguments and results are the same."""
    if q.device.type == "cpu":
        options = {"output_final_state": output_final_state, "state_v_first": state_v_first}
        return mixers.chunk_gla(
            q, k, v, g, initial_state=initial_state, cu_seqlens=cu_seqlens, chunk_size=chunk_size, **options
        )
    return _ChunkGLA.apply(q, k, v, g, initial_state, output_final_state, state_v_first, cu_seqlens, chunk_size)


class _ChunkGLA(torch.autograd.Function):
    """FLA's own forward and backward passes, which take any chunk size, as one function."""

    @staticmethod
    def forward(ctx, q, k, v, g, initial_state, output_final_state, state_v_first, cu_seqlens, chunk_size):
        gla = import_fla("fla.ops.gla.chunk")
        leave_out_slow_configurations(gla.chunk_gla_bwd_kernel_dv.fn)
        q, k, v, g = (x.contiguous() for x in (q, k, v, g))
        options = {
            "scale": q.shape[-1] ** -0.5,
            "initial_state": initial_state,
            "state_v_first": state_v_first,
            "cu_seqlens": cu_seqlens,
            "chunk_size": chunk_size,
            "chunk_indices": None if cu_seqlens is None else gla.prepare_chunk_indices(cu_seqlens, chunk_size),
        }
        with torch.cuda.device_of(q):
            g_cumsum, scores, _, state, output = gla.chunk_gla_fwd(
                q=q, k=k, v=v, g=g, g_cumsum=None, output_final_state=output_final_state, **options
            )
        # As FLA does: save the decays' sums, or the decays themselves if they take fewer bytes (summed again later).
        decays = (None, g_cumsum) if g.dtype == torch.float32 else (g, None)
        ctx.save_for_backward(q, k, v, *decays, scores)
        ctx.options, ctx.g_dtype = options, g.dtype
        return output, state

    @staticmethod
    def backward(ctx, d_output, d_state):  # type: ignore[no-untyped-def]
        gla = import_fla("fla.ops.gla.chunk")
        q, k, v, g, g_cumsum, scores = ctx.saved_tensors
        with torch.cuda.device_of(q):
            dq, dk, dv, dg, d_initial = gla.chunk_gla_bwd(
                q=q,
                k=k,
                v=v,
                g=g,
                g_cumsum=g_cumsum,
                h=None,
                A=scores,
                do=d_output.contiguous(),
                dht=d_state,
                **ctx.options,
            )
        return dq.to(q), dk.to(k), dv.to(v), dg.to(ctx.g_dtype), d_initial, None, None, None, None


@functools.cache
def leave_out_slow_configurations(tuner: Any) -> None:
    """Keep FLA's autotuner for dv from trying configurations that take minutes to compile.

    That kernel multiplies the chunk's scores by the output's gradients in IEEE fp32, so without tensor cores. It
    unrolls the product: with 128 tokens, two warps and 128 value dimensions, each thread has 32,768 multiply-adds.
    """
    usual = tuner.early_config_prune

    def prune(configs: list[Any], nargs: dict[str, Any], **kwargs: Any) -> list[Any]:
        tokens = kwargs["BT"]
        return [
            config
            for config in usual(configs, nargs, **kwargs)
            if tokens * tokens * config.kwargs["BV"] <= UNROLLED_MULTIPLY_ADDS * 32 * config.num_warps
        ]

    tuner.early_config_prune = prune
