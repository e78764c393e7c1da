"""Which scheme `cce_kahan` and `cce_filter` take on a GPU, and the memory and traffic that follow.

As the kernels themselves decide on a GPU of 132 multiprocessors: `stored` keeps the exponentials of a chunk of token
rows (3 products, most of them in the forward pass), `recompute` makes the logits of a chunk of the vocabulary again in
the backward pass (4 products).
"""

import math
from dataclasses import dataclass

from linrnn.config.schema import CceFilterLossConfig, CceKahanLossConfig

MIB = 2**20
FP32, BF16 = 4, 2  # bytes
WORKSPACE_MIB = 256  # where `loss.workspace_mib` is null
STORED_CHUNKS = 3  # of the rows, there, if their exponentials take no more than:
MOST_DEFAULT_MIB = 2048
LEAST_ROWS = 512
PLACES = 16  # rows, by target, that one program adds up
ROW_MULTIPLE, COLUMN_MULTIPLE = 128, 256
LAUNCH_FLOPS = 40e-6 * 700e12  # what a GPU computes while it waits for a launch
STORED_LAUNCHES, RECOMPUTE_LAUNCHES = 4, 3  # per chunk
MULTIPROCESSORS = 132
TILE_ROWS, TILE_COLS, MOST_SPLITS = 128, 256, 4  # of dE's product, in parts where its tiles are few
CHUNK_COST = 1100  # of one more chunk, in products: / tokens (rows) or / vocabulary entries (columns)


@dataclass(frozen=True)
class Scheme:
    """Chunks of `rows` token rows with stored exponentials, or (rows = 0) of `columns` vocabulary entries."""

    rows: int
    columns: int

    @property
    def products(self) -> int:
        """N x D x V products of forward and backward pass."""
        return 3 if self.rows else 4


def filters(loss: CceKahanLossConfig) -> bool:
    """Whether a gradient entry may be left out: not where `filter_mass` is 0."""
    return isinstance(loss, CceFilterLossConfig) and loss.filter_mass != 0


def cce_scheme(loss: CceKahanLossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> Scheme:
    """The scheme for a batch of `n_tokens` with `compute` bytes an element of hidden states and weight."""
    budget = (loss.workspace_mib or WORKSPACE_MIB) * MIB
    rows = 0
    if compute == BF16 and not filters(loss):
        for chunks in range(1, max(1, n_tokens // LEAST_ROWS) + 1):
            one = _ceil(_ceil(n_tokens, chunks), ROW_MULTIPLE) * ROW_MULTIPLE
            exponentials = one * BF16 * vocab
            default = loss.workspace_mib is None and chunks >= STORED_CHUNKS and exponentials <= MOST_DEFAULT_MIB * MIB
            if default or max(exponentials, _beside(loss, n_tokens, one, d, vocab)) <= budget:
                rows = one
                break
    multiple = COLUMN_MULTIPLE if compute == BF16 else 64
    columns = budget // (n_tokens * compute)
    columns = vocab if columns >= vocab else max(columns // multiple, 1) * multiple
    if rows:
        launch = LAUNCH_FLOPS / (2 * n_tokens * d * vocab)
        chunks, parts = _ceil(n_tokens, rows), _ceil(vocab, columns)
        stored = max(3 + CHUNK_COST * max(1, chunks - 1) / n_tokens, STORED_LAUNCHES * chunks * launch)
        recompute = max(4 + CHUNK_COST / columns, RECOMPUTE_LAUNCHES * parts * launch)
        if stored <= recompute:
            return Scheme(rows, 0)
    return Scheme(0, columns)


def cce_memory(loss: CceKahanLossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> tuple[int, int]:
    """(forward, backward): the most that the passes hold beyond inputs, bytes; gradients included."""
    scheme = cce_scheme(loss, n_tokens, d, vocab, compute)
    hidden, weight, lost = n_tokens * d, vocab * d, _lost(loss, compute)
    gradients = (hidden + weight) * compute
    if filters(loss) and compute == BF16:  # lists and exponentials, then lists and products
        budget = (loss.workspace_mib or WORKSPACE_MIB) * MIB
        return budget, gradients + budget
    if not scheme.rows:  # dlogits of the chunk's columns; what dE's rounding lost
        return 0, gradients + hidden * lost + n_tokens * scheme.columns * compute
    rows = min(scheme.rows, n_tokens)
    held = rows * vocab * BF16 + _beside(loss, n_tokens, rows, d, vocab)
    sums = 0 if loss.accumulate == "fp32" else gradients  # in the gradients' own memory
    return held + sums, held + gradients + hidden * FP32 // PLACES


def cce_traffic(loss: CceKahanLossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> tuple[int, int]:
    """(forward, backward) bytes of HBM, every operand read and every result written once."""
    scheme = cce_scheme(loss, n_tokens, d, vocab, compute)
    e, w, logits, lost = n_tokens * d * compute, vocab * d * compute, n_tokens * vocab * compute, _lost(loss, compute)
    if not scheme.rows:
        chunks = _ceil(vocab, scheme.columns)
        sums = chunks * 2 * (e + n_tokens * d * lost)  # dE and what its rounding lost, read and written
        # logits again; dlogits written, read for dE and dC; dC written once
        return e + w, (chunks * e + w) + (chunks * e + 2 * w) + 3 * logits + sums
    chunks = _ceil(n_tokens, scheme.rows)
    exponentials = chunks * w + e + logits  # C read once a chunk, exponentials written
    gradients = (chunks * w + logits + e) + (logits + e)  # dE; dC without its sum
    sums = (2 * chunks - 1) * vocab * d * (compute + lost)  # dC and what it lost: written, then read and written
    share = (chunks - 1) / chunks  # all but the last chunk in the forward pass
    done_early = round(share * gradients) + (2 * chunks - 3) * vocab * d * (compute + lost) if chunks > 1 else 0
    return exponentials + done_early, gradients + sums - done_early


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _lost(loss: CceKahanLossConfig, compute: int) -> int:
    """Bytes an entry held beside a summed gradient."""
    return {"kahan": 1, "fp32": FP32, "bf16": 0}[loss.accumulate] if compute < FP32 else 0


def _beside(loss: CceKahanLossConfig, n_tokens: int, rows: int, d: int, vocab: int) -> int:
    """What the stored scheme holds beside the exponentials of a chunk."""
    tiles = _ceil(rows, TILE_ROWS) * _ceil(d, TILE_COLS)
    splits = min(MOST_SPLITS, math.ceil(MULTIPROCESSORS / (2.2 * tiles)))
    parts = n_tokens * d * FP32 * splits if splits > 1 else 0
    return rows * BF16 * d + (n_tokens + vocab) * d * _lost(loss, BF16) + parts
