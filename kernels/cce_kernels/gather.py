"""The filter's backward pass: both gradients from lists of entries, by gathering rows of C and of E.

    dE_i = a_i Σ_v q_iv C_v + (a_i p_it − b_i) C_t
    dC_v = Σ_i a_i q_iv e_i + Σ_{i: t_i = v} (a_i p_iv − b_i) e_i

q is what the filter keeps of the softmax (filtered.py), 0 nearly everywhere; all times the logits' scale. Of its parts
* the head is dense: its probabilities are computed again and multiplied with the head's rows of C, and with E;
* the others, and the targets, stand in the lists that entries.py made: a program sums a part of a row of dE, and one
  of dC, over the lists ordered by column. The targets, where p − 1 cancels, have fp32 coefficients.

What the unbiased rule estimates of the tails is added after that, either way (tail.py).

Where the lists overflowed, or filter_mass makes the call exact, recompute.py does the work instead. The device decides
that: the kernels of the way not taken are launched, too, and return at once. Those of recompute.py come last, when the
device has mostly got far enough to say that they are not needed (glance.py). The first call of a kind launches them all
the same: kernels cannot be loaded while a CUDA graph is captured, and the call before is to have loaded them.

Cost: 3 N D head multiply-adds on the tensor cores; 4 D bytes an entry gathered; dC written once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .entries import Lists
from .epilogues import HEADROOM, LOG2E
from .exponentials import exponentials
from .filtered import FilterStats, Rule
from .glance import Glance
from .launch import quick
from .logit_gradient import Filter, parts
from .options import Options
from .products import product
from .recompute import Fallback, gradients
from .schemes import head_rows, list_parts, room_beside_lists
from .tail import add_estimates
from .tiles import aligned, cdiv, power_of_2

WIDTH = 256  # dimensions of a program of gather_kernel
ENTRIES = 4  # rows of x gathered together
COLUMNS = 8  # columns of a program, for dC: their lists are short

_launched: set[tuple[Any, ...]] = set()  # kinds of calls whose way around the lists has been launched


@quick
@triton.jit
def coefficients_kernel(
    active_ptr,  # () int32: 0 for nothing to do
    starts_ptr,  # (N + 1,) int64
    weight_ptr,  # (capacity,) fp32
    a_ptr,  # (N,) fp32
    target_ptr,  # (N,) int64, negative for none
    target_coefficient_ptr,  # (N,) fp32
    out_ptr,  # (capacity,) fp32, written
    row_ptr,  # (capacity,) int32, written
    BLOCK: tl.constexpr,
):
    """What each listed entry's row of C is multiplied by for dE, and of E for dC; the latter's index."""
    row = tl.program_id(0)
    if tl.load(active_ptr) != 0:
        begin, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
        a = tl.load(a_ptr + row)
        if tl.load(target_ptr + row) >= 0:
            tl.store(out_ptr + begin, tl.load(target_coefficient_ptr + row))
            tl.store(row_ptr + begin, row)
            begin += 1
        for at in range(begin, end, BLOCK):
            k = at + tl.arange(0, BLOCK)
            tl.store(out_ptr + k, tl.load(weight_ptr + k, mask=k < end, other=0.0) * a, mask=k < end)
            tl.store(row_ptr + k, row, mask=k < end)


@quick
@triton.jit
def gather_kernel(
    active_ptr,  # () int32: 0 for nothing to do
    starts_ptr,  # (PARTS, rows of out and one): where in a part of the lists a row's begins
    index_ptr,  # (PARTS, part_size) int32: rows of x
    coefficient_ptr,  # (PARTS, part_size) fp32
    x_ptr,  # rows x_stride apart
    out_ptr,  # (rows, D), written
    into_ptr,  # (rows, D) fp32 or None: added to in place of out
    factor_ptr,  # (rows,) fp32 or None: out holds a part of the sum, to be multiplied by it
    rank_ptr,  # (rows,) int32 or None
    head_ptr,  # (n_head, D) fp32: a part of the sum for rows of a rank below n_head
    part_size,
    starts_size,  # of a part
    x_stride,
    n_head,
    n_rows,
    D,
    PARTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN_D: tl.constexpr,  # WIDTH divides D
):
    """out_i = Σ_k coefficient_k x[index_k] over row i's list: WIDTH dimensions of ROWS rows a program, of one warp.

    The same dimensions of all rows come one after another: so much of x may stay in L2.
    """
    row_blocks = tl.cdiv(n_rows, ROWS)
    block = tl.program_id(0) % row_blocks * ROWS
    dims = tl.program_id(0) // row_blocks * WIDTH + tl.arange(0, WIDTH)
    end = tl.minimum(block + ROWS, n_rows) * tl.load(active_ptr)
    for i in range(end - block):
        row = block + i
        acc = tl.zeros((ENTRIES, WIDTH), dtype=tl.float32)
        for part in tl.static_range(PARTS):
            starts_ptrs = starts_ptr + part * starts_size + row
            begin = tl.load(starts_ptrs).to(tl.int32)
            length = tl.load(starts_ptrs + 1).to(tl.int32) - begin
            index_ptrs = index_ptr + part * part_size + begin
            coefficient_ptrs = coefficient_ptr + part * part_size + begin
            for at in range(0, length, ENTRIES):
                k = at + tl.arange(0, ENTRIES)
                k_inside = tl.minimum(k, length - 1)  # the last one stands in: no masks, half of the instructions
                index = tl.load(index_ptrs + k_inside).to(tl.int64)
                coefficient = tl.where(k < length, tl.load(coefficient_ptrs + k_inside), 0.0)
                x_ptrs = x_ptr + index[:, None] * x_stride + dims[None, :]
                x = tl.load(x_ptrs, mask=EVEN_D | (dims < D)[None, :], other=0.0).to(tl.float32)
                acc += x * coefficient[:, None]
        total = tl.sum(acc, axis=0)
        offsets = row.to(tl.int64) * D + dims
        if factor_ptr is not None:
            held = tl.load(out_ptr + offsets, mask=dims < D, other=0.0).to(tl.float32)
            total += held * tl.load(factor_ptr + row)
        if rank_ptr is not None:
            rank = tl.load(rank_ptr + row)
            mask = (dims < D) & (rank < n_head)
            total += tl.load(head_ptr + rank.to(tl.int64) * D + dims, mask=mask, other=0.0)
        if into_ptr is not None:
            total += tl.load(into_ptr + offsets, mask=dims < D, other=0.0)
            tl.store(into_ptr + offsets, total, mask=dims < D)
        else:
            tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=dims < D)


def backward(
    e: Tensor,
    c: Tensor,
    columns: Tensor,
    lse: Tensor,
    a: Tensor,
    b: Tensor,
    state: list[Tensor],
    width: int,
    o: Options,
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
    main_grad_c: Tensor | None,
    stats: FilterStats | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of e and c where `dtypes` names a dtype for them, else None; dC is added to main_grad_c if given.

    Args:
        e: (N, D) and c: (V, D), bf16 and `aligned`. columns: (N,) int64, see rows.py.
        lse, a, b: (N,) fp32, as in recompute.py.
        state: from entries.forward.
        width: vocabulary entries per chunk, should the lists not do.
    """
    assert o.filter_eps is not None
    (n_rows, dim), vocab = e.shape, c.shape[0]
    lists = Lists.of(state)
    rule = lists.rule(o.filter_eps, vocab)
    void = Glance(lists.void)
    grad_e = None if dtypes[0] is None else torch.empty(e.shape, dtype=dtypes[0], device=e.device)
    grad_c = None if dtypes[1] is None else torch.empty(c.shape, dtype=dtypes[1], device=c.device)
    out_c = grad_c if main_grad_c is None else main_grad_c

    def estimate(active: Tensor, taken: int) -> None:
        if lists.sample is not None:
            left = room_beside_lists(n_rows, dim, vocab, lists.column.shape[0], o) - taken
            add_estimates(e, c, None, columns, lse, a, rule, lists.sample, o, grad_e, out_c, None, left, active)

    _by_lists(e, c, columns, lse, a, b, lists, rule, 1 - lists.void, o, grad_e, grad_c, main_grad_c)
    estimate(1 - lists.void, 0)
    filtering = None
    kind = (e.device, e.shape, vocab, dtypes, main_grad_c is None, width, o)
    if kind not in _launched or not void.is_zero():
        _launched.add(kind)
        if o.filter_mass is None:  # where mass is too large, nothing is dropped
            kept, dropped = parts(e)
            filtering = Filter(rule, kept, dropped)
        fallback = Fallback(lists.void, grad_e, grad_c)
        gradients(e, c, None, columns, lse, a, b, width, o, (*dtypes, None), main_grad_c, filtering, fallback)
        if filtering is not None:
            estimate(lists.void, kept.nbytes + dropped.nbytes)
    if stats is not None:
        listed = lists.count.sum(dim=1) + rule.n_head
        if rule.rank is not None:  # targets of the head are listed, too
            listed = listed - (rule.rank[columns.clamp(min=0)] < rule.n_head).long()
        mass, exact = lists.dropped.sum(dim=1), lists.void != 0
        if filtering is not None:
            listed = torch.where(exact, kept.sum(dim=0), listed)
            mass, exact = torch.where(exact, dropped.sum(dim=0), mass), torch.zeros_like(exact)
        stats.write(listed, mass, exact, b != 0, vocab)
    return grad_e, grad_c


def _by_lists(
    e: Tensor,
    c: Tensor,
    columns: Tensor,
    lse: Tensor,
    a: Tensor,
    b: Tensor,
    lists: Lists,
    rule: Rule,
    active: Tensor,
    o: Options,
    grad_e: Tensor | None,
    grad_c: Tensor | None,
    main_grad_c: Tensor | None,
) -> None:
    """Write what the rule keeps to the gradients that are there, if `active` () int32 is not 0."""
    n_rows, vocab = e.shape[0], c.shape[0]
    out = grad_c if main_grad_c is None else main_grad_c
    a_scaled = a * o.logit_scale
    capacity = lists.column.shape[0]
    grad_head = _head(e, c, columns, lse, a_scaled, rule, grad_e, out is not None, o, active, capacity)
    # p_target − 1 keeps its relative precision where the loss is near 0.
    at_target = ((a - b) * torch.exp(-lists.nll) + b * torch.expm1(-lists.nll)) * o.logit_scale
    coefficients, rows = torch.empty_like(lists.weight), torch.empty_like(lists.column)
    coefficients_kernel[(n_rows,)](
        active, lists.starts, lists.weight, a_scaled, columns, at_target, coefficients, rows, 256,
        num_warps=2,
    )  # fmt: skip
    if grad_e is not None:
        factor = None if not rule.n_head else a_scaled
        _gather(active, lists.starts[None], lists.column[None], coefficients[None], c, grad_e, factor=factor)
    if out is not None:
        n_parts = list_parts(n_rows, e.shape[1], vocab, capacity, o)
        starts, rows, coefficients = _by_column(lists, rows, coefficients, vocab, n_parts)
        head = None if grad_head is None or rule.rank is None else (rule.rank, grad_head)
        _gather(active, starts, rows, coefficients, e, out, into=main_grad_c, head=head, together=COLUMNS)


def _head(
    e: Tensor,
    c: Tensor,
    columns: Tensor,
    lse: Tensor,
    a: Tensor,
    rule: Rule,
    grad_e: Tensor | None,
    with_c: bool,
    o: Options,
    active: Tensor,
    capacity: int,
) -> Tensor | None:
    """Write the head's share of dE, without a, to grad_e; return its rows of dC (n_head, D)."""
    if not rule.n_head or rule.rank is None or rule.likely is None:
        return None
    n_rows, n_head = e.shape[0], rule.n_head
    c_head = aligned(c.index_select(0, rule.likely[:n_head]))
    grad_head = torch.empty(n_head, e.shape[1], dtype=torch.float32, device=e.device) if with_c else None
    ranks = torch.where(columns >= 0, rule.rank[columns.clamp(min=0)], n_head).clamp_(max=n_head).long()[:, None]
    offset = lse - HEADROOM.value / LOG2E.value  # exponentials relative to the LSE are probabilities
    rows = min(head_rows(n_rows, e.shape[1], c.shape[0], capacity, o), n_rows)
    p = e.new_empty(rows, n_head + 16)  # the last columns: for targets outside the head
    scaled = e.new_empty(rows, cdiv(e.shape[1], 8) * 8)[:, : e.shape[1]]
    for first in range(0, n_rows, rows):
        chunk = slice(first, min(first + rows, n_rows))
        p_chunk, scaled_chunk = (x[: chunk.stop - first] for x in (p, scaled))
        head = p_chunk[:, :n_head]
        exponentials(e[chunk], c_head, None, columns[chunk], offset[chunk], head, False, o)
        p_chunk.scatter_(1, ranks[chunk], 0.0)
        if grad_e is not None:
            product(head, c_head, grad_e[chunk], active=active)
        if grad_head is not None:
            torch.mul(e[chunk], a[chunk, None], out=scaled_chunk)
            product(head, scaled_chunk, grad_head, transpose_a=True, read=first > 0, active=active)
    return grad_head


def _by_column(
    lists: Lists, rows: Tensor, coefficients: Tensor, vocab: int, n_parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The lists in parts, each by column: starts (parts, V + 1), rows and coefficients (parts, size).

    Parts are sorted one after another and in place, for less memory.
    """
    bounds = torch.arange(vocab + 1, dtype=torch.int32, device=lists.column.device)
    starts = torch.empty(n_parts, vocab + 1, dtype=torch.int32, device=lists.column.device)
    columns, rows, coefficients = (x.view(n_parts, -1) for x in (lists.column, rows, coefficients))
    for i in range(n_parts):
        keys, order = columns[i].sort(stable=True)
        torch.searchsorted(keys, bounds, out_int32=True, out=starts[i])
        rows[i] = rows[i][order]
        coefficients[i] = coefficients[i][order]
        del keys, order  # room for the next part's
    return starts, rows, coefficients


def _gather(
    active: Tensor,
    starts: Tensor,
    index: Tensor,
    coefficients: Tensor,
    x: Tensor,
    out: Tensor,
    into: Tensor | None = None,
    factor: Tensor | None = None,
    head: tuple[Tensor, Tensor] | None = None,
    together: int = 1,
) -> None:
    """out (or into +)= Σ coefficient · x[index], row by row, `together` rows by one program; see gather_kernel."""
    n_rows, dim = out.shape
    width = min(WIDTH, power_of_2(dim))
    rank, grad_head = head or (None, None)
    gather_kernel[(cdiv(n_rows, together) * cdiv(dim, width),)](
        active, starts, index, coefficients, x, out, into, factor, rank, grad_head,
        index.shape[1], starts.shape[1], x.stride(0), 0 if grad_head is None else grad_head.shape[0],
        n_rows, dim, len(starts), ENTRIES, width, together, dim % width == 0, num_warps=1,
    )  # fmt: skip
