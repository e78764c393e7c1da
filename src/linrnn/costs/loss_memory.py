"""GPU memory of each loss backend from formulas; every term is a tensor that the backend holds.

A formula takes (loss, N tokens, D dimensions, V entries, bytes of an element of hidden states, weight and logits) and
gives the most that the backend's forward and backward passes hold beyond hidden states, weight and labels, in bytes,
the gradients of hidden states and weight included. Scalars per token are left out.
"""

from linrnn.config.schema import CceAppleLossConfig, FlaLossConfig, LigerLossConfig, LossConfig, TorchNativeLossConfig

FP32, BF16 = 4, 2  # bytes


def standard_memory(loss: LossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> tuple[int, int]:
    """The logits in fp32 and log-softmax; then log-softmax and two fp32 gradients."""
    logits = n_tokens * vocab
    copy = compute if compute < FP32 else 0
    gradients = (n_tokens + vocab) * d * compute
    return logits * 2 * FP32, max(logits * 3 * FP32, logits * (copy + FP32) + gradients)


def compiled_memory(loss: LossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> tuple[int, int]:
    """The logits are stored once; their gradient overwrites them."""
    logits = n_tokens * vocab * compute
    return logits, logits + (n_tokens + vocab) * d * compute


def liger_memory(loss: LigerLossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> tuple[int, int]:
    """All in the forward pass, V / D chunks of tokens; the logits' gradient overwrites them."""
    hidden, weight = n_tokens * d, vocab * d
    gradients = (hidden + weight) * compute
    chunk = min(_power_of_two_from(_ceil(n_tokens, _ceil(vocab, d))), n_tokens) * vocab * compute
    if loss.accumulate == "fp32":  # dC in fp32, rounded at the end
        return max(hidden * compute + weight * FP32 + chunk, gradients + weight * FP32), gradients
    return gradients + chunk, gradients


def fla_memory(loss: FlaLossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> tuple[int, int]:
    """All in the forward pass; logits in fp32 beside the compute dtype; dC in fp32."""
    hidden, weight = n_tokens * d, vocab * d
    rows = _power_of_two_from(_ceil(n_tokens, min(loss.num_chunks, _ceil(vocab, d))))
    held = hidden * compute + weight * FP32 + 2 * rows * d * compute + rows * vocab * compute
    return held + max(rows * vocab * FP32, weight * compute), (hidden + weight) * compute


def torch_native_memory(
    loss: TorchNativeLossConfig, n_tokens: int, d: int, vocab: int, compute: int
) -> tuple[int, int]:
    """fp32 logits of a chunk of tokens; dC in the compute dtype."""
    gradients = (n_tokens + vocab) * d * compute
    rows = min(max(1, _power_of_two_from(_ceil(n_tokens, _ceil(vocab, d))) // 2), n_tokens)
    chunk = rows * vocab * FP32
    with_gradients = gradients + chunk + rows * d * (FP32 + compute)
    return (chunk, with_gradients) if loss.reduction == "none" else (with_gradients, gradients)


def cce_apple_memory(loss: CceAppleLossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> tuple[int, int]:
    """torch_compile stores the logits; cce sums in the compute dtype, other variants in fp32, rounded one by one."""
    hidden, weight = n_tokens * d, vocab * d
    if loss.variant == "torch_compile":
        return compiled_memory(loss, n_tokens, d, vocab, compute)
    if loss.variant == "cce":
        return 0, (hidden + weight) * compute
    return 0, (hidden + weight) * FP32 + weight * compute


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _power_of_two_from(number: int) -> int:
    return 1 << (number - 1).bit_length()
