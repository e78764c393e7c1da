"""GPU memory of a training step from formulas: what is allocated when, by component.

The formulas count the tensors that FLA's blocks save for the backward pass, those that a loss backend holds at once,
and cuBLAS's workspaces. They describe the GPU kernels: the torch fallbacks that run on CPU hold more. Not counted:
CUDA's context and libraries outside PyTorch's allocator, what the allocator rounds up (blocks of up to 1 MiB more than
was asked for: up to 0.8 % of the committed runs' peaks), fragmentation, the savings of torch.compile'd blocks.
"""

from dataclasses import dataclass

from linrnn.config.schema import LossConfig
from linrnn.costs.communication import ID, gathered_bytes
from linrnn.costs.layer_memory import layer_memory
from linrnn.losses.formulas import BF16, FP32, Bytes
from linrnn.losses.registry import FORMULAS_OF_LOSSES
from linrnn.models.architecture import Architecture

# PyTorch gives cuBLAS 4096 KiB x 8 on a Hopper GPU or later (aten/src/ATen/cuda/CublasHandlePool.cpp; NVIDIA advises as
# much under cublasSetWorkspace; before Hopper it is 8.1 MiB), one to each thread that multiplies: forward, backward.
WORKSPACES = 2 * 32 * 2**20


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by component, and the most that is allocated at once.

    Attributes:
        parameters: in the dtype that they are kept in.
        gradients: of all parameters, at the end of the backward pass.
        optimizer: AdamW's two moments.
        workspaces: cuBLAS's, always there.
        weight_copies: the blocks' weights in the compute dtype, under autocast; with activation checkpointing none, nor
            where FSDP gathers them in that dtype.
        mixer, mlp, residual: activations saved for the backward pass by the token mixers, the MLPs, and
            the norms with the residual stream and the batch; with activation checkpointing, `residual` is the
            blocks' inputs and the others are 0.
        loss_inputs: what the loss gets: hidden states, and the head where it is a copy. Gone once the loss layer's
            backward pass is through.
        recomputed_block: with activation checkpointing, the activations of the one block that is computed
            again, and its weights' copies.
        block_backward: what the backward pass of one block needs beside its saved activations; with FSDP its weights
            and the next one's, gathered.
        loss_forward, loss_backward: the most that the loss layer's passes hold beyond their inputs, less those of them
            that the backward pass has let go of by then.
        at_loss, at_head, at_blocks, at_embedding: the most that is held in the loss layer; while the head's gradient
            is cast to the parameter's dtype; in the backward pass of the last block (the first in that pass) or
            of the first one (beside nearly all gradients); and in the embedding's, with all gradients that the
            update finds.
    """

    parameters: int
    gradients: int
    optimizer: int
    workspaces: int
    weight_copies: int
    mixer: int
    mlp: int
    residual: int
    loss_inputs: int
    recomputed_block: int
    block_backward: int
    loss_forward: int
    loss_backward: int
    at_loss: int
    at_head: int
    at_blocks: int
    at_embedding: int

    @property
    def peak(self) -> int:
        """The most that is allocated at once."""
        return max(self.at_loss, self.at_head, self.at_blocks, self.at_embedding)

    def components(self) -> dict[str, int]:
        """Bytes by component under the names that measured memory has, activations in parts as well."""
        activations = {
            "activations/workspaces": self.workspaces,
            "activations/weight_copies": self.weight_copies,
            "activations/mixer": self.mixer,
            "activations/mlp": self.mlp,
            "activations/residual": self.residual,
            "activations/loss_inputs": self.loss_inputs,
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


def training_state(
    arch: Architecture, precision: str, *, shard_ranks: int = 1, optimizer: bool = True
) -> dict[str, int]:
    """Bytes of parameters, gradients and AdamW's two moments of each rank: known of every model, whatever its mixer.

    Args:
        precision: fp32 | bf16_autocast (fp32 parameters) | bf16 (bf16 parameters).
        shard_ranks: ranks that hold one model between them.
    """
    parameters = (BF16 if precision == "bf16" else FP32) * arch.n_parameters // shard_ranks
    return {"parameters": parameters, "gradients": parameters, "optimizer": 2 * parameters if optimizer else 0}


def loss_memory(loss: LossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> Bytes | None:
    """The most that both passes of a loss hold beyond their inputs, bytes; None for a loss without formulas.

    Args:
        compute: bytes of an element of hidden states, weight and logits.
    """
    formulas = FORMULAS_OF_LOSSES.get(loss.name)
    return None if formulas is None else formulas.memory(loss, n_tokens, d, vocab, compute)


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
) -> MemoryEstimate | None:
    """Memory of a step of `accumulation_steps` micro-steps of `batch_size` sequences of `seq_len` tokens.

    None for a model or a loss without formulas.

    Args:
        precision: fp32 | bf16_autocast (fp32 parameters) | bf16 (bf16 parameters).
        activation_checkpointing: none | full.
        optimizer: False for forward and backward passes alone.
        shard_ranks: ranks that hold one model between them (FSDP2); of this one's memory.
        by_vocabulary: whether each keeps its rows of embedding and head, for the tokens of all of them.

    With more than one micro-step the gradients of the first are there when the next one peaks. With one,
    they come into being while the activations go.

    The function is long because it is one account: what a moment of the step holds depends on nearly all other terms.
    """
    tokens = batch_size * seq_len
    kept = BF16 if precision == "bf16" else FP32
    compute = FP32 if precision == "fp32" else BF16
    autocast = precision == "bf16_autocast"
    checkpointed = activation_checkpointing == "full"
    sharded = shard_ranks > 1
    by_vocabulary = by_vocabulary and sharded
    d, layers, tied = arch.hidden_size, arch.num_layers, arch.tie_embeddings

    parameters, _, state = training_state(arch, precision, shard_ranks=shard_ranks, optimizer=optimizer).values()
    earlier_gradients = parameters if accumulation_steps > 1 else 0
    layer = layer_memory(arch, seq_len, compute=compute, kept=kept, autocast=autocast)
    weights = _weights(arch, precision, compute, shard_ranks, by_vocabulary)
    rows = -(-arch.vocab_size // shard_ranks) if by_vocabulary else arch.vocab_size
    loss_tokens = shard_ranks * tokens if by_vocabulary else tokens
    of_loss = loss_memory(loss, loss_tokens, d, rows, compute)
    if layer is None or weights is None or of_loss is None:
        return None
    copies = 0 if checkpointed else layers * weights.block

    block_saves = tokens * (layer.mixer + layer.mlp + 2 * layer.norm)
    block_input = tokens * kept * d  # which its first norm saves
    final_norm = tokens * layer.norm
    batch = 2 * ID * tokens
    if checkpointed:
        recomputed = block_saves - block_input + weights.block
        saved = {"mixer": 0, "mlp": 0, "residual": layers * block_input + final_norm + batch}
    else:
        recomputed = 0
        saved = {
            "mixer": layers * tokens * layer.mixer,
            "mlp": layers * tokens * layer.mlp,
            "residual": layers * tokens * 2 * layer.norm + final_norm + batch,
        }
    # The MLP's backward pass, with the gradient of one projection, and its copy if it was computed again just now; the
    # mixer's, which finds the gradients of all three in the place of copies of two.
    projection = d * arch.intermediate_size
    mlp_weights = compute * projection * (2 if checkpointed and weights.block else 1)
    mlp_gradients = 0 if earlier_gradients else 3 * kept * projection // shard_ranks
    mlp_copies = 2 * compute * projection if weights.block else 0
    block_backward = weights.gathered + max(
        tokens * layer.mlp_backward + mlp_weights,
        tokens * layer.mixer_backward + mlp_gradients - mlp_copies,
    )

    loss_forward, loss_backward = of_loss
    hidden = tokens * d * compute
    loss_inputs = hidden + weights.head
    # Of its inputs, which nobody else holds: the compiled loss lets go of hidden states before it makes their gradient;
    # two losses have the gradients alone by then.
    loss_backward -= {"nothing": 0, "hidden": hidden, "inputs": loss_inputs}[FORMULAS_OF_LOSSES[loss.name].freed]
    if by_vocabulary:  # the gathered hidden states; their gradient in fp32, before it is cut
        gathered_hidden = loss_tokens * d * compute
        loss_forward += gathered_hidden
        loss_backward += gathered_hidden + loss_tokens * d * (FP32 - compute)

    # The gradient of embedding or head: FSDP's is whole and in fp32 until it is cut.
    whole = sharded and not by_vocabulary
    matrix_gradient = (FP32 if whole else kept) * rows * d
    matrix_kept = kept * arch.embedding_parameters // shard_ranks
    added_at_once = bool(earlier_gradients) and not sharded  # to the one that is there
    waiting = 0 if added_at_once and not tied else matrix_kept  # a tied matrix's as the head, for the embedding's
    new_gradients = 1 if sharded else int(tied) + int(added_at_once)

    always = parameters + state + WORKSPACES
    held = always + earlier_gradients + copies + sum(saved.values())
    last_block = held - final_norm + waiting + recomputed
    # In the first block all gradients are there but its own and an untied embedding's.
    to_come = kept * (arch.mixer_parameters + arch.mlp_parameters) // shard_ranks + (0 if tied else matrix_kept)
    gradients = parameters + waiting if earlier_gradients else parameters - to_come
    first_block = always + gradients + batch + block_saves + weights.block
    return MemoryEstimate(
        parameters=parameters,
        gradients=parameters,
        optimizer=state,
        workspaces=WORKSPACES,
        weight_copies=copies,
        **saved,
        loss_inputs=loss_inputs,
        recomputed_block=recomputed,
        block_backward=block_backward,
        loss_forward=loss_forward,
        loss_backward=loss_backward,
        at_loss=held + loss_inputs + max(loss_forward, loss_backward),
        at_head=held + compute * (tokens + rows) * d + (matrix_gradient if compute < kept or whole else 0),
        at_blocks=max(last_block, first_block) + block_backward,
        at_embedding=always + parameters + batch + loss_tokens * kept * d + new_gradients * matrix_gradient,
    )


@dataclass(frozen=True)
class _Weights:
    """Bytes of weights beside the parameters: copies of a block's in the compute dtype, as long as its backward pass
    needs them; blocks that FSDP has gathered, none while the loss is computed; the head as the loss takes it, where it
    is not the parameter."""

    block: int
    gathered: int
    head: int


def _weights(
    arch: Architecture, precision: str, compute: int, shard_ranks: int, by_vocabulary: bool
) -> _Weights | None:
    autocast = precision == "bf16_autocast"
    # Of the MLP's three projections two: the last one's is made again in the backward pass.
    copied = arch.mixer_parameters + 2 * arch.hidden_size * arch.intermediate_size
    block = compute * copied if autocast else 0
    head = compute * arch.embedding_parameters
    if shard_ranks == 1:
        return _Weights(block, 0, head if autocast else 0)
    # A block gathered while another is computed. Where it is gathered in fp32, autocast's copies stay.
    if (dtype := gathered_bytes(arch.model, precision)) is None:
        return None
    gathered = 2 * dtype * (arch.mixer_parameters + arch.mlp_parameters)
    if by_vocabulary:
        head = head // shard_ranks if autocast else 0
    return _Weights(block if dtype == FP32 else 0, gathered, head)
