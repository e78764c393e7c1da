"""Which scheme the Triton backward pass takes, and in what chunks: from shapes, dtypes, options and budget alone.

    stored      3 products, chunks of token rows         time in products: 3 + 1100 · (chunks − 1) / N
    recompute   4 products, chunks of vocabulary columns time in products: 4 + 1100 · chunks / V

The filter goes by lists of entries (select.py) where it can, and by `recompute` where not.

1100: what cutting a sum into one more chunk costs, against the product. One more read and write of a 16-bit
gradient and its 8 bits (6 bytes at 4.3 TB/s, 2 multiply-adds at 700 TFLOP/s: 500), and starting and finishing each
tile once more (3.5 µs against 0.39 µs per 64 of depth: 600), as measured on an H200. Small problems wait for the
launches instead, some 40 µs each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from .accumulator import scratch_bytes
from .filter_rule import COLUMN_GROUP, LIKELY_GROUP, TILE_COLS, TILE_ROWS, block_rows, likely_sizes
from .options import DEFAULT_WORKSPACE_MIB, MIB, Options, WorkspaceTooSmall

STORED_CHUNKS = 3  # of the token rows, where the caller names no budget
MOST_DEFAULT_MIB = 2048  # of a chunk's exponentials, where the caller names no budget
LEAST_ROWS = 512
ROW_MULTIPLE, COLUMN_MULTIPLE = 128, 256
CHUNK_COST = 1100.0
LAUNCH_SECONDS = 40e-6
STORED_LAUNCHES, RECOMPUTE_LAUNCHES = 4, 3  # per chunk
FLOPS = 700e12
MOST_SPLITS = 4
MAX_SPLITS = 32  # of the vocabulary, where each has sums of its own
SEGMENTS, SLOTS = 8, 768  # of a row, listed one by one; entries that can be listed in one of them
EIGHTS, FOUND = 256, 512  # of columns: looked at together; noted down for a closer look, at most (select.py)
# Entries a row that lists hold, on average over the rows: at least, usually, at most. A row keeps 1 / eps at most, but
# no model's does; beyond V / 120 dense products are as fast. Where no head is dense lists have twice as many.
LEAST_LISTED, USUALLY_LISTED, MOST_LISTED = 64, 256, 1024
MOST_ENTRIES = 2**31 - 2**16  # places in the lists are 32 bits wide, a block's beyond the last one, too (gather.py)
STATE_BYTES_PER_ENTRY = 8  # of the lists: column, weight
LIST_BYTES_PER_ENTRY, SORT_BYTES_PER_ENTRY = 16, 36  # the same, row, coefficient; of a part while it is sorted
LISTED_TIMES_EPS = 2.0**-4  # more, from 2^-12 on
LEAST_WIDTH, MOST_WIDTH = 16, 2**16  # columns of a sample at a time
LIST_PARTS = 8  # sorted one after another, at most


@dataclass(frozen=True)
class Plan:
    """Chunks of `rows` token rows with stored exponentials, or (rows = 0) of `columns` vocabulary entries.

    A second backward pass through stored exponentials, which the first one used up, goes by `columns`."""

    rows: int
    columns: int
    capacity: int = 0  # of the lists of entries, where the filter goes by them (select.py), `columns` if they overflow


class Problem(NamedTuple):
    """Sizes and dtypes of one call, as far as the choice depends on them."""

    n_rows: int
    dim: int
    vocab: int
    dtype: torch.dtype  # of the products
    grad_e: torch.dtype | None  # None: not wanted
    grad_c: torch.dtype | None
    main_grad: bool  # dC is added to an fp32 buffer of the caller's
    uniform: bool  # one upstream gradient for all rows, none for LSE
    has_bias: bool


@lru_cache(maxsize=1024)
def plan(p: Problem, programs: int, o: Options) -> Plan:
    """The faster scheme whose chunk fits `workspace_mib` (and, if exponentials are stored, whose sums do too).

    Raises:
        WorkspaceTooSmall: neither fits.
    """
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
        try:  # with what is left beside the lists
            return Plan(0, _columns(p, o, _beside_lists(p, programs, capacity, o)), capacity)
        except WorkspaceTooSmall:
            pass
    return Plan(0, columns)


def splits_for(rows: int, cols: int, programs: int) -> int:
    """Into how many parts to cut the summed dimension of dE's product, whose output is rows × cols.

    It runs beside dC's, which takes as long (matmul.py): where its tiles are many enough to fill half of the
    multiprocessors, dC's fill the rest. A tenth less is not worth the parts' memory, an fp32 output each.
    """
    tiles = math.ceil(rows / TILE_ROWS) * math.ceil(cols / TILE_COLS)
    return max(1, min(MOST_SPLITS, math.ceil(programs / (2.2 * tiles))))


def most_splits(row_tiles: int, programs: int) -> int:
    """No more parts of the vocabulary than these: enough for all programs, where rows are few."""
    return max(MAX_SPLITS, math.ceil(programs / row_tiles))


def _storable(p: Problem, o: Options) -> bool:
    plain = p.uniform and not p.has_bias and o.filter_eps is None and not o.label_smoothing
    # fp16 has too few exponents: for exponentials without a maximum, and for their sums, which gradients hold.
    held = (p.grad_e, None if p.main_grad else p.grad_c)
    return plain and p.dtype == torch.bfloat16 and torch.float16 not in held


def _stored_cost(p: Problem, rows: int) -> float:
    """Time in products."""
    chunks = math.ceil(p.n_rows / rows)
    return max(3 + CHUNK_COST * max(1, chunks - 1) / p.n_rows, _launches(p, chunks * STORED_LAUNCHES))


def _recompute_cost(p: Problem, columns: int) -> float:
    chunks = math.ceil(p.vocab / columns)
    return max(4 + CHUNK_COST / columns, _launches(p, chunks * RECOMPUTE_LAUNCHES))


def _launches(p: Problem, launches: int) -> float:
    """Their time in products."""
    return launches * LAUNCH_SECONDS * FLOPS / (2.0 * p.n_rows * p.dim * p.vocab)


def _stored_bytes(p: Problem, rows: int, programs: int, o: Options) -> tuple[int, int]:
    """(the chunk's exponentials, everything beside them)."""
    splits = splits_for(rows, p.dim, programs)
    hidden, beside = p.n_rows * p.dim, rows * 2 * p.dim
    if p.grad_e is not None:
        beside += hidden * (scratch_bytes(p.grad_e, o.accumulate) + (4 * splits if splits > 1 else 0))
    beside += p.vocab * p.dim * (3 if p.main_grad else scratch_bytes(p.grad_c, o.accumulate))
    return rows * 2 * p.vocab, beside


def _rows(p: Problem, programs: int, o: Options) -> int:
    """Rows per chunk of the stored scheme: as many as fit, the chunks of one size; 0 if too few do.

    Without a `workspace_mib` a chunk's exponentials take a third of the logits in 16 bits, no less than
    DEFAULT_WORKSPACE_MIB where there are as many, and no more than MOST_DEFAULT_MIB; sums take what they take.
    """
    budget = (o.workspace_mib or DEFAULT_WORKSPACE_MIB) * MIB
    for chunks in range(1, max(1, p.n_rows // LEAST_ROWS) + 1):
        rows = math.ceil(math.ceil(p.n_rows / chunks) / ROW_MULTIPLE) * ROW_MULTIPLE
        exponentials, beside = _stored_bytes(p, rows, programs, o)
        by_default = o.workspace_mib is None and chunks >= STORED_CHUNKS and exponentials <= MOST_DEFAULT_MIB * MIB
        if by_default or max(exponentials, beside) <= budget:
            return rows
    return 0


def _columns(p: Problem, o: Options, fixed_bytes: int = 0) -> int:
    """Vocabulary entries per chunk of the recomputing scheme: as many as dz leaves room for."""
    multiple = 64 if p.dtype == torch.float32 else COLUMN_MULTIPLE
    return o.chunk_width(p.vocab, fixed_bytes, p.n_rows * p.dtype.itemsize, multiple)


def _capacity(p: Problem, o: Options) -> int:
    """Entries that the filter's lists hold, as the workspace allows; 0 where it does not go by lists: one gradient
    of two is filtered, or what select.py does not cover, or lists too short to be worth it."""
    if o.filter_eps is None or o.passes(p.grad_e is not None, p.grad_c is not None or p.main_grad) != [o.filter_eps]:
        return 0
    if p.has_bias or o.softcap is not None or o.logit_scale == 0 or p.dtype != torch.bfloat16:
        return 0  # a scale of 0: select.py takes probabilities from gradient factors
    beside = _head_bytes(p.dim, p.vocab, o, ROW_MULTIPLE) + _state_bytes(p.n_rows, p.dim, p.vocab, 0, o)
    budget = room(o) - beside - LIST_PARTS * _starts_bytes(p.vocab)
    capacity = int(budget / (LIST_BYTES_PER_ENTRY + SORT_BYTES_PER_ENTRY / LIST_PARTS))
    capacity = capacity // LIST_PARTS * LIST_PARTS
    listed = max(USUALLY_LISTED, int(LISTED_TIMES_EPS / o.filter_eps)) * (1 if o.filter_unbiased else 2)
    listed = min(listed, MOST_LISTED, int(1 / o.filter_eps) + 1)
    most = min(listed * p.n_rows, MOST_ENTRIES) // LIST_PARTS * LIST_PARTS
    return min(capacity, most) if capacity >= LEAST_LISTED * p.n_rows else 0


def _state_bytes(n_rows: int, dim: int, vocab: int, capacity: int, o: Options) -> int:
    """Of the lists, and of what else stands beside a number or eight of each row, the entries' ranks, the likely
    ones, and the columns drawn."""
    drawn = 0
    if o.filter_unbiased:
        n_head, n_likely = likely_sizes(vocab)
        groups = math.ceil(vocab / COLUMN_GROUP) + math.ceil((n_likely - n_head) / LIKELY_GROUP)
        drawn = 8 * n_likely + 12 * groups * math.ceil(n_rows / block_rows(dim))
    return STATE_BYTES_PER_ENTRY * capacity + n_rows * (8 * SEGMENTS + 160) + 4 * vocab + drawn


def _beside_lists(p: Problem, programs: int, capacity: int, o: Options) -> int:
    """What the four-product scheme finds taken where it goes in for the lists: these, what the sum of dE has lost to
    rounding, and where it filters, too, two partial statistics of each row."""
    lost = 0 if p.grad_e is None else p.n_rows * p.dim * scratch_bytes(p.grad_e, o.accumulate)
    splits = 0 if o.filter_mass is not None else most_splits(math.ceil(p.n_rows / TILE_ROWS), programs)
    return _state_bytes(p.n_rows, p.dim, p.vocab, capacity, o) + lost + 8 * splits * p.n_rows


def _head_gradient_bytes(dim: int, vocab: int, o: Options) -> int:
    return 4 * dim * likely_sizes(vocab)[0] if o.filter_unbiased else 0


def _head_bytes(dim: int, vocab: int, o: Options, rows: int) -> int:
    """Of the head: its gradient, its rows of C, and for `rows` rows probabilities and scaled rows of E."""
    n_head = likely_sizes(vocab)[0] if o.filter_unbiased else 0
    return 6 * dim * n_head + rows * 2 * (n_head + dim) if n_head else 0


def room(o: Options) -> int:
    """Bytes of the workspace."""
    return int((o.workspace_mib or DEFAULT_WORKSPACE_MIB) * MIB)


def room_beside_lists(n_rows: int, dim: int, vocab: int, capacity: int, o: Options) -> int:
    """And of them those that the lists leave."""
    return room(o) - _state_bytes(n_rows, dim, vocab, capacity, o)


def tail_width(n_rows: int, dim: int, columns: int, itemsize: int, room: int) -> int:
    """Of how many columns the logits of n_rows, and copies of `dim` numbers each, exist at a time (sample.py)."""
    width = min(MOST_WIDTH, room // (itemsize * (n_rows + dim)))
    return columns if width >= columns else max(LEAST_WIDTH, width // LEAST_WIDTH * LEAST_WIDTH)


def _starts_bytes(vocab: int) -> int:
    """Of a part of the lists by column."""
    return 4 * (vocab + 1)


def head_rows(n_rows: int, dim: int, vocab: int, capacity: int, o: Options) -> int:
    """Rows whose probabilities of the head exist at a time: as many as fit beside the lists, in chunks of one size; for
    a vocabulary that has a head."""
    fixed = _head_bytes(dim, vocab, o, 0)
    rows = (room_beside_lists(n_rows, dim, vocab, capacity, o) - fixed) // (_head_bytes(dim, vocab, o, 1) - fixed)
    chunks = math.ceil(n_rows / max(ROW_MULTIPLE, rows // ROW_MULTIPLE * ROW_MULTIPLE))
    return math.ceil(n_rows / chunks / ROW_MULTIPLE) * ROW_MULTIPLE


def list_parts(n_rows: int, dim: int, vocab: int, capacity: int, o: Options) -> int:
    """Into how many parts the lists are cut to be sorted by column: as few as the workspace allows, as each has to be
    looked through for each column."""
    budget = room_beside_lists(n_rows, dim, vocab, capacity, o) - _head_gradient_bytes(dim, vocab, o)
    budget -= (LIST_BYTES_PER_ENTRY - STATE_BYTES_PER_ENTRY) * capacity
    parts = 1
    while parts < LIST_PARTS and SORT_BYTES_PER_ENTRY * capacity // parts + parts * _starts_bytes(vocab) > budget:
        parts *= 2
    return parts


def list_rows(n_rows: int, dim: int, vocab: int, capacity: int, o: Options) -> int:
    """Rows whose exponentials exist at a time while lists of `capacity` are made: as many as fit beside the lists and
    what sorting the vocabulary by likelihood takes."""
    budget = room_beside_lists(n_rows, dim, vocab, capacity, o) - SORT_BYTES_PER_ENTRY * vocab
    rows = budget // (2 * vocab + 4 * (SLOTS + FOUND) * SEGMENTS)
    return min(n_rows, max(ROW_MULTIPLE, rows // ROW_MULTIPLE * ROW_MULTIPLE))
