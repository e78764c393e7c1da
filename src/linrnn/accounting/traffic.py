"""HBM traffic of a training step from formulas: every operand read once, every result written once.

Caches can save nothing of it where tensors are larger than they are, and tiles that are read again cost more: the
figures are what a perfect kernel of each scheme moves. Scalars per token are left out.
"""

from linrnn.accounting.cce import cce_traffic
from linrnn.accounting.loss_memory import BF16, FP32
from linrnn.architecture import Architecture
from linrnn.config.schema import (
    CceAppleLossConfig,
    CceFilterLossConfig,
    CceKahanLossConfig,
    FlaLossConfig,
    LigerLossConfig,
    LossConfig,
    TorchNativeLossConfig,
)


def loss_traffic(loss: LossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> tuple[int, int] | None:
    """(forward, backward) bytes of a loss layer; None where it depends on the data or on another's blocks.

    E = N·D, W = V·D, L = N·V elements; `compute` is the bytes of an element of hidden states, weight and logits.
    A product reads its two factors and writes its result. With gradients made in the forward pass, chunk by chunk
    (Liger, FLA), the weight is read and its gradient read and written once a chunk.
    """
    e, w, logits = n_tokens * d * compute, vocab * d * compute, n_tokens * vocab * compute
    fp32 = n_tokens * vocab * FP32
    product = e + w + logits
    match loss:
        case LigerLossConfig() | FlaLossConfig():
            chunks = min(-(-vocab // d), n_tokens)
            if isinstance(loss, FlaLossConfig):
                chunks = min(chunks, loss.num_chunks)
            gradient = w // compute * FP32 if isinstance(loss, FlaLossConfig) or loss.accumulate == "fp32" else w
            # logits; softmax in place (read, written); dE; dC, added to what the earlier chunks gave
            return 3 * (e + logits) + 2 * logits + chunks * (2 * w + 2 * gradient), 0
        case CceFilterLossConfig() | CceAppleLossConfig() | TorchNativeLossConfig():
            return None
        case CceKahanLossConfig():
            return cce_traffic(loss, n_tokens, d, vocab, compute)
    backward_products = 2 * product
    if loss.name == "compiled":  # logits written, read for the sums; read and overwritten by their gradient
        return product + logits, 2 * logits + backward_products
    # standard: fp32 copy, log-softmax; the gradients of both and of the copy
    copy = logits + fp32 if compute == BF16 else 0
    return product + copy + 2 * fp32, 4 * fp32 + copy + backward_products


def optimizer_traffic(arch: Architecture, precision: str) -> int:
    """AdamW: parameter, gradient and two moments read, all but the gradient written."""
    return 7 * arch.n_parameters * (BF16 if precision == "bf16" else FP32)
