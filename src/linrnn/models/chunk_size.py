"""`model.chunk_size`: how many tokens FLA's recurrent kernels put in a chunk.

FLA's layers do not pass a chunk size on. So a layer gets a forward of its own, a copy of FLA's that calls the kernel
with the chunk size filled in. Models with different chunk sizes can live in one process.
"""

import functools
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from linrnn.models.cpu_ops import mixers
from linrnn.models.facts import Chunks
from linrnn.models.fla_import import calling, import_fla


def set_chunk_size(mixer: nn.Module, chunks: Chunks, chunk_size: int) -> None:
    """From now on a mixer's forward calls its kernel with this chunk size."""
    # torch's compiler takes a second to import: only here
    chosen = torch.compiler.disable(chunks.own) if chunks.own else getattr(import_fla(chunks.module), chunks.name)
    forward = calling(type(mixer).forward, {chunks.name: functools.partial(chosen, chunk_size=chunk_size)})
    mixer.forward = MethodType(forward, mixer)  # type: ignore[method-assign]


def chunk_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, chunk_size: int, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """FLA's `chunk_gla` with a chunk size of 64 or 128 (FLA fixes 64). `options` are those that FLA's layer gives."""
    if q.device.type == "cpu":
        return mixers.chunk_gla(q, k, v, g, chunk_size=chunk_size, **options)
    given = map(options.get, ("initial_state", "output_final_state", "state_v_first", "cu_seqlens"))
    return _ChunkGLA.apply(q, k, v, g, *given, chunk_size)


class _ChunkGLA(torch.autograd.Function):
    """FLA's own forward and backward passes, which take any chunk size, as one function."""

    @staticmethod
    def forward(ctx, q, k, v, g, initial_state, output_final_state, state_v_first, cu_seqlens, chunk_size):
        gla = import_fla("fla.ops.gla.chunk")
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
