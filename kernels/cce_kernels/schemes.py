"""Which scheme the Triton backward pass takes, and in what chunks: from shapes, dtypes, options and budget alone.

    stored      3 products, chunks of token rows         time in products: 3 + idle + 500 · (chunks − 1) / N
    recompute   4 products, chunks of vocabulary columns time in products: 4 + 500 / columns

500: what one more read and write of a 16-bit gradient and its 8 bits beside costs, against the product (6 bytes at
4.3 TB/s, 2 multiply-adds at 700 TFLOP/s: an H200); idle: what the tiles of dE leave unused in their last round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .accumulator import scratch_bytes
from .options import DEFAULT_WORKSPACE_MIB, MIB, Options, WorkspaceTooSmall

STORED_CHUNKS = (3, 4)  # of the token rows, where the caller names no budget
LEAST_ROWS = 512
ROW_MULTIPLE, COLUMN_MULTIPLE = 128, 256
SUM_COST = 500.0
TILE_ROWS, TILE_COLS, TILE_DEPTH = 128, 256, 64  # of the large products; see tiles.py
MOST_SPLITS = 4


@dataclass(frozen=True)
class Plan:
    """Chunks of `rows` token rows with stored exponentials, or (rows = 0) of `columns` vocabulary entries."""

    rows: int
    columns: int


@dataclass(frozen=True)
class Problem:
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
    with_stats: bool


def plan(p: Problem, programs: int, o: Options) -> Plan:
    """The faster scheme within `workspace_mib`.

    Raises:
        WorkspaceTooSmall: neither fits.
    """
    budget = None if o.workspace_mib is None else int(o.workspace_mib * MIB)
    rows = _rows(p, programs, budget, o) if _storable(p, o) else 0
    try:
        columns = _columns(p, o)
    except WorkspaceTooSmall:
        if not rows:
            raise
        return Plan(rows, 0)
    if rows and _stored_cost(p, rows) <= 4 + SUM_COST / columns:
        return Plan(rows, 0)
    return Plan(0, columns)


def splits_for(rows: int, depth: int, cols: int, programs: int) -> int:
    """Into how many parts to cut the summed dimension of a product, so that its last round of tiles idles little.

    Each part has an output of its own in fp32, so one more has to gain 2 %.
    """
    most = max(1, min(MOST_SPLITS, depth // TILE_DEPTH))
    return min(range(1, most + 1), key=lambda splits: _rounds(rows, cols, splits, programs) * (1 + 0.02 * splits))


def _rounds(rows: int, cols: int, splits: int, programs: int) -> float:
    """A product's time in tiles of full depth, one after another on each multiprocessor."""
    tiles = math.ceil(rows / TILE_ROWS) * math.ceil(cols / TILE_COLS)
    return math.ceil(tiles * splits / programs) / splits


def _storable(p: Problem, o: Options) -> bool:
    plain = p.uniform and not p.has_bias and o.filter_eps is None and not o.label_smoothing
    return plain and p.dtype == torch.bfloat16  # fp16 has too few exponents for exponentials without a maximum


def _stored_cost(p: Problem, rows: int) -> float:
    """Time in products, idle multiprocessors aside: they idle in both schemes."""
    return 3 + SUM_COST * max(1, math.ceil(p.n_rows / rows) - 1) / p.n_rows


def _idle(p: Problem, rows: int, programs: int) -> float:
    """What the tiles of dE leave unused, in products."""
    used = rows / TILE_ROWS * p.dim / TILE_COLS / programs
    return _rounds(rows, p.dim, splits_for(rows, p.vocab, p.dim, programs), programs) / used - 1


def _stored_bytes(p: Problem, rows: int, programs: int, o: Options) -> int:
    splits = splits_for(rows, p.vocab, p.dim, programs)
    early = p.n_rows - rows
    return (
        rows * (2 * p.vocab + max(2, 4 * splits) * p.dim)
        + p.vocab * p.dim * (3 if p.main_grad else scratch_bytes(p.grad_c, o.accumulate))
        + (p.n_rows if o.accumulate == "fp32" else early) * p.dim * scratch_bytes(p.grad_e, o.accumulate)
        + p.n_rows * 64
    )


def _rows(p: Problem, programs: int, budget: int | None, o: Options) -> int:
    """Rows per chunk of the stored scheme: the fastest that fits; 0 if none does."""
    most = max(1, p.n_rows // LEAST_ROWS)
    fitting = {}
    for chunks in range(1, most + 1):
        rows = math.ceil(math.ceil(p.n_rows / chunks) / ROW_MULTIPLE) * ROW_MULTIPLE
        need = _stored_bytes(p, rows, programs, o)
        if need <= (DEFAULT_WORKSPACE_MIB * MIB if budget is None else budget) or (
            budget is None and chunks in STORED_CHUNKS
        ):
            fitting[rows] = _stored_cost(p, rows) + _idle(p, rows, programs)
    return min(fitting, key=lambda rows: fitting[rows], default=0)


def _columns(p: Problem, o: Options) -> int:
    """Vocabulary entries per chunk of the recomputing scheme: as many as dz, gathered rows of C (of two chunks),
    partial sums and what the sum of dE takes beside it leave room for."""
    fixed = p.n_rows * p.dim * scratch_bytes(p.grad_e, o.accumulate)
    tile = 64 if p.dtype == torch.float32 else TILE_ROWS
    per_column = p.n_rows * p.dtype.itemsize + math.ceil(p.n_rows / tile) * 4
    if o.filter_eps is not None:
        per_column += 2 * p.dim * p.dtype.itemsize + (math.ceil(8 * p.n_rows / tile) if p.with_stats else 0)
    multiple = 64 if p.dtype == torch.float32 else COLUMN_MULTIPLE
    return o.chunk_width(p.vocab, fixed, per_column, multiple)
