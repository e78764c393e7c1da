"""The unbiased filter's estimate of the tails, added to both gradients: a sample of columns for dE, of rows for dC.

    dE_i += Σ_{v drawn for i's block} size_v a_i p_iv [v in i's tail] C_v
    dC_v += size Σ_{i drawn} a_i p_iv [v in i's tail] e_i                      (times the logits' scale)

rule.py defines the tail, the head and the draws. The drawn rows or columns are copied together. Their logits are
recomputed and multiplied as in four_products.py, but logit_gradient.py writes the tail's entries (TAIL). A 16-bit
gradient is rounded once more, by a fifth of the sample's error. The lists take probabilities of 8 bits (select.py): an
entry within a factor of 1 ± 2^-9 of eps may count twice or not at all, equally often.

Cost: about 2 (1 / COLUMN_GROUP + 1 / ROW_GROUP) N D V multiply-adds on the tensor cores; reads and writes both
gradients once more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..options import Options
from ..planner import tail_width
from ..row_math import Operands
from ..runtime.launch import quick
from ..runtime.tiles import aligned, cdiv
from ..triton.logit_gradient import Filter, gradient_of_chunk
from ..triton.matmul import product
from ..triton.row_coefficients import Peak
from .rule import Rule, Sample, block_rows

DRAWN = 1024  # drawn rows of a program of drawn_rows_kernel


def add_estimates(
    x: Operands, rule: Rule, sample: Sample, o: Options, grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    room: int, active: Tensor | None = None,
) -> None:  # fmt: skip
    """Add the estimate of the tails to the gradients that are given and filtered: of e, of c (or main_grad_c), of
    the bias.

    room: bytes for copies and logits. If the copy of the drawn rows alone exceeds them, 16 columns of logits come on
    top. active: () int32; where 0, nothing is added. None: the estimate is always added.
    """
    peak = Peak.of(x.a, x.a)
    x, (grad_e, grad_c, grad_bias) = x._replace(a=peak.a), grads
    scale = peak.value if o.logit_scale == 1 else peak.value * o.logit_scale
    if grad_e is not None and o.filter_e:
        _add_to_e(x, scale, rule, sample, o, grad_e, room, active)
    if (grad_c is not None or grad_bias is not None) and o.filter_c:
        _add_to_c(x, peak, scale, rule, sample, o, grad_c, grad_bias, room, active)


def _add_to_e(
    x: Operands, scale: Tensor, rule: Rule, sample: Sample, o: Options, grad_e: Tensor, room: int,
    active: Tensor | None,
) -> None:  # fmt: skip
    """Add the estimate to grad_e: for each block of rows, a product with the block's drawn columns."""
    e, c, bias, _, lse, a, _ = x
    (n_rows, dim), (_, n_drawn) = e.shape, sample.columns.shape
    height = min(block_rows(dim), n_rows)
    width = tail_width(height, dim, n_drawn, e.itemsize, room)
    workspace = e.new_empty(height, cdiv(width, 16) * 16)
    # split() and unbind() instead of slices, which take the host longer: in a small problem the device waits for it.
    by_rows = zip(*(of_rows.split(height) for of_rows in (e, sample.place, lse, a, grad_e)), strict=True)
    draws = zip(sample.columns.unbind(), sample.times.unbind(), strict=True)
    for (e_i, place, lse_i, a_i, out), (columns, times) in zip(by_rows, draws, strict=True):
        pieces = zip(columns.split(width), times.split(width), strict=True)
        for first, (drawn, times_i) in zip(range(0, n_drawn, width), pieces, strict=True):
            c_drawn = aligned(c.index_select(0, drawn))
            dz = workspace[: len(e_i), : len(drawn)]
            gradient_of_chunk(
                e_i, c_drawn, None if bias is None else bias[drawn], place, lse_i, a_i, a_i, dz, first, c.shape[0],
                False, o, Filter(rule, times=times_i), active,
            )  # fmt: skip
            product(dz, c_drawn, out, read=True, times=scale, active=active)
            del c_drawn  # frees its memory for the next copy


@quick
@triton.jit(do_not_specialize=["size"])
def drawn_rows_kernel(
    row_ptr,  # (size,) int64, the drawn rows
    times_ptr,  # (size,) fp32, how many times each drawn row counts
    target_ptr,  # (N,) int64, each row's target column
    lse_ptr,  # (N,) fp32
    a_ptr,  # (N,) fp32
    drawn_target_ptr,  # (size,) int64, written
    drawn_lse_ptr,  # (size,) fp32, written
    drawn_a_ptr,  # (size,) fp32, a of the row times times_ptr, written
    size,
    BLOCK: tl.constexpr,
):
    """Copy target, LSE and a of the drawn rows together."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = k < size
    row = tl.load(row_ptr + k, mask=inside, other=0)
    tl.store(drawn_target_ptr + k, tl.load(target_ptr + row, mask=inside, other=-1), mask=inside)
    tl.store(drawn_lse_ptr + k, tl.load(lse_ptr + row, mask=inside, other=0.0), mask=inside)
    a = tl.load(a_ptr + row, mask=inside, other=0.0) * tl.load(times_ptr + k, mask=inside, other=0.0)
    tl.store(drawn_a_ptr + k, a, mask=inside)


def _add_to_c(
    x: Operands, peak: Peak, scale: Tensor, rule: Rule, sample: Sample, o: Options, grad_c: Tensor | None,
    grad_bias: Tensor | None, room: int, active: Tensor | None,
) -> None:  # fmt: skip
    """Add the estimate to grad_c and grad_bias: a product with the drawn rows, in chunks of the vocabulary."""
    e, c, bias, columns, lse, *_ = x
    vocab, drawn = c.shape[0], sample.rows
    e_drawn = aligned(e.index_select(0, drawn))
    columns_drawn, lse_drawn, a = torch.empty_like(drawn), lse.new_empty(len(drawn)), lse.new_empty(len(drawn))
    drawn_rows_kernel[(cdiv(len(drawn), DRAWN),)](
        drawn, sample.row_times, columns, lse, peak.a, columns_drawn, lse_drawn, a, len(drawn), DRAWN, num_warps=4
    )
    times = None
    if rule.rank is not None:  # 0 for columns of the head, which are no tail
        times = torch.ge(rule.rank, rule.n_head, out=lse.new_empty(vocab))
    taken = e_drawn.nbytes + (0 if times is None else times.nbytes)
    width = tail_width(len(drawn), 0, vocab, e.itemsize, room - taken)
    workspace = e.new_empty(len(drawn), cdiv(width, 16) * 16)
    for first in range(0, vocab, width):
        chunk = slice(first, min(first + width, vocab))
        dz = workspace[:, : chunk.stop - first]
        dbias = gradient_of_chunk(
            e_drawn, c[chunk], None if bias is None else bias[chunk], columns_drawn, lse_drawn, a, a, dz, first,
            vocab, grad_bias is not None, o, Filter(rule, times=None if times is None else times[chunk]), active,
        )  # fmt: skip
        if grad_c is not None:
            product(dz, e_drawn, grad_c[chunk], transpose_a=True, read=True, times=scale, active=active)
        if grad_bias is not None and dbias is not None:
            grad_bias[chunk] += (dbias.sum(dim=0) * peak.value).to(grad_bias.dtype)
