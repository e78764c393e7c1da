"""The filter's backward pass: both gradients from the lists of kept entries, by gathering rows of C and of E.

    dE_i = a_i Σ_v q_iv C_v + (a_i p_it − b_i) C_t
    dC_v = Σ_i a_i q_iv e_i + Σ_{i: t_i = v} (a_i p_iv − b_i) e_i

q is the kept part of the softmax (rule.py), 0 nearly everywhere. Both gradients are multiplied by logit_scale. The head
is dense: its probabilities are recomputed. The other kept entries and the targets come from the lists (select.py), the
targets' coefficients in fp32, because p − 1 cancels there. The estimate of the tails is added last (sample.py).

If the lists are void, schemes/four_products.py computes the gradients instead. Only the device knows, so the host
launches the kernels of both ways, and those of the way not taken return at once. Those of four_products.py come last:
by then the host mostly knows that they are not needed (devices.Glance). The first call of a kind launches them in any
case, so that they are loaded: kernels cannot be loaded while a CUDA graph is captured.

Cost: 3 N D n_head multiply-adds on the tensor cores; gathers 4 D bytes an entry; writes dC once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..options import Options
from ..planner import ListMemory
from ..row_math import Operands
from ..runtime.devices import Glance
from ..runtime.launch import quick
from ..runtime.tiles import aligned, cdiv, power_of_2
from ..schemes.four_products import Fallback, gradients
from ..triton.epilogues import HEADROOM, LOG2E
from ..triton.logit_gradient import Filter, parts
from ..triton.logits import exponentials
from ..triton.matmul import product
from .rule import FilterStats, Rule
from .sample import add_estimates
from .select import Lists

WIDTH = 128  # dimensions of a program of gather_kernel
ENTRIES = 4  # rows of x that gather_kernel reads together
COLUMNS = 8  # rows of dC of a program of gather_kernel; their lists are short
SORTED = 512  # entries or columns of a program of by_column_kernel
SCALED = 16  # rows of a program of head_operands_kernel

MOST_KINDS = 1024  # of calls that are remembered
_launched: set[tuple[Any, ...]] = set()  # kinds of calls that have launched the kernels of four_products.py


@quick
@triton.jit
def coefficients_kernel(
    active_ptr,  # () int32; where 0, there is nothing to do
    starts_ptr,  # (N + 1,) int64, where each row's list starts
    weight_ptr,  # (capacity,) fp32, each entry's p
    a_ptr,  # (N,) fp32
    b_ptr,  # (N,) fp32
    nll_ptr,  # (N,) fp32, −log p of the target
    target_ptr,  # (N,) int64, each row's target column, negative for none
    out_ptr,  # (capacity,) fp32, each entry's coefficient, written
    row_ptr,  # (capacity,) int32, each entry's row, written
    logit_scale,
    BLOCK: tl.constexpr,
):
    """Each listed entry's row, and its coefficient, which multiplies a row of C for dE and a row of E for dC."""
    row = tl.program_id(0)
    if tl.load(active_ptr) != 0:
        begin, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
        a = tl.load(a_ptr + row)
        if tl.load(target_ptr + row) >= 0:  # a p − b from p − 1, which keeps its precision where the loss is near 0
            b, nll = tl.load(b_ptr + row), tl.load(nll_ptr + row)
            at_target = (a - b) * tl.exp2(-nll * LOG2E) + b * _expm1(-nll)
            tl.store(out_ptr + begin, at_target * logit_scale)
            tl.store(row_ptr + begin, row)
            begin += 1
        a *= logit_scale
        for at in range(begin, end, BLOCK):
            k = at + tl.arange(0, BLOCK)
            tl.store(out_ptr + k, tl.load(weight_ptr + k, mask=k < end, other=0.0) * a, mask=k < end)
            tl.store(row_ptr + k, row, mask=k < end)


@triton.jit
def _expm1(x):
    """e^x − 1 for x ≤ 0 to a few roundings. Near 0 the difference cancels, so a series takes its place."""
    series = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7 * (1 + x / 8)))))))
    return tl.where(x > -0.5, series, tl.exp2(x * LOG2E) - 1)


@quick
@triton.jit(do_not_specialize=["n_rows"])
def head_operands_kernel(
    p_ptr,  # (n_rows, n_head): the head's probabilities; 0 written at targets, which the lists hold
    target_ptr,  # (n_rows,) int64, each row's target column, negative for none
    rank_ptr,  # (V,) int32, each column's rank by likelihood
    e_ptr,  # (n_rows, D), rows e_stride apart
    a_ptr,  # (n_rows,) fp32
    scaled_ptr,  # (n_rows, D) or None, rows scaled_stride apart: e times a, written
    e_stride, scaled_stride, n_head, n_rows, D,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Prepare the operands of the head's products: clear the targets' probabilities, and scale a chunk's rows of E."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        target = tl.load(target_ptr + row, mask=row < n_rows, other=-1)
        rank = tl.load(rank_ptr + target, mask=target >= 0, other=0)
        zero = tl.zeros((BLOCK,), dtype=tl.float32).to(p_ptr.dtype.element_ty)
        tl.store(p_ptr + row.to(tl.int64) * n_head + rank, zero, mask=(target >= 0) & (rank < n_head))
    if scaled_ptr is not None:
        dims = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        mask = (row < n_rows)[:, None] & (dims < D)[None, :]
        at = row.to(tl.int64)[:, None]
        e = tl.load(e_ptr + at * e_stride + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        scaled = e * tl.load(a_ptr + row, mask=row < n_rows, other=0.0)[:, None]
        tl.store(scaled_ptr + at * scaled_stride + dims[None, :], scaled.to(scaled_ptr.dtype.element_ty), mask=mask)


@quick
@triton.jit(do_not_specialize=["size", "V", "steps"])
def by_column_kernel(
    key_ptr,  # (size,) int32: the entries' columns, sorted; V in unused places
    order_ptr,  # (size,) int64: each sorted entry's index before sorting
    row_ptr,  # (size,) int32: each entry's row, before sorting
    coefficient_ptr,  # (size,) fp32: each entry's coefficient, before sorting
    sorted_row_ptr,  # (size,) int32, written
    sorted_coefficient_ptr,  # (size,) fp32, written
    starts_ptr,  # (V + 1,) int32: where each column's entries start, which is the number of smaller keys; written
    size,
    V,
    steps,  # 2^steps > size
    BLOCK: tl.constexpr,
):
    """Sort rows and coefficients by column, and find where each column's entries start."""
    of_starts = tl.program_id(0) - tl.cdiv(size, BLOCK)
    if of_starts < 0:
        k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        is_entry = tl.load(key_ptr + k, mask=k < size, other=V) < V
        order = tl.load(order_ptr + k, mask=is_entry, other=0)
        tl.store(sorted_row_ptr + k, tl.load(row_ptr + order, mask=is_entry, other=0), mask=is_entry)
        tl.store(sorted_coefficient_ptr + k, tl.load(coefficient_ptr + order, mask=is_entry, other=0.0), mask=is_entry)
    else:
        column = of_starts * BLOCK + tl.arange(0, BLOCK)
        less = tl.zeros((BLOCK,), dtype=tl.int32)  # binary search: at least this many keys are smaller
        for step in range(steps):
            more = less + (1 << (steps - 1 - step))
            key = tl.load(key_ptr + more - 1, mask=more <= size, other=V)
            less = tl.where(key < column, more, less)
        tl.store(starts_ptr + column, less, mask=column <= V)


@quick
@triton.jit(do_not_specialize=["starts_size", "n_rows"])
def gather_kernel(
    active_ptr,  # () int32; where 0, there is nothing to do
    starts_ptr,  # (PARTS, n_rows + 1): where each row's list starts in each part of the lists
    index_ptr,  # (PARTS, part_size) int32: rows of x
    coefficient_ptr,  # (PARTS, part_size) fp32
    x_ptr,  # (any, D), rows x_stride apart
    out_ptr,  # (n_rows, D), written
    into_ptr,  # (n_rows, D) fp32 or None: added to instead of writing out
    factor_ptr,  # (n_rows,) fp32 or None: factor · out is added to the sum
    rank_ptr,  # (n_rows,) int32 or None: each row's rank by likelihood
    head_ptr,  # (n_head, D) fp32 or None: head_ptr[rank] is added to the sum of rows with a rank below n_head
    part_size,
    starts_size,  # starts in a part: n_rows + 1
    x_stride, n_head, n_rows, D,
    PARTS: tl.constexpr, ENTRIES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    EVEN_D: tl.constexpr,  # WIDTH divides D
):  # fmt: skip
    """out_i = Σ_k coefficient_k x[index_k] over row i's list.

    A program of one warp takes WIDTH dimensions of ROWS rows. Programs go through all rows of the same dimensions
    before the next dimensions, so that these parts of x stay in L2.
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
                k_inside = tl.minimum(k, length - 1)  # repeats the last entry: without masks, half of the instructions
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
    x: Operands, tensors: Sequence[Tensor], width: int, o: Options,
    dtypes: tuple[torch.dtype | None, torch.dtype | None], main_grad_c: Tensor | None, stats: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of e and c; None for each without a dtype in `dtypes`. main_grad_c, if given, has dC added to it.

    Args:
        x: without a bias; e and c are bf16 and `aligned`.
        tensors: of the lists, from `select.forward`.
        width: vocabulary columns per chunk of four products, which run if the lists are void.
        stats: takes the filter's statistics (`FilterStats`), or None.
    """
    assert o.filter_eps is not None
    e, c, _, columns, *_, b = x
    (n_rows, dim), vocab = e.shape, c.shape[0]
    lists = Lists.of(tensors)
    rule = lists.rule(o.filter_eps, vocab)
    void = Glance(lists.void)
    grad_e = None if dtypes[0] is None else torch.empty(e.shape, dtype=dtypes[0], device=e.device)
    grad_c = None if dtypes[1] is None else torch.empty(c.shape, dtype=dtypes[1], device=c.device)
    out_c = grad_c if main_grad_c is None else main_grad_c

    def estimate(active: Tensor, taken: int) -> None:
        """Add the tails' estimate where `active` is not 0; `taken`: bytes of the workspace that are taken already."""
        if lists.sample is not None:
            left = ListMemory(n_rows, dim, vocab, lists.column.shape[0], o).free() - taken
            add_estimates(x, rule, lists.sample, o, (grad_e, out_c, None), left, active)

    active = 1 - lists.void
    _by_lists(x, lists, rule, active, o, grad_e, grad_c, main_grad_c)
    estimate(active, 0)
    filtering = None
    kind = (e.device, e.shape, vocab, dtypes, main_grad_c is None, width, o)
    if kind not in _launched or not void.is_zero():
        if len(_launched) >= MOST_KINDS:
            _launched.clear()
        _launched.add(kind)
        if o.filter_mass is None:  # with filter_mass, void lists make the call exact
            kept, dropped = parts(e)
            filtering = Filter(rule, kept, dropped)
        fallback = Fallback(lists.void, grad_e, grad_c)
        gradients(x, width, o, (*dtypes, None), main_grad_c, filtering, fallback)
        if filtering is not None:
            estimate(lists.void, kept.nbytes + dropped.nbytes)
    if stats is not None:
        listed, mass = lists.kept(columns, rule)
        exact = lists.void
        if filtering is not None:
            elsewhere = lists.void != 0
            listed = torch.where(elsewhere, kept.sum(dim=0), listed)
            mass = torch.where(elsewhere, dropped.sum(dim=0), mass)
            exact = torch.zeros_like(exact)
        FilterStats.write(stats, vocab, listed, mass, exact, b)
    return grad_e, grad_c


def _by_lists(
    x: Operands, lists: Lists, rule: Rule, active: Tensor, o: Options, grad_e: Tensor | None, grad_c: Tensor | None,
    main_grad_c: Tensor | None,
) -> None:  # fmt: skip
    """Write the kept entries' part of each wanted gradient from the lists, where `active` () int32 is not 0."""
    e, c, _, columns, _, a, b = x
    n_rows, vocab = e.shape[0], c.shape[0]
    out = grad_c if main_grad_c is None else main_grad_c
    a_scaled = a if o.logit_scale == 1 else a * o.logit_scale
    capacity = lists.column.shape[0]
    grad_head = _head(x._replace(a=a_scaled), rule, grad_e, out is not None, o, active, capacity)
    coefficients, rows = torch.empty_like(lists.weight), torch.empty_like(lists.column)
    coefficients_kernel[(n_rows,)](
        active, lists.starts, lists.weight, a, b, lists.nll, columns, coefficients, rows, float(o.logit_scale), 256,
        num_warps=2,
    )  # fmt: skip
    if grad_e is not None:
        factor = None if not rule.n_head else a_scaled
        _gather(active, lists.starts[None], lists.column[None], coefficients[None], c, grad_e, factor=factor)
    if out is not None:
        n_parts = ListMemory(n_rows, e.shape[1], vocab, capacity, o).parts()
        starts, rows, coefficients = _by_column(lists, rows, coefficients, vocab, n_parts)
        head = None if grad_head is None or rule.rank is None else (rule.rank, grad_head)
        _gather(active, starts, rows, coefficients, e, out, into=main_grad_c, head=head, together=COLUMNS)


def _head(
    x: Operands, rule: Rule, grad_e: Tensor | None, with_c: bool, o: Options, active: Tensor, capacity: int
) -> Tensor | None:
    """Write the head's part of dE, without the factor a, to grad_e; return the head's rows of dC (n_head, D) fp32.

    Returns None if there is no head, or if dC is not wanted (with_c).
    """
    if not rule.n_head or rule.rank is None or rule.likely is None:
        return None
    e, c, _, columns, lse, a, _ = x
    (n_rows, dim), n_head = e.shape, rule.n_head
    c_head = aligned(c.index_select(0, rule.likely[:n_head]))
    grad_head = torch.empty(n_head, dim, dtype=torch.float32, device=e.device) if with_c else None
    offset = lse - HEADROOM.value / LOG2E.value  # with this offset the exponentials are probabilities
    rows = min(ListMemory(n_rows, dim, c.shape[0], capacity, o).head_rows(), n_rows)
    p = e.new_empty(rows, n_head)
    scaled = None if grad_head is None else e.new_empty(rows, cdiv(dim, 8) * 8)
    width = min(WIDTH, power_of_2(dim))
    for first in range(0, n_rows, rows):
        chunk = slice(first, min(first + rows, n_rows))
        height = chunk.stop - first
        p_chunk, e_chunk, columns_chunk, a_chunk = p[:height], e[chunk], columns[chunk], a[chunk]
        exponentials(e_chunk, c_head, None, None, offset[chunk], p_chunk, False, o)
        head_operands_kernel[(cdiv(height, SCALED), 1 if scaled is None else cdiv(dim, width))](
            p_chunk, columns_chunk, rule.rank, e_chunk, a_chunk, scaled, e.stride(0),
            0 if scaled is None else scaled.stride(0), n_head, height, dim, SCALED, width, num_warps=4,
        )  # fmt: skip
        if grad_e is not None:
            product(p_chunk, c_head, grad_e[chunk], active=active)
        if grad_head is not None and scaled is not None:
            product(p_chunk, scaled[:height, :dim], grad_head, transpose_a=True, read=first > 0, active=active)
    return grad_head


def _by_column(
    lists: Lists, rows: Tensor, coefficients: Tensor, vocab: int, n_parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The lists cut into parts, each sorted by column: starts (parts, V + 1), rows and coefficients (parts, size).

    Parts are sorted one after another. Several parts are sorted in place, to save memory.
    """
    starts = torch.empty(n_parts, vocab + 1, dtype=torch.int32, device=rows.device)
    columns, rows, coefficients = (x.view(n_parts, -1) for x in (lists.column, rows, coefficients))
    size = columns.shape[1]
    for i in range(n_parts):
        keys, order = columns[i].sort(stable=True)
        in_order = torch.empty_like(rows[i]), torch.empty_like(coefficients[i])
        by_column_kernel[(cdiv(size, SORTED) + cdiv(vocab + 1, SORTED),)](
            keys, order, rows[i], coefficients[i], *in_order, starts[i], size, vocab, size.bit_length(), SORTED,
            num_warps=4,
        )  # fmt: skip
        if n_parts == 1:
            return starts, in_order[0][None], in_order[1][None]
        rows[i], coefficients[i] = in_order
        del keys, order, in_order  # frees their memory for the next part
    return starts, rows, coefficients


def _gather(
    active: Tensor, starts: Tensor, index: Tensor, coefficients: Tensor, x: Tensor, out: Tensor,
    into: Tensor | None = None, factor: Tensor | None = None, head: tuple[Tensor, Tensor] | None = None,
    together: int = 1,
) -> None:  # fmt: skip
    """out (or into +)= Σ coefficient · x[index] for each row, `together` rows a program; see gather_kernel.

    head: (rank, head_ptr) of gather_kernel, or None.
    """
    n_rows, dim = out.shape
    width = min(WIDTH, power_of_2(dim))
    rank, grad_head = head or (None, None)
    gather_kernel[(cdiv(n_rows, together) * cdiv(dim, width),)](
        active, starts, index, coefficients, x, out, into, factor, rank, grad_head,
        index.shape[1], starts.shape[1], x.stride(0), 0 if grad_head is None else grad_head.shape[0],
        n_rows, dim, len(starts), ENTRIES, width, together, dim % width == 0, num_warps=1,
    )  # fmt: skip
