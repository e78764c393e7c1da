"""GPU memory of a training step from formulas: what is allocated when, by component.

The formulas count the tensors that FLA's blocks save for the backward pass and those that a loss backend
holds at once. They describe the GPU kernels: the torch fallbacks that run on CPU hold more. Not counted:
CUDA's context and libraries (outside PyTorch's allocator), fragmentation, the savings of torch.compile'd
blocks.
"""

from dataclasses import dataclass

from linrnn.accounting.communication import gathered_bytes
from linrnn.accounting.flops import chunk_length
from linrnn.accounting.loss_memory import BF16, FP32, loss_memory
from linrnn.architecture import GLA_GATE_RANK, Architecture
from linrnn.config.schema import LossConfig


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by component, and the most that is allocated at once.

    Attributes:
        parameters: in the dtype that they are kept in.
        gradients: of all parameters, at the end of the backward pass.
        optimizer: AdamW's two moments.
        weight_copies: weights in the compute dtype, under autocast; with activation checkpointing the head's alone.
        mixer, mlp, residual: activations saved for the backward pass by the token mixers, the MLPs, and
            the norms with the residual stream; with activation checkpointing, `residual` is the blocks'
            inputs and the others are 0.
        recomputed_block: with activation checkpointing, the activations of the one block that is computed
            again, and its weights' copies.
        block_backward: what the backward pass of one block needs beside its saved activations.
        loss_forward, loss_backward: the most that the loss layer's passes hold beyond their inputs.
        at_loss, at_blocks, at_update: the total in the loss layer, in the first block of the backward
            pass (with activation checkpointing perhaps in the last, beside all gradients), and in the
            optimizer's update.
    """

    parameters: int
    gradients: int
    optimizer: int
    weight_copies: int
    mixer: int
    mlp: int
    residual: int
    recomputed_block: int
    block_backward: int
    loss_forward: int
    loss_backward: int
    at_loss: int
    at_blocks: int
    at_update: int

    @property
    def peak(self) -> int:
        """The most that is allocated at once."""
        return max(self.at_loss, self.at_blocks, self.at_update)

    def components(self) -> dict[str, int]:
        """Bytes by component under the names that measured memory has, activations in parts as well."""
        activations = {
            "activations/weight_copies": self.weight_copies,
            "activations/mixer": self.mixer,
            "activations/mlp": self.mlp,
            "activations/residual": self.residual,
        }
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": sum(activations.values()),
            **activations,
            "loss_forward": self.loss_forward,
            "loss_backward": self.loss_backward,
            "peak": self.peak,
        }


def memory_estimate(
    arch: Architecture,
    *,
    batch_size: int,
    seq_len: int,
    precision: str,
    loss: LossConfig,
    activation_checkpointing: str,
    accumulation_steps: int = 1,
    optimizer: bool = True,
    shard_ranks: int = 1,
    by_vocabulary: bool = False,
) -> MemoryEstimate:
    """Memory of a step of `accumulation_steps` micro-steps of `batch_size` sequences of `seq_len` tokens.

    Args:
        precision: fp32 | bf16_autocast (fp32 parameters) | bf16 (bf16 parameters).
        activation_checkpointing: none | full.
        optimizer: False for forward and backward passes alone.
        shard_ranks: ranks that hold one model between them (FSDP2); of this one's memory.
        by_vocabulary: whether each keeps its rows of embedding and head, for the tokens of all of them.

    With more than one micro-step the gradients of the first are there when the next one peaks. With one,
    they come into being while the activations go.
    """
    tokens = batch_size * seq_len
    kept = BF16 if precision == "bf16" else FP32
    compute = FP32 if precision == "fp32" else BF16
    autocast = precision == "bf16_autocast"

    parameters = kept * arch.n_parameters // shard_ranks
    state = 2 * parameters if optimizer else 0
    checkpointed = activation_checkpointing == "full"
    block = arch.mixer_parameters + arch.mlp_parameters
    block_copies = compute * block if autocast else 0  # kept for the backward pass, unless it makes them again
    copies = compute * arch.embedding_parameters if autocast else 0
    if shard_ranks > 1:
        # A block gathered while another is computed. Where it is gathered in fp32, autocast's copies stay.
        gathered = gathered_bytes(arch.model, precision)
        block_copies = block_copies if gathered == FP32 else 0
        head = compute * arch.embedding_parameters // (shard_ranks if by_vocabulary else 1)
        copies = 2 * gathered * block + (head if autocast or not by_vocabulary else 0)
    copies += 0 if checkpointed else arch.num_layers * block_copies

    mixer, mlp, residual = (
        tokens * size
        for size in _saved_per_token_and_layer(arch, seq_len, compute=compute, kept=kept, autocast=autocast)
    )
    # The final norm saves its input; its output goes to the loss, under autocast as a cast copy beside it.
    final_norm = tokens * arch.hidden_size * (kept + compute + (kept if autocast else 0))
    # A block's backward: the MLP's dz, dgate, dup and output of swiglu; the gradients of two residual
    # streams.
    block_backward = tokens * (4 * compute * arch.intermediate_size + 2 * kept * arch.hidden_size)
    if checkpointed:
        recomputed = mixer + mlp + residual + block_copies
        saved = {
            "mixer": 0,
            "mlp": 0,
            "residual": arch.num_layers * tokens * arch.hidden_size * kept + final_norm,
        }
    else:
        recomputed = 0
        saved = {
            "mixer": arch.num_layers * mixer,
            "mlp": arch.num_layers * mlp,
            "residual": arch.num_layers * residual + final_norm,
        }

    if by_vocabulary and shard_ranks > 1:
        all_tokens, rows = shard_ranks * tokens, -(-arch.vocab_size // shard_ranks)
        loss_forward, loss_backward = loss_memory(loss, all_tokens, arch.hidden_size, rows, compute)
        gathered_hidden = all_tokens * arch.hidden_size * compute
        in_fp32 = all_tokens * arch.hidden_size * (FP32 - compute)  # the gradient of hidden states, before it is cut
        loss_forward, loss_backward = loss_forward + gathered_hidden, loss_backward + gathered_hidden + in_fp32
        head_gradient = kept * rows * arch.hidden_size
    else:
        loss_forward, loss_backward = loss_memory(loss, tokens, arch.hidden_size, arch.vocab_size, compute)
        # FSDP: the whole gradient in fp32, before it is cut.
        head_gradient = (FP32 if shard_ranks > 1 else kept) * arch.embedding_parameters
    earlier_gradients = parameters if accumulation_steps > 1 else 0
    if earlier_gradients and shard_ranks == 1:
        head_gradient = 0
    held = parameters + state + earlier_gradients + copies + sum(saved.values())
    at_blocks = held + head_gradient + recomputed + block_backward
    if checkpointed:  # in the last block: its input and the loss layer's alone, every gradient but the embedding's
        inputs = tokens * arch.hidden_size * (kept + compute)
        to_come = 0 if arch.tie_embeddings or earlier_gradients else kept * arch.embedding_parameters // shard_ranks
        last = 2 * parameters - to_come + state + copies + inputs + recomputed + block_backward
        at_blocks = max(at_blocks, last)
    return MemoryEstimate(
        parameters=parameters,
        gradients=parameters,
        optimizer=state,
        weight_copies=copies,
        **saved,
        recomputed_block=recomputed,
        block_backward=block_backward,
        loss_forward=loss_forward,
        loss_backward=loss_backward,
        at_loss=held + max(loss_forward, loss_backward),
        at_blocks=at_blocks,
        at_update=2 * parameters + state,
    )


def _saved_per_token_and_layer(
    arch: Architecture, seq_len: int, *, compute: int, kept: int, autocast: bool
) -> tuple[int, int, int]:
    """Bytes saved for the backward pass per token and layer by mixer, MLP and norms, read off FLA 0.6.0.

    Under autocast the residual stream is fp32 (embeddings are not cast), so that each linear layer of the
    mixer saves a cast of its own of the norm's output; otherwise they share it. The second norm's output
    has the mixer output's dtype and is shared by the MLP's two.
    """
    d, heads, keys, values = arch.hidden_size, arch.num_heads, arch.key_dim, arch.value_dim
    chunk = chunk_length(arch, seq_len)
    linear_inputs = {"gla": 5, "gated_deltanet": 6, "kda": 6, "transformer": 3}[arch.model]
    inputs = compute * d * (linear_inputs if autocast else 1)
    match arch.model:
        case "gla":
            # q, k, v; the low-rank gate, before and after its logsigmoid; scores in fp32
            scan = compute * (2 * keys + values + 2 * keys + GLA_GATE_RANK) + FP32 * heads * chunk
        case "gated_deltanet":
            # the convolutions' inputs; normalised q and k, v; the inverse; scalars per head in fp32
            scan = compute * 2 * (2 * keys + values) + compute * heads * chunk + 5 * FP32 * heads
        case "kda":
            # the same, with the decay per key dimension, both low-rank inputs, scores beside the inverse
            decay = keys + 2 * arch.head_v_dim
            scan = compute * (2 * (2 * keys + values) + decay + 2 * heads * chunk) + 4 * FP32 * heads
        case _:
            scan = compute * (2 * keys + values) + FP32 * heads  # rotated q and k, v, log-sum-exp
    # Attention's output is o_proj's input; the others save the gated norm's two inputs and its output.
    outputs = compute * values * (1 if arch.model == "transformer" else 3)
    mlp = compute * (d + 2 * arch.intermediate_size)  # input, gate and up; their product is computed again
    norms = 2 * kept * d  # the inputs of the two norms: the residual stream before mixer and MLP
    return inputs + scan + outputs, mlp, norms
