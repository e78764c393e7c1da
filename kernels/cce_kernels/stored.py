"""Three products: gradients from stored exponentials, a chunk of tokens at a time.

    dE_i = a_i / S_i Σ_{v ≠ t} w_iv C_v + (a_i p_it − b_i) C_t        dC_v = Σ_{i: t_i ≠ v} w_iv (a_i / S_i) e_i
                                                                              + Σ_{i: t_i = v} (a_i p_it − b_i) e_i
For each chunk of rows: `exponentials` stores w (rows × V, 16 bits) and the rows' sums; then both gradients are
plain products of w, with each row's 1 / S_i taken into the rows of dE and of e: nothing is recomputed and no pass
over w is needed in between. The target's entry, where p − 1 cancels and most of the gradient lies, is left out of w
and added in fp32.

All but the last chunk are done in the forward pass, as if dL/dloss were 1; the last one's w is kept for the
backward pass, which multiplies by dL/dloss before anything is rounded. dC is summed over chunks with what rounding
lost kept beside it (accumulator.py), dE of the early chunks likewise held in two parts until the backward pass.

Cost: 3 N D V multiply-adds; per chunk but the first one read and but the last one write of dC and what it lost.
Memory: 2 V bytes × rows a chunk, 1 byte an entry of dC and of the early dE (none where they are fp32), 4 bytes × rows
× D × splits. For bf16 operands, without bias, filter or label smoothing, and one upstream gradient for all rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .accumulator import Accumulator
from .compensated import read_sum, write_sum
from .exponentials import exponentials, target_logits
from .finish import finish_rows
from .options import Options
from .products import product
from .rows import Rows, empty_metrics
from .schemes import splits_for
from .tiles import cdiv, multiprocessors, power_of_2


@triton.jit(do_not_specialize=["N", "splits", "c_stride"])
def hidden_kernel(
    part_ptr,  # (splits, N, D) fp32: w C
    c_ptr,  # (V, D), rows c_stride apart
    columns_ptr,  # (N,) int64, negative for none
    factor_ptr,  # (N,) fp32
    coefficient_ptr,  # (N,) fp32
    scale_ptr,  # () fp32 or None
    out_ptr,  # (N, D), written
    lost_ptr,  # (N, D) or None, written: what rounding lost
    c_stride,
    N,
    D,
    splits,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dE = factor · (w C) + coefficient · C_target, times scale."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (rows < N)[:, None] & (dims < D)[None, :]
    offsets = rows.to(tl.int64)[:, None] * D + dims[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    part_ptrs = part_ptr + offsets
    for _ in range(splits):
        total += tl.load(part_ptrs, mask=mask, other=0.0)
        part_ptrs += N.to(tl.int64) * D
    column = tl.load(columns_ptr + rows, mask=rows < N, other=-1)
    c_mask = mask & (column >= 0)[:, None]
    c = tl.load(c_ptr + column[:, None] * c_stride + dims[None, :], mask=c_mask, other=0.0).to(tl.float32)
    factor = tl.load(factor_ptr + rows, mask=rows < N, other=0.0)
    total = total * factor[:, None] + c * tl.load(coefficient_ptr + rows, mask=rows < N, other=0.0)[:, None]
    if scale_ptr is not None:
        total *= tl.load(scale_ptr)
    write_sum(total, out_ptr + offsets, None if lost_ptr is None else lost_ptr + offsets, mask)


@triton.jit(do_not_specialize=["N", "first", "end"])
def targets_kernel(
    e_ptr,  # (N, D), rows e_stride apart
    keys_ptr,  # (N,) int32, ascending: the rows' targets, negative for none
    order_ptr,  # (N,) int64: the rows in that order
    coefficient_ptr,  # (N,) fp32
    out_ptr,  # (V, D): a sum, added into
    lost_ptr,  # (V, D) or None: what out's rounding lost, kept
    spill_ptr,  # (programs, D) fp32, written: the part of a run of equal keys that began in an earlier program
    e_stride,
    N,
    first,  # of the chunk's rows
    end,
    D,
    PLACES: tl.constexpr,  # of a program
    BLOCK_D: tl.constexpr,
):
    """out[v] += Σ coefficient_i e_i over the chunk's rows whose target is v, as far as they stand in one program."""
    start = tl.program_id(0) * PLACES
    places = start + tl.arange(0, PLACES)
    keys = tl.load(keys_ptr + places, mask=places < N, other=-1)
    rows = tl.load(order_ptr + places, mask=places < N, other=-1)
    mine = (rows >= first) & (rows < end)
    coefficient = tl.load(coefficient_ptr + rows, mask=mine, other=0.0)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    e_mask = mine[:, None] & (dims < D)[None, :]
    e = tl.load(e_ptr + rows[:, None] * e_stride + dims[None, :], mask=e_mask, other=0.0)
    parts = e.to(tl.float32) * coefficient[:, None]
    earlier = tl.load(keys_ptr + start - 1, mask=start > 0, other=-1)
    last = earlier
    for i in range(tl.minimum(PLACES, N - start)):
        key = tl.load(keys_ptr + start + i)
        run = mine & (keys == key)
        if (key >= 0) & (key != last) & (tl.max(run.to(tl.int32), axis=0) > 0):
            total = tl.sum(tl.where(run[:, None], parts, 0.0), axis=0)
            offsets = key.to(tl.int64) * D + dims
            lost_ptrs = None if lost_ptr is None else lost_ptr + offsets
            total += read_sum(out_ptr + offsets, lost_ptrs, dims < D)
            write_sum(total, out_ptr + offsets, lost_ptrs, dims < D)
        last = key
    spilled = tl.sum(tl.where((keys == earlier)[:, None], parts, 0.0), axis=0)
    tl.store(spill_ptr + tl.program_id(0).to(tl.int64) * D + dims, spilled, mask=dims < D)


@triton.jit(do_not_specialize=["N"])
def spilled_targets_kernel(keys_ptr, out_ptr, lost_ptr, spill_ptr, N, D, PLACES: tl.constexpr, BLOCK_D: tl.constexpr):
    """Add what targets_kernel spilled: the program in which a long run begins sums the parts of the later ones."""
    start = tl.program_id(0) * PLACES
    key = tl.load(keys_ptr + start + PLACES - 1, mask=start + PLACES < N, other=-1)  # of the run that may go on
    earlier = tl.load(keys_ptr + start - 1, mask=start > 0, other=-1)
    follows = tl.load(keys_ptr + start + PLACES, mask=start + PLACES < N, other=-1)
    if (key >= 0) & (key != earlier) & (key == follows):
        dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        total = tl.zeros((BLOCK_D,), dtype=tl.float32)
        program = tl.program_id(0) + 1
        more = 1
        while more > 0:
            programs = program + tl.arange(0, PLACES)
            at = programs * PLACES
            run = tl.load(keys_ptr + at, mask=at < N, other=-1) == key
            spill_ptrs = spill_ptr + programs.to(tl.int64)[:, None] * D + dims[None, :]
            total += tl.sum(tl.load(spill_ptrs, mask=run[:, None] & (dims < D)[None, :], other=0.0), axis=0)
            program += PLACES
            more = tl.min(run.to(tl.int32), axis=0)
        offsets = key.to(tl.int64) * D + dims
        lost_ptrs = None if lost_ptr is None else lost_ptr + offsets
        total += read_sum(out_ptr + offsets, lost_ptrs, dims < D)
        write_sum(total, out_ptr + offsets, lost_ptrs, dims < D)


@triton.jit(do_not_specialize=["N"])
def scaled_kernel(x_ptr, factor_ptr, out_ptr, x_stride, out_stride, N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """out (N, D) = factor (N,) · x, rounded once."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (rows < N)[:, None] & (dims < D)[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * x_stride + dims[None, :], mask=mask, other=0.0)
    scaled = x.to(tl.float32) * tl.load(factor_ptr + rows, mask=rows < N, other=0.0)[:, None]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_stride + dims[None, :]
    tl.store(out_ptrs, scaled.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rescale_kernel(value_ptr, lost_ptr, scale_ptr, size, BLOCK: tl.constexpr):
    """value = round(scale · (value + lost)), in place."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    lost_ptrs = None if lost_ptr is None else lost_ptr + offsets
    total = read_sum(value_ptr + offsets, lost_ptrs, offsets < size) * tl.load(scale_ptr)
    write_sum(total, value_ptr + offsets, None, offsets < size)


def forward(
    e: Tensor,
    c: Tensor,
    columns: Tensor,
    rows: int,
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
    with_metrics: bool,
    o: Options,
) -> tuple[Rows, list[Tensor]]:
    """What the loss takes of each row, and the state that `backward` takes.

    Args:
        e: (N, D) and c: (V, D), bf16 and `aligned`.
        columns: (N,) int64, each row's target, or what rows.py has in its place.
        rows: per chunk.
        dtypes: of the gradients of e and c; None: not wanted.
    """
    n_rows, vocab = e.shape[0], c.shape[0]
    state = empty_state(e, c, rows, dtypes, o)
    z_target = target_logits(e, c, None, columns, o)
    lse, nll, metrics = torch.empty_like(z_target), torch.empty_like(z_target), empty_metrics(z_target, with_metrics)
    if dtypes[1] is not None:
        state[KEYS], state[ORDER] = columns.to(torch.int32).sort(stable=True)
    w, factor, coefficient, keys, order, grad_e, lost_e, grad_c, lost_c = _present(state)
    early = _early(n_rows, rows)
    for first in range(0, n_rows, rows):
        chunk = slice(first, min(first + rows, n_rows))
        w_chunk = w[: chunk.stop - first, :vocab]
        sums = exponentials(e[chunk], c, None, columns[chunk], z_target[chunk], w_chunk, with_metrics, o)
        part = Rows(lse[chunk], nll[chunk], None, empty_metrics(z_target[chunk], with_metrics))
        gradient = (w_chunk, factor[chunk], coefficient[chunk])
        finish_rows(e[chunk], c, None, columns[chunk], z_target[chunk], sums, part, o, gradient)
        if metrics is not None and part.metrics is not None:
            metrics[:, chunk] = part.metrics
        if first == early:
            break
        if grad_e is not None:
            lost = None if lost_e is None else lost_e[chunk]
            _hidden_gradient(w_chunk, c, columns, factor, coefficient, chunk, None, grad_e[chunk], lost)
        if grad_c is not None:
            product(w_chunk, _scaled(e[chunk], factor[chunk]), grad_c, lost_c, transpose_a=True, read=first > 0)
            _add_targets(e, keys, order, coefficient, chunk, grad_c, lost_c)
    return Rows(lse, nll, None, metrics), state


def backward(
    e: Tensor,
    c: Tensor,
    columns: Tensor,
    scale: Tensor,
    rows: int,
    state: list[Tensor],
    main_grad_c: Tensor | None,
) -> None:
    """Finish the gradients of e and c (state[GRAD_E], state[GRAD_C]) in place; with main_grad_c, that of c there.

    Args:
        scale: () fp32, dL/dloss.
        state: from `forward`; used up.
    """
    w, factor, coefficient, keys, order, grad_e, lost_e, grad_c, lost_c = _present(state)
    n_rows, dim = e.shape
    early = _early(n_rows, rows)
    last = slice(early, n_rows)
    w_chunk = w[: n_rows - early, : c.shape[0]]
    if grad_e is not None:
        _hidden_gradient(w_chunk, c, columns, factor, coefficient, last, scale, grad_e[last], None)
        if early:
            rescale_kernel[(cdiv(early * dim, 2048),)](grad_e, lost_e, scale, early * dim, 2048)
    if grad_c is not None:
        if not early:
            grad_c.zero_()
            if lost_c is not None:
                lost_c.zero_()
        _add_targets(e, keys, order, coefficient, last, grad_c, lost_c)
        scaled = _scaled(e[last], factor[last])
        product(w_chunk, scaled, grad_c, lost_c, transpose_a=True, read=True, scale=scale, into=main_grad_c)


KEYS, ORDER, GRAD_E, GRAD_C = 3, 4, 5, 7  # places in the state
PLACES = 16  # rows, sorted by target, that one program adds up


def empty_state(
    e: Tensor, c: Tensor, rows: int, dtypes: tuple[torch.dtype | None, torch.dtype | None], o: Options
) -> list[Tensor]:
    """w of the last chunk; each row's factor and target gradient; rows sorted by target: keys and indices; dE and dC
    as far as they are summed: value and lost of each. What is not wanted is empty."""
    (n_rows, dim), vocab = e.shape, c.shape[0]
    row_numbers = [e.new_empty(n_rows, dtype=torch.float32) for _ in range(2)]
    by_target: list[Tensor | None] = [None, None]
    if dtypes[1] is not None:
        by_target = [e.new_empty(n_rows, dtype=torch.int32), e.new_empty(n_rows, dtype=torch.int64)]
    sums: list[Tensor | None] = []
    for dtype, shape, lost_rows in ((dtypes[0], (n_rows, dim), _early(n_rows, rows)), (dtypes[1], (vocab, dim), vocab)):
        total = None if dtype is None else Accumulator(e, shape, dtype, o.accumulate, lost_rows)
        sums += [None, None] if total is None else [total.value, total.lost]
    w = e.new_empty(min(rows, n_rows), cdiv(vocab, 16) * 16)
    return [e.new_empty(0) if x is None else x for x in (w, *row_numbers, *by_target, *sums)]


def _present(state: list[Tensor]) -> list:
    return [x if x.numel() else None for x in state]


def _early(n_rows: int, rows: int) -> int:
    """Rows of all chunks but the last."""
    return (cdiv(n_rows, rows) - 1) * rows


def _scaled(e: Tensor, factor: Tensor) -> Tensor:
    """e with each row times its factor, rounded once, as TMA reads it."""
    n_rows, dim = e.shape
    out = e.new_empty(n_rows, cdiv(dim, 8) * 8)[:, :dim]
    block_d = min(256, power_of_2(dim))
    grid = (cdiv(n_rows, 16), cdiv(dim, block_d))
    scaled_kernel[grid](e, factor, out, e.stride(0), out.stride(0), n_rows, dim, 16, block_d)
    return out


def _hidden_gradient(
    w: Tensor,
    c: Tensor,
    columns: Tensor,
    factor: Tensor,
    coefficient: Tensor,
    chunk: slice,
    scale: Tensor | None,
    out: Tensor,
    lost: Tensor | None,
) -> None:
    """dE of one chunk of rows, with what rounding lost unless it is None."""
    (n_rows, vocab), dim = w.shape, c.shape[1]
    splits = splits_for(n_rows, vocab, dim, multiprocessors(w))
    parts = torch.empty(splits, n_rows, dim, dtype=torch.float32, device=w.device)
    product(w, c, parts)
    block_d = min(256, power_of_2(dim))
    hidden_kernel[(cdiv(n_rows, 16), cdiv(dim, block_d))](
        parts, c, columns[chunk], factor[chunk], coefficient[chunk], scale, out, lost,
        c.stride(0), n_rows, dim, splits, 16, block_d,
    )  # fmt: skip


def _add_targets(
    e: Tensor, keys: Tensor, order: Tensor, coefficient: Tensor, chunk: slice, out: Tensor, lost: Tensor | None
) -> None:
    """Add the targets' share of one chunk of rows to dC."""
    n_rows, dim = e.shape
    block_d = min(512, power_of_2(dim))
    programs = cdiv(n_rows, PLACES)
    spill = torch.empty(programs, dim, dtype=torch.float32, device=e.device)
    grid = (programs, cdiv(dim, block_d))
    targets_kernel[grid](
        e,
        keys,
        order,
        coefficient,
        out,
        lost,
        spill,
        e.stride(0),
        n_rows,
        chunk.start,
        chunk.stop,
        dim,
        PLACES,
        block_d,
    )
    spilled_targets_kernel[grid](keys, out, lost, spill, n_rows, dim, PLACES, block_d)
