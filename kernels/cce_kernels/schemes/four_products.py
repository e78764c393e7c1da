"""Four products: gradients of e, c and bias from recomputed logits, one chunk of the vocabulary at a time.

    dz_iv = (a_i p_iv − b_i ((1 − s) [v = target_i] + s / V)) · slope        p_iv = exp(z_iv − LSE_i)
    minus h_i p_iv (log p_iv + H_i) · slope, if the rows' entropies H have gradients h
    dE = scale · dz C        dC = scale · dzᵀ E        dbias = Σ_i dz_i

The forward pass takes the first product, for the log-sum-exps (triton/row_stats.py). The backward pass takes three
products a chunk:
  * the chunk's logits again, and from them dz (triton/logit_gradient.py);
  * dE += dz C_chunk (triton/matmul.py), the only sum over chunks, compensated (accumulator.py);
  * dC_chunk = dzᵀ E (triton/matmul.py), complete after one product over all rows: fp32 in registers, rounded once.
One program owns each output tile. So the result needs no locks or atomics and is deterministic.

For an fp32 gradient, dz leaves out the targets' entries, and triton/targets/gradient.py adds them in fp32. Otherwise
p − 1 would be rounded to 16 bits, and a sum that holds p − 1 would round the tensor cores' later additions.

A filter (filter/rule.py) makes dz hold only the kept entries. dz is computed twice if only one gradient is filtered.
filter/recomputed.py adds the unbiased filter's estimate. Filtered calls come here in two cases: filter/select.py does
not serve them, or its lists overflowed. The second case is known on the device alone (`Fallback`).

Cost: 3 N D V multiply-adds on the tensor cores; N × width × 2 bytes of workspace, written once, read twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..accumulator import Accumulator, compensated
from ..filter.rule import Rule
from ..options import Options
from ..row_math import Dtypes, Operands
from ..runtime.tiles import cdiv
from ..triton.logit_gradient import Filter, gradient_of_chunk, parts
from ..triton.logits import target_logits
from ..triton.matmul import product
from ..triton.row_coefficients import Peak
from ..triton.targets.gradient import add_at, add_by_target, target_rows


@dataclass(frozen=True)
class Fallback:
    """Gradients, in the wanted dtypes, that the filter's lists have written where `active`, () int32, is 0
    (select.py).
    """

    active: Tensor
    grad_e: Tensor | None
    grad_c: Tensor | None


def gradients(
    x: Operands, width: int, o: Options, dtypes: Dtypes, main_grad_c: Tensor | None, filtering: Filter | None,
    fallback: Fallback | None = None, entropy: Tensor | None = None, added: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of e, c and bias; None for each without a dtype in `dtypes`. main_grad_c, if given, has dC added to it.

    Args:
        x: e and c are of one dtype and `aligned`.
        width: vocabulary columns per chunk.
        filtering: the filter of the gradients that the options filter; None for an exact call.
        entropy: (2, N) fp32, the gradients of the rows' entropies, and the entropies; or None. Not with a filter.
        fallback: gradients that are already written, unless the device says that they are still to do.
        added: columns (N, K) int64, negative for none, and what dL/dz gets there, fp32; or None. Not with a filter.
    """
    e, c, bias, columns, lse, a, b = x
    n_rows, vocab, (dtype_e, dtype_c, dtype_bias) = e.shape[0], c.shape[0], dtypes
    active = grad_e = None
    if fallback is None:
        grad_c = None if dtype_c is None else torch.empty(c.shape, dtype=dtype_c, device=c.device)
    else:
        active, grad_e, grad_c = fallback.active, fallback.grad_e, fallback.grad_c
    sum_e = None
    if dtype_e is not None:
        sum_e = Accumulator(e, tuple(e.shape), dtype_e, o.accumulate, value=grad_e)
    out_c = grad_c if main_grad_c is None else main_grad_c
    grad_bias = None if dtype_bias is None else torch.empty(vocab, dtype=dtype_bias, device=c.device)
    passes = o.passes(sum_e is not None, out_c is not None or grad_bias is not None)

    peak = Peak.of(a, b)
    if entropy is not None:
        peak, entropy = peak.with_entropy(entropy)
    a, b, scale = peak.a, peak.b, peak.value * o.logit_scale

    at_target = None
    if (
        filtering is None
        and fallback is None
        and bias is None
        and added is None
        and _targets_apart(e, dtypes, main_grad_c, o)
    ):
        b_alone = torch.where(columns >= 0, a * torch.exp(target_logits(e, c, None, columns, o) - lse), b)
        # dz keeps at the target only the difference between two kernels' values of p.
        at_target, b = b_alone - b, b_alone
        if sum_e is not None:
            target_rows(c, columns, at_target, sum_e.value, sum_e.lost)

    workspace = e.new_empty(n_rows, cdiv(width, 16) * 16)
    for first in range(0, vocab, width):
        chunk = slice(first, min(first + width, vocab))
        c_chunk = c[chunk]
        bias_chunk = None if bias is None else bias[chunk]
        dz = workspace[:, : c_chunk.shape[0]]
        for eps in passes:
            rule_applies = None if eps is None else filtering
            dbias = gradient_of_chunk(
                e, c_chunk, bias_chunk, columns, lse, a, b, dz, first, vocab, grad_bias is not None, o, rule_applies,
                active, entropy,
            )  # fmt: skip
            if added is not None:
                add_at(dz, *added, peak.value, first)
            launches: list[partial[None]] = []
            if out_c is not None and eps == o.eps_c:
                into = None if main_grad_c is None else main_grad_c[chunk]
                launches.append(
                    partial(product, dz, e, out_c[chunk], transpose_a=True, scale=scale, into=into, active=active)
                )
            if sum_e is not None and eps == o.eps_e:
                ends = scale if chunk.stop == vocab else None
                read = first > 0 or at_target is not None
                launches.append(
                    partial(product, dz, c_chunk, sum_e.value, sum_e.lost, read=read, scale=ends, active=active)
                )
            # Side by side. The shorter tiles come last, and occupy the multiprocessors that the longer ones leave idle:
            # a tile of dC sums over all rows, and one of dE over the chunk's columns.
            for number, launch in enumerate(reversed(launches) if dz.shape[1] > n_rows else launches):
                launch(beside=number > 0)
            if grad_bias is not None and dbias is not None and eps == o.eps_c:
                grad_bias[chunk] = (dbias.sum(dim=0) * peak.value).to(dtype_bias)
    del dz, workspace  # frees their memory for the sort
    if added is not None and grad_bias is not None:
        once = torch.ones(1, 1, device=e.device).expand(added[0].numel(), 1)
        add_by_target(once, added[0].flatten(), added[1].flatten(), grad_bias[:, None])
    if at_target is not None and out_c is not None:
        add_by_target(e, columns, at_target * scale, out_c)
    if sum_e is None:
        return None, grad_c, grad_bias
    result = sum_e.result()
    if active is not None and grad_e is not None and result is not grad_e:
        result = grad_e.copy_(torch.where(active != 0, result, grad_e))
    return result, grad_c, grad_bias


def _targets_apart(e: Tensor, dtypes: Dtypes, main_grad_c: Tensor | None, o: Options) -> bool:
    """Whether the targets' entries are added in fp32, apart from dz.

    An fp32 gradient gains precision by it. The other gradient must not lose any: its sum must be fp32 or compensated.
    """
    dtype_e, dtype_c, _ = dtypes
    if e.dtype == torch.float32 or o.softcap is not None or o.label_smoothing:
        return False
    dtype_c = dtype_c if main_grad_c is None else torch.float32
    whole_e = dtype_e in (None, torch.float32) or o.accumulate == "fp32" or compensated(dtype_e, o.accumulate)
    return whole_e and dtype_c in (None, torch.float32) and torch.float32 in (dtype_e, dtype_c)


def dropped_mass(x: Operands, width: int, o: Options, rule: Rule) -> Tensor:
    """The softmax mass (N,) fp32 that the rule drops from each row. Costs one product of N x D x V."""
    e, c, bias, columns, lse, *_ = x
    kept, dropped = parts(e)
    ones = torch.ones_like(lse)
    workspace = e.new_empty(e.shape[0], cdiv(width, 16) * 16)
    for first in range(0, c.shape[0], width):
        chunk = slice(first, min(first + width, c.shape[0]))
        dz = workspace[:, : chunk.stop - first]
        bias_chunk = None if bias is None else bias[chunk]
        measured = Filter(rule, kept, dropped)
        gradient_of_chunk(
            e, c[chunk], bias_chunk, columns, lse, ones, ones, dz, first, c.shape[0], False, o, measured, None
        )
    return dropped.sum(dim=0)
