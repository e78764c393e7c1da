"""Chooses the scheme of the Triton backward pass and its chunk size, from shapes, dtypes, options and budget alone.

    scheme              chunks of           time, in products of N x D x V
    three products      token rows          3 + 1600 · (chunks − 1) / N
    four products       vocabulary columns  4 + 1600 · chunks / V
    filter's lists      token rows          1.34 + 1840 / N + launches + gathers (`_filter_cost`)

CHUNK_COST, 1600, is what one more chunk costs in rows (or columns) of a product: the gradient and its rounding error
are read and written once more, and each tile starts and ends once more. Small problems wait for kernel launches
instead, about 40 µs each. A filtered call works through lists where it can, and takes four products elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

import torch

from .accumulator import scratch_bytes
from .filter.rule import COLUMN_GROUP, LIKELY_GROUP, TILE_COLS, TILE_ROWS, block_rows, likely_sizes
from .options import DEFAULT_WORKSPACE_MIB, MIB, Options, WorkspaceTooSmall

MOST_DEFAULT_MIB = 2048  # limit of a chunk's exponentials, without a workspace_mib
SLOWER = 1.04  # the default may take this multiple of the fastest chunks' time, in order to save memory
LARGER_WITH_COPIES, SLOWER_WITH_COPIES = 1.05, 1.12  # see `_rows`
LEAST_ROWS = 512  # in a chunk of three products
ROW_MULTIPLE, COLUMN_MULTIPLE = 128, 256
CHUNK_COST = 1600.0
LAUNCH_SECONDS = 40e-6
STORED_LAUNCHES, RECOMPUTE_LAUNCHES = 4, 3  # per chunk
FLOPS = 700e12
LEAST_SKIPPED = 2**37  # ignored rows are left out of products of this many multiply-adds or more
MOST_SPLITS = 4
MOST_PARTS = 2**23  # numbers of all splits of one chunk's w C, fp32
MOST_PARTS_BESIDE = 2**25  # the same for all chunks together
LEAST_BUSY = 0.85  # the share of the multiprocessors that dE's product occupies if it runs alone
MAX_SPLITS = 32  # splits of the vocabulary, each with partial sums of its own
# The filter's lists (filter/select.py).
SEGMENTS = 8  # segments of a row; one warp lists the kept entries of one segment
SLOTS = 768  # entries that a segment can list
EIGHTS = 256  # groups of eight columns that a warp reads at a time
FOUND = 512  # groups of eight columns that a warp can note down for a closer look
# Listed entries per row, averaged over the rows: the least that is worth a list, the usual number, the limit. A row
# can keep 1 / eps entries, but no trained model's rows do. Beyond V / 120 entries dense products are as fast. The
# lists get twice the usual number where no columns are computed densely.
LEAST_LISTED, USUALLY_LISTED, MOST_LISTED = 64, 256, 1024
# Lists that take a small part of the workspace hold this many times the usual number. Then no Gaussian logits overflow
# them: at eps = 2^-12 and V >= 49,152 a row of Gaussian logits keeps at most V Q(sqrt(2 ln(eps V))) <= 634 entries,
# whatever their standard deviation is. Q is the normal distribution's upper tail.
ROOMY, ROOMY_SHARE = 2.5, 8
MOST_ENTRIES = 2**31 - 2**16  # offsets in the lists are int32, also those of a block beyond the end (filter/gather.py)
STATE_BYTES_PER_ENTRY = 8  # column and weight
LIST_BYTES_PER_ENTRY = 16  # column, weight, row, coefficient
SORT_BYTES_PER_ENTRY = 36  # of the part of the lists that is being sorted
LISTED_TIMES_EPS = 2.0**-4  # an eps below 2^-12 lists this / eps entries a row
LEAST_WIDTH, MOST_WIDTH = 16, 2**16  # columns of a sample at a time
LIST_PARTS = 8  # the most parts that the lists are sorted in, one after another
# Time of a call through the lists. The figures are fitted to rows of results/bench_loss with eps = 2^-12 and at least
# 32,000 entries (flat, peaked and trained logits, H100 and H200). Where the grid's calls are filtered and no list
# overflowed, the model says 0.81 to 1.11 of their times.
FILTER_PRODUCTS = 1.34  # the logits, the head, the samples, and what reads the exponentials
FILTER_LAUNCHES, LIST_LAUNCHES = 100, 4  # per call; per chunk of rows
GATHER_SECONDS = 2.5e-13  # per place in the lists and dimension
HEAD_ROWS = 1840.0  # what the passes over the head and its gradient cost, in rows of a product
FILTER_SAVES = 0.15  # the share of the exact time that a filter must save by the model
# On flat logits every p is about 1 / V. Unless eps is this many times as large, rows keep so many entries that the
# lists overflow.
LEAST_EPS_TIMES_VOCAB = 12.0


@dataclass(frozen=True)
class Plan:
    """The chunks of a call."""

    rows: int  # token rows of a chunk of three products; 0 where the call takes another scheme
    # Vocabulary columns of a chunk of four products. Three products use up their stored exponentials, so a second
    # backward pass takes four. Filter lists that overflow take four, too.
    columns: int
    capacity: int = 0  # entries that the filter's lists hold; 0 where the call uses no lists
    exact: bool = False  # whether the call leaves out its filter, because exact gradients are faster (filter_if_faster)

    def options(self, o: Options) -> Options:
        """The options that the call follows: o, without its filter if the call is exact."""
        return o.without_filter() if self.exact else o


class Problem(NamedTuple):
    """The sizes and dtypes of a call that the plan depends on."""

    n_rows: int
    dim: int
    vocab: int
    dtype: torch.dtype  # of what the products multiply
    grad_e: torch.dtype | None  # of the gradients; None where one is not wanted
    grad_c: torch.dtype | None
    main_grad: bool  # whether dC is added to the caller's fp32 buffer
    # Whether all row losses have the same upstream gradient, and the log-sum-exps none. Otherwise three products take
    # one chunk: the forward pass multiplies every chunk but the last, before upstream gradients are known.
    uniform: bool
    has_bias: bool
    sharded: bool = False  # whether C is one rank's part of the vocabulary


@lru_cache(maxsize=1024)
def plan(p: Problem, programs: int, o: Options) -> Plan:
    """The fastest scheme whose chunk fits `workspace_mib`; three products also need their sums to fit.

    With filter_if_faster exact gradients are one of the schemes.

    programs: multiprocessors of the device.

    Raises:
        WorkspaceTooSmall: no scheme fits.
    """
    if o.filter_if_faster:
        filtered, exact = (plan(p, programs, x) for x in (replace(o, filter_if_faster=False), o.without_filter()))
        return filtered if _filter_pays(p, filtered, exact, o) else replace(exact, exact=True)
    rows = _rows(p, programs, o) if _storable(p, o) else 0
    try:
        columns = _columns(p, o)
    except WorkspaceTooSmall:
        if not rows:
            raise
        return Plan(rows, COLUMN_MULTIPLE)
    if rows and _stored_cost(p, rows) <= _recompute_cost(p, columns):
        return Plan(rows, columns)
    capacity = _capacity(p, o)
    if capacity:
        try:  # in the memory that the lists leave
            return Plan(0, _columns(p, o, _beside_lists(p, programs, capacity, o)), capacity)
        except WorkspaceTooSmall:
            pass
    return Plan(0, columns)


def splits_beside(rows: int, cols: int, programs: int, n_rows: int) -> int:
    """Parts that dE's product, with an output of rows × cols, cuts its summed dimension into, beside dC's product.

    Each part has an fp32 output of its own, of the n_rows rows of all chunks; all take at most MOST_PARTS_BESIDE
    numbers. Both products take as long. So one part is enough once dE's tiles fill about half of the multiprocessors.
    """
    wanted = min(MOST_SPLITS, math.ceil(programs / (2.2 * _tiles(rows, cols))))
    return max(1, min(wanted, MOST_PARTS_BESIDE // (n_rows * cols)))


@lru_cache(maxsize=1024)
def splits_alone(rows: int, cols: int, programs: int) -> int:
    """The same for one chunk whose products run one after the other; 0 if they had better run side by side.

    Another part must occupy the multiprocessors better by a tenth. The products run side by side if even the best
    number of parts occupies less than LEAST_BUSY of them, or if e times its factors does not fit dE's memory
    (`fits_hidden`).
    """

    def busy(splits: int) -> float:
        units = _tiles(rows, cols) * splits
        return units / (math.ceil(units / programs) * programs)

    best = 1
    for splits in range(2, MOST_SPLITS + 1):
        if splits * rows * cols <= MOST_PARTS and busy(splits) > 1.1 * busy(best):
            best = splits
    return best if busy(best) >= LEAST_BUSY and (best > 1 or fits_hidden(cols)) else 0


def _tiles(rows: int, cols: int) -> int:
    """Tiles of a product's output."""
    return math.ceil(rows / TILE_ROWS) * math.ceil(cols / TILE_COLS)


def most_splits(row_tiles: int, programs: int) -> int:
    """The most parts that the vocabulary is cut into: enough to occupy all programs when rows are few."""
    return max(MAX_SPLITS, math.ceil(programs / row_tiles))


def _storable(p: Problem, o: Options) -> bool:
    # Without a softcap, label smoothing has rank one (triton/smoothing.py). Stand-in targets of shards would take a
    # share.
    smoothed = o.label_smoothing > 0 and (o.softcap is not None or p.sharded)
    # A bias's gradient is divided by logit_scale (triton/targets/bias.py).
    plain = o.filter_eps is None and not smoothed and not (p.has_bias and o.logit_scale == 0)
    # fp16 has too narrow a range for exponentials that no row maximum scales, and for gradients that hold their sums.
    held = (p.grad_e, None if p.main_grad else p.grad_c)
    return plain and p.dtype == torch.bfloat16 and torch.float16 not in held


def _stored_cost(p: Problem, rows: int) -> float:
    """Time of three products, in products of N x D x V."""
    chunks = math.ceil(p.n_rows / rows)
    return max(3 + CHUNK_COST * (chunks - 1) / p.n_rows, _launches(p, chunks * STORED_LAUNCHES))


def _recompute_cost(p: Problem, columns: int) -> float:
    """Time of four products, in products of N x D x V."""
    chunks = math.ceil(p.vocab / columns)
    return max(4 + CHUNK_COST / columns, _launches(p, chunks * RECOMPUTE_LAUNCHES))


def _filter_pays(p: Problem, filtered: Plan, exact: Plan, o: Options) -> bool:
    """Whether the filter's lists are clearly faster than exact gradients.

    The share of entries above eps is known on the device alone. So the model counts as many as rows usually list.
    """
    assert o.filter_eps is not None
    if not filtered.capacity or o.filter_eps * p.vocab < LEAST_EPS_TIMES_VOCAB:
        return False
    cost = _stored_cost(p, exact.rows) if exact.rows else _recompute_cost(p, exact.columns)
    cost -= (p.grad_e is None) + (p.grad_c is None and not p.main_grad)  # a gradient not wanted saves its product
    return _filter_cost(p, filtered.capacity, o) <= (1 - FILTER_SAVES) * cost


def _filter_cost(p: Problem, capacity: int, o: Options) -> float:
    """Time of a call through lists of `capacity` entries that hold the usual number, in products of N x D x V."""
    chunks = math.ceil(p.n_rows / ListMemory(p.n_rows, p.dim, p.vocab, capacity, o).rows())
    listed = min(capacity, _usually_listed(o) * p.n_rows)
    gathers = GATHER_SECONDS * listed * p.dim * FLOPS / (2.0 * p.n_rows * p.dim * p.vocab)
    launches = chunks * LIST_LAUNCHES
    products = FILTER_PRODUCTS + HEAD_ROWS / p.n_rows + gathers
    return max(products + _launches(p, launches), _launches(p, FILTER_LAUNCHES + launches))


def _launches(p: Problem, launches: int) -> float:
    """Time of that many kernel launches, in products of N x D x V."""
    return launches * LAUNCH_SECONDS * FLOPS / (2.0 * p.n_rows * p.dim * p.vocab)


def skips_ignored(n_rows: int, dim: int, vocab: int, has_bias: bool, with_lse: bool) -> bool:
    """Whether three products leave out ignored rows, which takes one more launch and a copy of e.

    Not in small calls, which wait for their launches. Not with a bias, whose gradient reads all of w. Not where the
    log-sum-exps of ignored rows are wanted.
    """
    return n_rows * dim * vocab >= LEAST_SKIPPED and not has_bias and not with_lse


def fits_hidden(dim: int) -> bool:
    """Whether dE's memory can hold e times its factors until dE is written: its rows begin at lines of 128 bytes."""
    return dim % 64 == 0


def copied_bytes(n_rows: int, dim: int, vocab: int) -> int:
    """Bytes of copies of e and c, 16 bits, whose rows begin at lines of 128 bytes; 0 where contiguous rows do so."""
    return 0 if fits_hidden(dim) else 2 * (n_rows + vocab) * math.ceil(dim / 64) * 64


def fits_vocab(n_rows: int, vocab: int, grad_c: torch.dtype, splits: int) -> bool:
    """Whether dC's memory can hold the parts of w C, fp32, until dC is written."""
    return 4 * splits * n_rows <= grad_c.itemsize * vocab


def stored_bytes(p: Problem, rows: int, programs: int, o: Options) -> tuple[int, int]:
    """Bytes of (a chunk's exponentials, everything else that three products hold beside the gradients of e and c)."""
    rows, summed = min(rows, p.n_rows), rows < p.n_rows
    hidden, beside = p.n_rows * p.dim, 0
    scaled = 2 * rows * math.ceil(p.dim / 64) * 64
    if p.grad_e is not None:
        alone = 0 if summed else splits_alone(rows, p.dim, programs)
        splits = alone or splits_beside(rows, p.dim, programs, p.n_rows)
        lent = alone and p.grad_c and not p.main_grad and fits_vocab(rows, p.vocab, p.grad_c, splits)
        if splits > 1 and not lent:
            beside += 4 * splits * hidden
        beside += hidden * (scratch_bytes(p.grad_e, o.accumulate) if summed else 0)
        if alone == 1:
            scaled = 0
    if p.main_grad:
        beside += p.vocab * p.dim * (3 if summed else 2)
    elif summed:
        beside += p.vocab * p.dim * scratch_bytes(p.grad_c, o.accumulate)
    if p.has_bias:
        beside += 4 * p.vocab
    return rows * 2 * p.vocab, beside + (scaled if p.grad_c is not None or p.main_grad else 0)


def _rows(p: Problem, programs: int, o: Options) -> int:
    """Rows per chunk of three products, in chunks of equal size; 0 if fewer than LEAST_ROWS fit.

    Rows whose upstream gradients differ take one chunk (`Problem.uniform`); 0 if it does not fit.

    With `workspace_mib`: as many rows as fit. Without: the least memory that is at most SLOWER times as slow as the
    fastest, among chunks of at most MOST_DEFAULT_MIB that take, with their sums, no more than all logits in 16 bits. If
    copies of e and c make that larger, the fastest leaner chunks replace it, at most SLOWER_WITH_COPIES times as slow.
    """
    budget = None if o.workspace_mib is None else o.workspace_mib * MIB
    logits, copies = 2 * p.n_rows * p.vocab, copied_bytes(p.n_rows, p.dim, p.vocab)
    choices, fastest = [], math.inf
    for chunks in range(1, (max(1, p.n_rows // LEAST_ROWS) if p.uniform else 1) + 1):
        rows = math.ceil(math.ceil(p.n_rows / chunks) / ROW_MULTIPLE) * ROW_MULTIPLE
        exponentials, beside = stored_bytes(p, rows, programs, o)
        if budget is not None:
            if max(exponentials, beside) <= budget:
                return rows
            continue
        cost, total = _stored_cost(p, rows), exponentials + beside
        fastest = min(fastest, cost)
        if exponentials <= MOST_DEFAULT_MIB * MIB and (chunks == 1 or total <= logits):
            choices.append((total, cost, rows))
    if not choices:
        return 0
    quick = [x for x in choices if x[1] <= SLOWER * fastest]
    best = min(quick) if quick else min(choices, key=itemgetter(1))
    if copies and best[0] + copies > LARGER_WITH_COPIES * logits:
        leaner = [x for x in choices if x[0] + copies <= logits and x[1] <= SLOWER_WITH_COPIES * fastest]
        best = min(leaner, key=itemgetter(1)) if leaner else best
    return best[2]


def _columns(p: Problem, o: Options, fixed_bytes: int = 0) -> int:
    """Vocabulary columns per chunk of four products: as many as the logits' gradient dz has room for.

    fixed_bytes: workspace that is taken already.
    """
    multiple = 64 if p.dtype == torch.float32 else COLUMN_MULTIPLE
    return o.chunk_width(p.vocab, fixed_bytes, p.n_rows * p.dtype.itemsize, multiple)


def _capacity(p: Problem, o: Options) -> int:
    """Entries that the filter's lists hold, as far as the workspace allows.

    0 means that the call uses no lists. Either only one of two gradients is filtered, or filter/select.py does not
    serve the call, or the lists would be too short to be worth it.
    """
    if o.filter_eps is None or o.passes(p.grad_e is not None, p.grad_c is not None or p.main_grad) != [o.filter_eps]:
        return 0
    if p.has_bias or o.softcap is not None or o.logit_scale == 0 or p.dtype != torch.bfloat16:
        return 0  # select.py divides gradient factors by logit_scale, so 0 is excluded
    empty = ListMemory(p.n_rows, p.dim, p.vocab, 0, o)
    budget = empty.free() - empty.head(ROW_MULTIPLE) - LIST_PARTS * empty.starts()
    capacity = int(budget / (LIST_BYTES_PER_ENTRY + SORT_BYTES_PER_ENTRY / LIST_PARTS))
    capacity = capacity // LIST_PARTS * LIST_PARTS
    usual = _usually_listed(o)
    spare = int(room(o) / ROOMY_SHARE / STATE_BYTES_PER_ENTRY / p.n_rows)
    listed = min(max(usual, min(int(ROOMY * usual), spare)), MOST_LISTED, int(1 / o.filter_eps) + 1)
    most = min(listed * p.n_rows, MOST_ENTRIES) // LIST_PARTS * LIST_PARTS
    return min(capacity, most) if capacity >= LEAST_LISTED * p.n_rows else 0


def _usually_listed(o: Options) -> int:
    """Entries that a row lists in most calls, averaged over the rows."""
    assert o.filter_eps is not None
    return max(USUALLY_LISTED, int(LISTED_TIMES_EPS / o.filter_eps)) * (1 if o.filter_unbiased else 2)


def room(o: Options) -> int:
    """Bytes of the workspace."""
    return int((o.workspace_mib or DEFAULT_WORKSPACE_MIB) * MIB)


class ListMemory(NamedTuple):
    """The workspace of a call through the filter's lists, in bytes, and the chunks that fit it."""

    n_rows: int
    dim: int
    vocab: int
    capacity: int  # entries that the lists hold
    o: Options

    def state(self) -> int:
        """The lists, the per-row counters, the vocabulary's ranks, and the sampled columns."""
        drawn = 0
        if self.o.filter_unbiased:
            n_head, n_likely = likely_sizes(self.vocab)
            groups = math.ceil(self.vocab / COLUMN_GROUP) + math.ceil((n_likely - n_head) / LIKELY_GROUP)
            drawn = 8 * n_likely + 12 * groups * math.ceil(self.n_rows / block_rows(self.dim))
        rows = self.n_rows * (8 * SEGMENTS + 160)
        return STATE_BYTES_PER_ENTRY * self.capacity + rows + 4 * self.vocab + drawn

    def free(self) -> int:
        """What the state leaves."""
        return room(self.o) - self.state()

    def head(self, rows: int) -> int:
        """The head's fp32 gradient and rows of C, and probabilities and scaled rows of E for `rows` rows (rule.py)."""
        n_head = likely_sizes(self.vocab)[0] if self.o.filter_unbiased else 0
        return 6 * self.dim * n_head + rows * 2 * (n_head + self.dim) if n_head else 0

    def head_rows(self) -> int:
        """Rows per chunk of the head's probabilities, in chunks of equal size. The vocabulary must have a head."""
        rows = (self.free() - self.head(0)) // (self.head(1) - self.head(0))
        chunks = math.ceil(self.n_rows / max(ROW_MULTIPLE, rows // ROW_MULTIPLE * ROW_MULTIPLE))
        return math.ceil(self.n_rows / chunks / ROW_MULTIPLE) * ROW_MULTIPLE

    def starts(self) -> int:
        """The column starts of one sorted part of the lists."""
        return 4 * (self.vocab + 1)

    def parts(self) -> int:
        """Parts that the lists are sorted by column in. Fewer are faster: dC's kernel visits each for every column."""
        budget = self.free() - (LIST_BYTES_PER_ENTRY - STATE_BYTES_PER_ENTRY) * self.capacity
        budget -= 4 * self.dim * likely_sizes(self.vocab)[0] if self.o.filter_unbiased else 0  # the head's gradient
        parts = 1
        while parts < LIST_PARTS and SORT_BYTES_PER_ENTRY * self.capacity // parts + parts * self.starts() > budget:
            parts *= 2
        return parts

    def rows(self) -> int:
        """Rows per chunk of exponentials while lists are filled, beside what sorting the vocabulary takes."""
        budget = self.free() - SORT_BYTES_PER_ENTRY * self.vocab
        rows = budget // (2 * self.vocab + 4 * (SLOTS + FOUND) * SEGMENTS)
        return min(self.n_rows, max(ROW_MULTIPLE, rows // ROW_MULTIPLE * ROW_MULTIPLE))


def _beside_lists(p: Problem, programs: int, capacity: int, o: Options) -> int:
    """Bytes of the workspace that are taken when four products replace lists that overflowed.

    The filter's state, the rounding error of dE's sum, and, unless the replacement is exact (filter_mass), two partial
    statistics a row.
    """
    lost = 0 if p.grad_e is None else p.n_rows * p.dim * scratch_bytes(p.grad_e, o.accumulate)
    splits = 0 if o.filter_mass is not None else most_splits(math.ceil(p.n_rows / TILE_ROWS), programs)
    return ListMemory(p.n_rows, p.dim, p.vocab, capacity, o).state() + lost + 8 * splits * p.n_rows


def tail_width(n_rows: int, dim: int, columns: int, itemsize: int, room: int) -> int:
    """Sampled columns per chunk (filter/sample.py): as many as `room` bytes hold logits and copies for.

    A column takes n_rows logits and a copy of `dim` numbers, of `itemsize` bytes each.
    """
    width = min(MOST_WIDTH, room // (itemsize * (n_rows + dim)))
    return columns if width >= columns else max(LEAST_WIDTH, width // LEAST_WIDTH * LEAST_WIDTH)
