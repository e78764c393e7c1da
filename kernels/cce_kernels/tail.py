"""What the unbiased filter makes of the tails: gradients from a sample of columns and of rows, on top of what is there.

    dE_i += Σ_{v drawn for i's block} size_v a_i p_iv [v in i's tail] C_v
    dC_v += size Σ_{i drawn} a_i p_iv [v in i's tail] e_i                      (times the logits' scale)

An entry is in its row's tail if it is neither the target nor of the head and p < eps. One of each group of `size`
columns or rows is drawn (filtered.py); those drawn are copied together, their logits made again, and multiplied as in
recompute.py: `gradient_kernel` writes what the rule leaves where it otherwise writes what the rule keeps.

Cost: about 2 (1 / COLUMN_GROUP + 1 / ROW_GROUP) N D V multiply-adds on the tensor cores; both gradients read and
written once more.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .filtered import ROW_GROUP, Rule, block_rows, drawn_rows
from .logit_gradient import Filter, Peak, gradient_of_chunk
from .options import Options
from .products import product
from .schemes import tail_width
from .tiles import aligned, cdiv

NEVER = -1  # rank of a place where nothing was drawn: as the head's, not in any tail


def add_estimates(
    e: Tensor,
    c: Tensor,
    bias: Tensor | None,
    columns: Tensor,
    lse: Tensor,
    a: Tensor,
    rule: Rule,
    o: Options,
    grad_e: Tensor | None,
    grad_c: Tensor | None,
    grad_bias: Tensor | None,
    room: int,
    active: Tensor | None = None,
) -> None:
    """Add the tails' share to the gradients that are given and filtered, if `active` () int32 is not 0.

    Args:
        e, c, bias, columns, lse, a: as in recompute.gradients.
        grad_e: (N, D). grad_c: (V, D), or the fp32 buffer in its place. grad_bias: (V,).
        room: bytes that copies and logits may take.
    """
    peak = Peak.of(a, a)
    if grad_e is not None and o.filter_e:
        _add_to_e(e, c, bias, columns, lse, peak, rule, o, grad_e, room, active)
    if (grad_c is not None or grad_bias is not None) and o.filter_c:
        _add_to_c(e, c, bias, columns, lse, peak, rule, o, grad_c, grad_bias, room, active)


def _add_to_e(
    e: Tensor,
    c: Tensor,
    bias: Tensor | None,
    columns: Tensor,
    lse: Tensor,
    peak: Peak,
    rule: Rule,
    o: Options,
    grad_e: Tensor,
    room: int,
    active: Tensor | None,
) -> None:
    (n_rows, dim), vocab = e.shape, c.shape[0]
    height = min(block_rows(dim), n_rows)
    for sample in rule.samples(columns, dim, vocab):
        width = tail_width(height, dim, sample.columns.shape[1], e.itemsize, room)
        workspace = e.new_empty(height, cdiv(width, 16) * 16)
        drawn = sample.columns.clamp(min=0)
        rank = torch.where(sample.columns < 0, NEVER, vocab if rule.rank is None else rule.rank[drawn]).int()
        a = sample.size * peak.a
        for i in range(len(drawn)):
            rows = slice(i * height, min((i + 1) * height, n_rows))
            for first in range(0, drawn.shape[1], width):
                some = drawn[i, first : first + width]
                c_drawn = aligned(c.index_select(0, some))
                dz = workspace[: rows.stop - rows.start, : len(some)]
                left = replace(rule, eps=rule.eps[rows], rank=rank[i])
                gradient_of_chunk(
                    e[rows], c_drawn, None if bias is None else bias[some], sample.place[rows], lse[rows], a[rows],
                    a[rows], dz, first, vocab, False, o, Filter(left), active,
                )  # fmt: skip
                product(dz, c_drawn, grad_e[rows], read=True, times=peak.value * o.logit_scale, active=active)
                del c_drawn  # room for the next
        del workspace


def _add_to_c(
    e: Tensor,
    c: Tensor,
    bias: Tensor | None,
    columns: Tensor,
    lse: Tensor,
    peak: Peak,
    rule: Rule,
    o: Options,
    grad_c: Tensor | None,
    grad_bias: Tensor | None,
    room: int,
    active: Tensor | None,
) -> None:
    assert rule.seed is not None
    (n_rows, _dim), vocab = e.shape, c.shape[0]
    drawn = drawn_rows(rule.seed, n_rows)
    inside = drawn < n_rows
    drawn = drawn.clamp(max=n_rows - 1)
    e_drawn = aligned(e.index_select(0, drawn))
    columns, lse = columns[drawn], lse[drawn]
    a = torch.where(inside, ROW_GROUP * peak.a[drawn], 0.0)
    left = replace(rule, eps=rule.eps[drawn])
    width = tail_width(len(drawn), 0, vocab, e.itemsize, room)
    workspace = e.new_empty(len(drawn), cdiv(width, 16) * 16)
    for first in range(0, vocab, width):
        chunk = slice(first, min(first + width, vocab))
        dz = workspace[:, : chunk.stop - first]
        dbias = gradient_of_chunk(
            e_drawn, c[chunk], None if bias is None else bias[chunk], columns, lse, a, a, dz, first, vocab,
            grad_bias is not None, o, Filter(left), active,
        )  # fmt: skip
        if grad_c is not None:
            into = grad_c[chunk] if grad_c.dtype == torch.float32 else None
            times = peak.value * o.logit_scale
            product(
                dz, e_drawn, grad_c[chunk], transpose_a=True, read=into is None, times=times, into=into, active=active
            )
        if grad_bias is not None and dbias is not None:
            grad_bias[chunk] += (dbias.sum(dim=0) * peak.value).to(grad_bias.dtype)
