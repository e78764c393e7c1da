"""The torch backend: the loss one chunk of the vocabulary at a time, for devices without kernels.

Forward: each chunk's logits z = E C_chunkᵀ in fp32 update each row's running maximum and sum of exponentials. The sum
leaves out the target, because it alone determines the loss if the model is sure (triton/logits.py).
Backward: each chunk's logits are recomputed and turned into dL/dz in place. Then dE += dL/dz C_chunk and
dC_chunk = dL/dzᵀ E.

At most N × width fp32 numbers exist at once (twice as many with a softcap); width follows from `workspace_mib`. Shapes
never depend on values, so that nothing waits for the device. Cost: 4 N D V multiply-adds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..accumulator import Accumulator, scratch_bytes
from ..filter.rule import FilterStats, Rule, mean_logits
from ..options import Options
from ..planner import Plan, Problem
from ..row_math import Dtypes, Operands, Rows, empty_metrics, where_it_counts
from ..row_math import mean_gradient as mean_gradient
from ..row_math import reduce_loss as reduce_loss
from ..row_math import row_coefficients as row_coefficients
from ..row_math import target_columns as target_columns

program = ahead = None  # nothing is repeated without Python (runtime/program.py), and nothing is compiled

_MULTIPLE = 16  # a chunk's columns are a multiple, which aligns the workspace's rows for the CPU's vector units
_FAR = 1e4  # nats below the largest logit, where exponentials are 0 but products with them must stay finite
_CACHE_BYTES = 8 * 2**20  # a chunk's logits stay within the CPU's caches; wider chunks are slower


def prepare(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in the products' dtype: this backend takes operands with any strides."""
    return x.to(dtype)


def find_targets(
    e: Tensor, c: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int, o: Options, skip: bool = False
) -> tuple[Tensor, None]:
    """Each row's target column (N,) int64 (row_math.py), and None: `forward` finds the targets' logits itself.

    skip: not used; ignored rows are computed, too.
    """
    return target_columns(targets, ignore_index, c.shape[0]), None


def forward(
    e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, with_metrics: bool, o: Options,
    z_target: Tensor | None = None,
) -> Rows:  # fmt: skip
    """The row statistics that the loss needs.

    Args:
        e: (N, D). c: (V, D). bias: (V,) or None. columns: (N,) int64, each row's target column, negative for none.
        z_target: not used, because `find_targets` returns None.
    """
    n_rows, vocab = e.shape[0], c.shape[0]
    e = e.float()
    # All leave out the target's logit. The sums hold exp(x), exp(x) x and x of x = z − largest.
    largest = e.new_full((n_rows,), -torch.inf)
    exp_sum, z_sum, ez_sum = e.new_zeros(n_rows), e.new_zeros(n_rows), e.new_zeros(n_rows)
    z_target = e.new_full((n_rows,), -torch.inf)  # stays −inf for a row without a target
    for chunk in _chunks(vocab, _width(e, vocab, 0, o)):
        z = _logits(e, c[chunk], None if bias is None else bias[chunk], o)
        here, place = _targets_in(columns, chunk)
        of_target = z.gather(1, place)
        z_target = torch.where(here, of_target, z_target[:, None])[:, 0]
        z.scatter_(1, place, of_target.masked_fill(here, -torch.inf))
        new_largest = torch.maximum(largest, z.amax(dim=1))
        anchor = _finite(new_largest)  # a bias of −inf can mask a whole chunk
        rise = anchor - largest
        decay = (-rise).exp_()
        z.sub_(anchor[:, None])
        if o.label_smoothing:
            n_others, at_place = chunk.start - ((columns >= 0) & (columns < chunk.start)).long(), z.gather(1, place)
            z_sum -= (n_others * rise).nan_to_num_(nan=0)
            z_sum += z.scatter_(1, place, at_place.masked_fill(here, 0)).sum(dim=1)
            z.scatter_(1, place, at_place)
        if with_metrics:
            ez_sum.sub_(exp_sum * rise.clamp(max=_FAR)).mul_(decay)
            ez_sum += z.exp().mul_(z).nan_to_num_(nan=0).sum(dim=1)  # 0 · −inf counts as 0
        exp_sum.mul_(decay).add_(z.exp_().sum(dim=1))
        largest = new_largest
    # Differences of logits keep the digits that a common offset takes from the logits' own sums.
    anchor = _finite(torch.maximum(largest, z_target))
    below, target_below = anchor - largest, anchor - z_target
    share, of_target = (-below).exp(), (-target_below).exp()
    total = share * exp_sum + of_target
    rest = total.log()
    lse = anchor + rest
    nll = torch.logaddexp(largest - z_target + exp_sum.log(), torch.zeros_like(lse))
    metrics = empty_metrics(e, with_metrics)
    if metrics is not None:
        metrics[0] = z_target > largest
        mean = share * (ez_sum - exp_sum * below.clamp(max=_FAR)) - of_target * target_below.clamp(max=_FAR)
        metrics[1] = rest - mean / total
    z_above_mean = None
    if o.label_smoothing:
        above = z_target - _finite(largest)
        z_above_mean = above - (z_sum + above) / vocab
    lost = (rest - (lse - anchor)).nan_to_num_(nan=0)
    return Rows(lse, where_it_counts(nll, columns), z_above_mean, metrics, largest if with_metrics else None, lost)


def logits_at(e: Tensor, c: Tensor, bias: Tensor | None, columns: Tensor, o: Options) -> Tensor:
    """Each row's logits (N, K) fp32 at its columns (N, K); those of negative columns are another column's."""
    columns = columns.clamp(min=0)
    z = torch.empty(columns.shape, dtype=torch.float32, device=e.device)
    rows = max(1, _CACHE_BYTES // (8 * columns.shape[1] * e.shape[1]))
    for part, at, e_part in zip(z.split(rows), columns.split(rows), e.split(rows), strict=True):
        products = torch.bmm(c[at].float(), e_part.float()[:, :, None])[:, :, 0]
        part.copy_(_finished(products, None if bias is None else bias[at], o))
    return z


def _finite(largest: Tensor) -> Tensor:
    """The rows' largest logits, and 0 where these are infinite."""
    return largest.masked_fill(largest.isinf(), 0)


def backward(
    x: Operands, width: int, o: Options, dtypes: Dtypes, main_grad_c: Tensor | None, stats: Tensor | None,
    entropy: Tensor | None = None, added: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of e, c and bias; None for each without a dtype in `dtypes`. main_grad_c, if given, has dC added to it.

    Args:
        width: vocabulary columns per chunk, from `plan`.
        stats: takes the filter's statistics (`FilterStats`), or None.
        entropy: (2, N) fp32, the gradients of the rows' entropies, and the entropies; or None. Not with a filter.
        added: columns (N, K) int64, negative for none, and what dL/dz gets there, fp32; or None. Not with a filter.
    """
    e, c, bias, columns, lse, a, b = x
    vocab, e32, (dtype_e, dtype_c, dtype_bias) = c.shape[0], e.float(), dtypes
    sum_e = None if dtype_e is None else Accumulator(e, tuple(e.shape), dtype_e, o.accumulate)
    grad_c = None if dtype_c is None else torch.empty(c.shape, dtype=dtype_c, device=c.device)
    grad_bias = None if dtype_bias is None else torch.empty(vocab, dtype=dtype_bias, device=c.device)

    with_c = grad_c is not None or main_grad_c is not None
    needs = sum_e is not None, with_c or grad_bias is not None
    rule = exact = None
    if o.filters(*needs):
        rule, exact = _rule(x._replace(e=e32), width, o)
    sides = _sides(*needs, rule, o)
    kept, dropped = torch.zeros_like(lse), torch.zeros_like(lse)
    if entropy is not None:  # its term takes as much memory as the logits
        width = max(width // 2 // _MULTIPLE * _MULTIPLE, _MULTIPLE)
    for chunk in _chunks(vocab, width):
        c_chunk = c[chunk].float()
        z = _logits(e32, c_chunk, None if bias is None else bias[chunk], o)
        slope = None if o.softcap is None else 1 - (z / o.softcap).square_()
        here, place = _targets_in(columns, chunk)
        at_target = torch.where(here, ((1 - o.label_smoothing) * b)[:, None], 0)
        p, of_entropy = _probabilities(z, lse, entropy)
        if rule is not None and stats is not None:
            _record(rule, p, here, place, chunk, kept, dropped)
        for i, (side, for_e, for_c) in enumerate(sides):
            dz = _weights(rule, side, p, here, place, chunk, e.shape[1], vocab)
            last = dz is not p or i == len(sides) - 1  # dz may be overwritten: no later side reads it
            dz = dz.mul_(a[:, None]) if last else dz * a[:, None]
            if of_entropy is not None:
                dz -= of_entropy
            if o.label_smoothing:
                dz -= (o.label_smoothing / vocab * b)[:, None]
            dz.scatter_(1, place, dz.gather(1, place) - at_target)
            if slope is not None:
                dz *= slope
            for column, value in () if added is None else zip(*(each.unbind(1) for each in added), strict=True):
                there, at = _targets_in(column, chunk)
                dz.scatter_(1, at, dz.gather(1, at) + torch.where(there, value[:, None], 0))
            if sum_e is not None and for_e:
                sum_e.add((dz @ c_chunk).mul_(o.logit_scale))
            if with_c and for_c:
                part = (dz.T @ e32).mul_(o.logit_scale)
                if main_grad_c is not None:
                    main_grad_c[chunk] += part
                elif grad_c is not None:
                    grad_c[chunk] = part.to(grad_c.dtype)
            if grad_bias is not None and for_c:
                grad_bias[chunk] = dz.sum(dim=0).to(grad_bias.dtype)
    if stats is not None and exact is None:
        FilterStats.write_exact(stats)
    elif stats is not None and exact is not None:
        FilterStats.write(stats, vocab, kept, dropped, exact, b)
    return None if sum_e is None else sum_e.result(), grad_c, grad_bias


def _probabilities(z: Tensor, lse: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A chunk's probabilities, and what the rows' entropies subtract from dL/dz; z is overwritten.

    entropy: as for `backward`.
    """
    if entropy is None:
        return z.sub_(lse[:, None]).exp_(), None
    p = z.sub_(lse[:, None]).exp()
    return p, z.add_(entropy[1][:, None]).mul_(p).nan_to_num_(nan=0).mul_(entropy[0][:, None])


def plan(problem: Problem, e: Tensor, o: Options) -> Plan:
    """Chunks of the backward pass that fit the workspace.

    A filter saves no time here, because every entry is computed. So a filter_if_faster call is exact.

    The workspace holds a chunk's logits, the fp32 rows of C of two chunks, e in fp32, and the rounding error or fp32
    copy of dE's sum.

    Raises:
        WorkspaceTooSmall: the narrowest chunk does not fit.
    """
    exact = o.filter_if_faster
    o = o.without_filter() if exact else o
    return Plan(0, _width(e, problem.vocab, scratch_bytes(problem.grad_e, o.accumulate), o), exact=exact)


def _width(e: Tensor, vocab: int, scratch_per_entry: int, o: Options) -> int:
    """Vocabulary columns per chunk; scratch_per_entry: bytes that dE's sum takes for each entry besides dE itself."""
    n_rows, dim = e.shape
    buffers = 4 + (4 if o.softcap is not None else 0)
    if o.filter_eps is not None:  # weights and flags; int64 indices for the unbiased rule
        buffers += 8 + (20 if o.filter_unbiased else 0)
    width = o.chunk_width(vocab, n_rows * dim * (scratch_per_entry + 4), n_rows * buffers + 2 * dim * 4, _MULTIPLE)
    if e.device.type != "cpu":  # on a GPU a launch costs more than the caches save
        return width
    return min(width, max(_CACHE_BYTES // (4 * n_rows) // _MULTIPLE * _MULTIPLE, 256))


def _chunks(vocab: int, width: int) -> Iterator[slice]:
    for first in range(0, vocab, width):
        yield slice(first, min(first + width, vocab))


def _logits(e: Tensor, c_chunk: Tensor, bias_chunk: Tensor | None, o: Options) -> Tensor:
    return _finished(e @ c_chunk.float().T, bias_chunk, o)


def _finished(z: Tensor, bias: Tensor | None, o: Options) -> Tensor:
    """Logits from products z, in place. bias: the columns' entries, or those of each logit."""
    if o.logit_scale != 1:
        z *= o.logit_scale
    if bias is not None:
        z += bias
    return z if o.softcap is None else z.div_(o.softcap).tanh_().mul_(o.softcap)


def _targets_in(columns: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
    """Whether each row's target lies in the chunk, (N, 1) bool, and its column in the chunk, (N, 1) int64.

    The column is arbitrary if the target lies elsewhere.
    """
    here = (columns >= chunk.start) & (columns < chunk.stop)
    return here[:, None], (columns - chunk.start).clamp(0, chunk.stop - chunk.start - 1)[:, None]


def _sides(need_e: bool, need_c: bool, rule: Rule | None, o: Options) -> list[tuple[str, bool, bool]]:
    """The versions of dL/dz that are needed, as (side, for dE, for dC and dbias); one version may serve both.

    side: "exact", "e" or "c", the weights that `_weights` applies.
    """
    side_e = "exact" if rule is None or not o.filter_e else "e"
    side_c = "exact" if rule is None or not o.filter_c else "e" if rule.seed is None else "c"
    wanted = ([side_e] if need_e else []) + ([side_c] if need_c else [])
    return [(side, side == side_e, side == side_c) for side in dict.fromkeys(wanted)]


def _weights(
    rule: Rule | None, side: str, p: Tensor, here: Tensor, place: Tensor, chunk: slice, dim: int, vocab: int
) -> Tensor:
    """What replaces a chunk's p (N, W) on a side: p itself, or the rule's weights in new memory. Targets keep p."""
    if rule is None or side == "exact":
        return p
    entries = torch.arange(chunk.start, chunk.stop, device=p.device)
    weights = rule.weights_e(p, entries, dim, vocab) if side == "e" else rule.weights_c(p, entries)
    return weights.scatter_(1, place, torch.where(here, p.gather(1, place), weights.gather(1, place)))


def _record(rule: Rule, p: Tensor, here: Tensor, place: Tensor, chunk: slice, kept: Tensor, dropped: Tensor) -> None:
    """Add a chunk's entries kept and softmax mass dropped to each row's `kept` and `dropped` (N,)."""
    stays = rule.keeps(p, torch.arange(chunk.start, chunk.stop, device=p.device))
    stays.scatter_(1, place, stays.gather(1, place) | here)
    kept += stays.sum(dim=1)
    dropped += torch.where(stays, 0, p).sum(dim=1)


def _rule(x: Operands, width: int, o: Options) -> tuple[Rule, Tensor]:
    """The rule of a call, and whether filter_mass makes the call exact, () bool.

    With filter_mass this costs one product of N x D x V.
    """
    e, c, bias, columns, lse, *_ = x
    vocab = c.shape[0]
    rule = Rule.of(columns, mean_logits(e, c, bias, columns, o), o)
    if o.filter_mass is None:
        return rule, torch.zeros((), dtype=torch.bool, device=columns.device)
    kept, dropped = torch.zeros_like(lse), torch.zeros_like(lse)
    for chunk in _chunks(vocab, width):
        p = _logits(e, c[chunk], None if bias is None else bias[chunk], o).sub_(lse[:, None]).exp_()
        _record(rule, p, *_targets_in(columns, chunk), chunk, kept, dropped)
    exact = rule.drops_more(dropped, o.filter_mass)
    return rule.exact_if(exact), exact
