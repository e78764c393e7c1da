"""Which scheme `cce_kahan` and `cce_filter` take on a GPU, and the memory and traffic that follow.

As the kernels themselves decide, multiprocessors that idle in a last round of tiles aside: `stored` keeps the
exponentials of a chunk of token rows (3 products, most of them in the forward pass), `recompute` makes the logits of a
chunk of the vocabulary again in the backward pass (4 products).
"""

from dataclasses import dataclass

from linrnn.config.schema import CceFilterLossConfig, CceKahanLossConfig

MIB = 2**20
FP32, BF16 = 4, 2  # bytes
WORKSPACE_MIB = 256  # where `loss.workspace_mib` is null
STORED_CHUNKS = 3  # of the rows, there, whatever they take
LEAST_ROWS = 512
ROW_MULTIPLE, COLUMN_MULTIPLE = 128, 256
LAUNCH_FLOPS = 40e-6 * 700e12  # what a GPU computes while it waits for a launch
STORED_LAUNCHES, RECOMPUTE_LAUNCHES = 8, 3  # per chunk
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


def cce_scheme(loss: CceKahanLossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> Scheme:
    """The scheme for a batch of `n_tokens` with `compute` bytes an element of hidden states and weight."""
    budget = (loss.workspace_mib or WORKSPACE_MIB) * MIB
    rows = 0
    if compute == BF16 and not isinstance(loss, CceFilterLossConfig):
        for chunks in range(1, max(1, n_tokens // LEAST_ROWS) + 1):
            one = _ceil(_ceil(n_tokens, chunks), ROW_MULTIPLE) * ROW_MULTIPLE
            default = loss.workspace_mib is None and chunks == STORED_CHUNKS
            if default or max(one * BF16 * vocab, _beside(loss, n_tokens, one, d, vocab)) <= budget:
                rows = one
                break
    tile, multiple = (ROW_MULTIPLE, COLUMN_MULTIPLE) if compute == BF16 else (64, 64)
    columns = budget // (n_tokens * compute + _ceil(n_tokens, tile) * FP32)
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
    if not scheme.rows:  # dlogits of the chunk's columns; what dE's rounding lost
        return 0, gradients + hidden * lost + n_tokens * scheme.columns * compute
    early = (_ceil(n_tokens, scheme.rows) - 1) * scheme.rows  # rows whose gradients the forward pass makes
    kept = FP32 if loss.accumulate == "fp32" else compute
    beside = 1 if loss.accumulate == "kahan" else 0
    state = hidden * kept + early * d * beside + weight * (kept + beside) + min(scheme.rows, n_tokens) * vocab * BF16
    part = min(scheme.rows, n_tokens) * d * FP32  # a chunk of dE in fp32
    rounded = gradients if loss.accumulate == "fp32" else 0
    return state + (part if early else 0), state + max(part, rounded)


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
    lost = _lost(loss, BF16)
    early = n_tokens if loss.accumulate == "fp32" else n_tokens - rows
    return rows * FP32 * d + (early + vocab) * d * lost
