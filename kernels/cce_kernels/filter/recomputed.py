"""The four-product backward pass (schemes/four_products.py), with the filter if the options name one."""

from __future__ import annotations

import torch
from torch import Tensor

from ..options import Options
from ..planner import room
from ..row_math import Dtypes, Operands
from ..schemes.four_products import dropped_mass, gradients
from ..triton.logit_gradient import Filter, parts
from .draw import mean_logits
from .rule import FilterStats, Rule
from .sample import add_estimates


def backward(
    x: Operands, width: int, o: Options, dtypes: Dtypes, main_grad_c: Tensor | None, stats: Tensor | None,
    entropy: Tensor | None = None, added: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """`four_products.gradients`, with the filter if the options name one.

    stats: takes the filter's statistics (`FilterStats`), or None. entropy, added: as for `four_products.gradients`.
    """
    e, c, bias, columns, *_ = x
    filtering = None
    need_c = dtypes[1] is not None or dtypes[2] is not None or main_grad_c is not None
    if o.filters(dtypes[0] is not None, need_c):
        rule = Rule.of(columns, mean_logits(e, c, bias, columns, o), o)
        exact = torch.zeros((), dtype=torch.bool, device=e.device)
        if o.filter_mass is not None:
            exact = rule.drops_more(dropped_mass(x, width, o, rule), o.filter_mass)
        kept, dropped = parts(e)
        filtering = Filter(rule.exact_if(exact), kept, dropped)
    grads = gradients(x, width, o, dtypes, main_grad_c, filtering, entropy=entropy, added=added)
    if filtering is None:
        if stats is not None:
            FilterStats.write_exact(stats)
        return grads
    if filtering.rule.seed is not None:
        grad_c = grads[1] if main_grad_c is None else main_grad_c
        sample = filtering.rule.sample(columns, e.shape[1], c.shape[0])
        add_estimates(x, filtering.rule, sample, o, (grads[0], grad_c, grads[2]), room(o))
    if stats is not None:
        FilterStats.write(stats, c.shape[0], kept.sum(dim=0), dropped.sum(dim=0), exact, x.b)
    return grads
