"""GPU memory of each loss backend from formulas; every term is a tensor that the backend holds."""

from linrnn.accounting.cce import cce_memory
from linrnn.config.schema import (
    CceAppleLossConfig,
    CceKahanLossConfig,
    FlaLossConfig,
    LigerLossConfig,
    LossConfig,
    TorchNativeLossConfig,
)

FP32, BF16 = 4, 2  # bytes


def loss_memory(loss: LossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> tuple[int, int]:
    """The most that a backend's forward and backward passes hold beyond hidden states, weight and labels.

    In bytes, the gradients of hidden states and weight included. N = `n_tokens`, V = `vocab`; `compute` is
    the bytes of an element of hidden states, weight and logits. Scalars per token are left out.
    """
    hidden, weight, logits = n_tokens * d, vocab * d, n_tokens * vocab
    gradients = (hidden + weight) * compute
    match loss:
        case LigerLossConfig():  # all in the forward pass, V / D chunks of tokens; dlogits overwrite logits
            chunk = min(_power_of_two_from(_ceil(n_tokens, _ceil(vocab, d))), n_tokens) * vocab * compute
            if loss.accumulate == "fp32":  # dC in fp32, rounded at the end
                return max(hidden * compute + weight * FP32 + chunk, gradients + weight * FP32), gradients
            return gradients + chunk, gradients
        case FlaLossConfig():  # all in the forward pass; logits in fp32 beside the compute dtype; dC in fp32
            rows = _power_of_two_from(_ceil(n_tokens, min(loss.num_chunks, _ceil(vocab, d))))
            held = hidden * compute + weight * FP32 + 2 * rows * d * compute + rows * vocab * compute
            return held + max(rows * vocab * FP32, weight * compute), gradients
        case TorchNativeLossConfig():  # fp32 logits of a chunk of tokens; dC in the compute dtype
            rows = min(max(1, _power_of_two_from(_ceil(n_tokens, _ceil(vocab, d))) // 2), n_tokens)
            chunk = rows * vocab * FP32
            with_gradients = gradients + chunk + rows * d * (FP32 + compute)
            return (chunk, with_gradients) if loss.reduction == "none" else (with_gradients, gradients)
        case CceAppleLossConfig(variant="torch_compile"):
            return logits * compute, logits * compute + gradients
        case CceAppleLossConfig(variant="cce"):
            return 0, gradients
        case CceAppleLossConfig():  # the other variants sum both gradients in fp32 and round one by one
            return 0, (hidden + weight) * FP32 + weight * compute
        case CceKahanLossConfig():
            return cce_memory(loss, n_tokens, d, vocab, compute)
    if loss.name == "compiled":  # the logits are stored once; their gradient overwrites them
        return logits * compute, logits * compute + gradients
    # standard: the logits in fp32 and log-softmax; then log-softmax and two fp32 gradients
    copy = compute if compute < FP32 else 0
    return logits * 2 * FP32, max(logits * 3 * FP32, logits * (copy + FP32) + gradients)


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _power_of_two_from(number: int) -> int:
    return 1 << (number - 1).bit_length()
