"""HBM traffic of a training step from formulas: every operand read once, every result written once.

Caches can save nothing of it where tensors are larger than they are, and tiles that are read again cost more: the
figures are what a perfect kernel of each scheme moves. Scalars per token are left out.

A loss's formula takes (loss, N tokens, D dimensions, V entries, bytes of an element of hidden states, weight and
logits) and gives the bytes of its forward and backward passes. E = N·D, W = V·D, L = N·V elements; a product reads its
two factors and writes its result.
"""

from linrnn.config.schema import FlaLossConfig, LigerLossConfig, LossConfig
from linrnn.costs.loss_memory import BF16, FP32
from linrnn.models.architecture import Architecture


def standard_traffic(loss: LossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> tuple[int, int]:
    """fp32 copy, log-softmax; the gradients of both and of the copy."""
    product, logits = _product(n_tokens, d, vocab, compute)
    fp32 = n_tokens * vocab * FP32
    copy = logits + fp32 if compute == BF16 else 0
    return product + copy + 2 * fp32, 4 * fp32 + copy + 2 * product


def compiled_traffic(loss: LossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> tuple[int, int]:
    """Logits written, read for the sums; read and overwritten by their gradient."""
    product, logits = _product(n_tokens, d, vocab, compute)
    return product + logits, 2 * logits + 2 * product


def liger_traffic(loss: LigerLossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> tuple[int, int]:
    """Gradients are made in the forward pass, in min(V / D, N) chunks of tokens."""
    return _chunks_of_tokens(min(-(-vocab // d), n_tokens), loss.accumulate == "fp32", n_tokens, d, vocab, compute)


def fla_traffic(loss: FlaLossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> tuple[int, int]:
    """As Liger's, in `num_chunks` at most, dC in fp32."""
    return _chunks_of_tokens(min(-(-vocab // d), n_tokens, loss.num_chunks), True, n_tokens, d, vocab, compute)


def _chunks_of_tokens(
    chunks: int, fp32_gradient: bool, n_tokens: int, d: int, vocab: int, compute: int
) -> tuple[int, int]:
    """The weight is read and its gradient read and written once a chunk."""
    e, w, logits = n_tokens * d * compute, vocab * d * compute, n_tokens * vocab * compute
    gradient = vocab * d * FP32 if fp32_gradient else w
    # logits; softmax in place (read, written); dE; dC, added to what the earlier chunks gave
    return 3 * (e + logits) + 2 * logits + chunks * (2 * w + 2 * gradient), 0


def _product(n_tokens: int, d: int, vocab: int, compute: int) -> tuple[int, int]:
    """(the logits' product, the logits), bytes."""
    logits = n_tokens * vocab * compute
    return (n_tokens + vocab) * d * compute + logits, logits


def optimizer_traffic(arch: Architecture, precision: str) -> int:
    """AdamW: parameter, gradient and two moments read, all but the gradient written."""
    return 7 * arch.n_parameters * (BF16 if precision == "bf16" else FP32)
