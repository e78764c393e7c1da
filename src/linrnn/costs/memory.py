"""GPU memory of a training step from formulas: what is allocated when, by component.

The formulas count the tensors that FLA's blocks save for the backward pass, those that a loss backend holds at once,
and cuBLAS's workspaces. They describe the GPU kernels; the torch fallbacks on CPU hold more. Not counted:

* CUDA's context, and libraries outside PyTorch's allocator.
* What the allocator rounds up (at most 1 MiB a block; up to 0.8 % of the committed runs' peaks), and fragmentation.
* The savings of torch.compile'd blocks.
"""

from dataclasses import dataclass, replace

from linrnn.config.schema import LossConfig, OptimizerConfig
from linrnn.costs.communication import ID, gathered_bytes
from linrnn.costs.layer_memory import layer_memory
from linrnn.costs.optimizer import layer_matrices, optimizer_state, update_memory
from linrnn.losses.formulas import BF16, FP32, Bytes
from linrnn.losses.registry import FORMULAS_OF_LOSSES
from linrnn.models.architecture import Architecture
from linrnn.models.facts import facts_of

# PyTorch gives cuBLAS 4096 KiB x 8 on Hopper and later (aten/src/ATen/cuda/CublasHandlePool.cpp), as NVIDIA advises for
# cublasSetWorkspace; before Hopper 8.1 MiB. Two threads multiply, forward and backward, each with its own workspace.
WORKSPACES = 2 * 32 * 2**20


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by component, and the most that is allocated at once.

    Attributes:
        parameters: in the dtype that they are kept in.
        gradients: of all parameters, at the end of the backward pass.
        optimizer: AdamW's two moments; Muon's mean of a matrix's gradients.
        workspaces: cuBLAS's, always allocated.
        weight_copies: the blocks' weights in the compute dtype, under autocast. There are none with activation
            checkpointing, or if FSDP gathers the weights in that dtype. Gathered blocks that stay until their backward
            pass count here.
        mixer, mlp, residual: activations saved for the backward pass by the token mixers, the MLPs, and the norms with
            the residual stream and the batch. With activation checkpointing `residual` is the blocks' inputs, and
            `mixer` and `mlp` are 0. With selective checkpointing the results of linear layers are `mixer` and `mlp`.
        loss_inputs: the loss's inputs: hidden states, and the head if it is a copy. Freed after the loss layer's
            backward pass.
        recomputed_block: with activation checkpointing, the activations of the one block that is recomputed, and its
            copies of weights.
        block_backward: what the backward pass of one block holds beyond its saved activations. With FSDP this includes
            its gathered weights and those of the next block (or of all blocks that are gathered together).
        loss_forward, loss_backward: the peaks of the loss layer's passes beyond their inputs, minus inputs that the
            backward pass has freed by then.
        at_loss: the peak in the loss layer.
        at_head: the peak while the head's gradient is cast to the parameter's dtype.
        at_blocks: the peak in the backward pass of the last block (which comes first), or of the first block (when
            nearly all gradients exist).
        at_embedding: the peak in the embedding's backward pass, with all gradients that the update will use.
        at_update: the peak in the optimizer's update.
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
    at_update: int

    @property
    def peak(self) -> int:
        """The most that is allocated at once."""
        return max(self.at_loss, self.at_head, self.at_blocks, self.at_embedding, self.at_update)

    def components(self) -> dict[str, int]:
        """Bytes by component, under the names of measured memory. Activations are also listed in parts."""
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
    arch: Architecture, precision: str, *, optimizer: OptimizerConfig | None, shard_ranks: int = 1
) -> dict[str, int]:
    """Bytes per rank of parameters, gradients and the optimizer's state. These are known for every model.

    Args:
        precision: fp32 | bf16_autocast (fp32 parameters) | bf16 (bf16 parameters).
        optimizer: None for forward and backward passes alone. Muon needs `shard_ranks=1`.
        shard_ranks: number of ranks that share one model.
    """
    kept = BF16 if precision == "bf16" else FP32
    parameters = kept * arch.n_parameters // shard_ranks
    state = optimizer_state(arch, optimizer, kept) // shard_ranks
    return {"parameters": parameters, "gradients": parameters, "optimizer": state}


def memory_of_drawing(arch: Architecture, *, sharded: bool) -> int:
    """Bytes of the CPU's memory that the initial weights need while they are drawn, in fp32.

    The whole model; of a model that ranks share only its largest parameter, because each rank draws one parameter after
    the other and keeps its part (:class:`linrnn.models.BlankModel`). A part that a rank keeps is not counted. A model
    with shared projections is built with full ones first.
    """
    if not sharded:
        return FP32 * replace(arch, shared_projection_rank=None).n_parameters
    matrices = layer_matrices(arch) or []
    return FP32 * max(arch.embedding_parameters, *(rows * columns for rows, columns in matrices))


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
    optimizer: OptimizerConfig | None,
    accumulation_steps: int = 1,
    shard_ranks: int = 1,
    by_vocabulary: bool = False,
    blocks_together: int = 1,
    keep_gathered: bool = False,
) -> MemoryEstimate | None:
    """Memory of a step of `accumulation_steps` micro-steps of `batch_size` sequences of `seq_len` tokens.

    None for a model or a loss without formulas. With more than one micro-step, the gradients of the first exist at the
    peak of the next. With one, gradients appear while activations are freed.

    Args:
        precision: fp32 | bf16_autocast (fp32 parameters) | bf16 (bf16 parameters).
        activation_checkpointing: none | selective | full.
        optimizer: None for forward and backward passes alone.
        shard_ranks: number of ranks that share one model (FSDP2). The estimate is one rank's memory.
        by_vocabulary: whether each rank keeps its rows of embedding and head, for the tokens of all ranks.
        blocks_together, keep_gathered: as in :class:`linrnn.config.schema.FsdpConfig`.

    The function is long because it is one account: what a step holds at any moment depends on nearly all terms.
    """
    tokens = batch_size * seq_len
    kept = BF16 if precision == "bf16" else FP32
    compute = FP32 if precision == "fp32" else BF16
    autocast = precision == "bf16_autocast"
    checkpointed = activation_checkpointing != "none"
    sharded = shard_ranks > 1
    by_vocabulary = by_vocabulary and sharded
    d, layers, tied = arch.hidden_size, arch.num_layers, arch.tie_embeddings

    parameters, _, state = training_state(arch, precision, shard_ranks=shard_ranks, optimizer=optimizer).values()
    earlier_gradients = parameters if accumulation_steps > 1 else 0
    layer = layer_memory(arch, seq_len, compute=compute, kept=kept, autocast=autocast)
    weights = _weights(arch, precision, compute, shard_ranks, by_vocabulary)
    together = min(blocks_together, layers)
    rows = -(-arch.vocab_size // shard_ranks) if by_vocabulary else arch.vocab_size
    loss_tokens = shard_ranks * tokens if by_vocabulary else tokens
    of_loss = loss_memory(loss, loss_tokens, d, rows, compute)
    if layer is None or weights is None or of_loss is None:
        return None
    # One group of blocks is gathered while another is computed, unless all stay gathered.
    gathered = 0 if keep_gathered else min(2 * together, max(layers, 2)) * weights.gathered
    staying = weights.gathered if keep_gathered else 0
    copies = (0 if checkpointed else layers * weights.block) + layers * staying

    block_saves = tokens * (layer.mixer + layer.mlp + 2 * layer.norm)
    block_input = tokens * kept * d  # saved by the block's first norm
    final_norm = tokens * layer.norm
    batch = 2 * ID * tokens
    if checkpointed:
        recomputed = block_saves - block_input + weights.block
        kept_products = (0, 0)
        if activation_checkpointing == "selective":
            kept_products = _linear_results(arch, tokens * compute)
            recomputed -= sum(kept_products)  # the block uses its own
        mixer, mlp = (layers * size for size in kept_products)
        saved = {"mixer": mixer, "mlp": mlp, "residual": layers * block_input + final_norm + batch}
    else:
        recomputed = 0
        saved = {
            "mixer": layers * tokens * layer.mixer,
            "mlp": layers * tokens * layer.mlp,
            "residual": layers * tokens * 2 * layer.norm + final_norm + batch,
        }
    # The MLP's backward pass holds the gradient of one projection, and its copy if that was just recomputed. During the
    # mixer's backward pass the gradients of all three projections exist, and the copies of two are freed.
    projection = d * arch.intermediate_size
    mlp_weights = compute * projection * (2 if checkpointed and weights.block else 1)
    mlp_gradients = 0 if earlier_gradients else 3 * kept * projection // shard_ranks
    mlp_copies = 2 * compute * projection if weights.block else 0
    block_backward = gathered + max(
        tokens * layer.mlp_backward + mlp_weights,
        tokens * layer.mixer_backward + mlp_gradients - mlp_copies,
    )

    loss_forward, loss_backward = of_loss
    hidden = tokens * d * compute
    loss_inputs = hidden + weights.head
    # Only the loss holds its inputs. The compiled loss frees the hidden states before it computes their gradient. Two
    # losses (liger, fla) hold only gradients by then.
    loss_backward -= {"nothing": 0, "hidden": hidden, "inputs": loss_inputs}[FORMULAS_OF_LOSSES[loss.name].freed]
    if by_vocabulary:  # the gathered hidden states; their gradient in fp32 before it is scattered
        gathered_hidden = loss_tokens * d * compute
        loss_forward += gathered_hidden
        loss_backward += gathered_hidden + loss_tokens * d * (FP32 - compute)

    # The gradient of embedding or head. With FSDP it is whole and in fp32 until it is scattered.
    whole = sharded and not by_vocabulary
    matrix_gradient = (FP32 if whole else kept) * rows * d
    matrix_kept = kept * arch.embedding_parameters // shard_ranks
    added_at_once = bool(earlier_gradients) and not sharded  # to the gradient of earlier micro-steps
    # The head's gradient waits here; if tied, until the embedding's is added to it.
    waiting = 0 if added_at_once and not tied else matrix_kept
    new_gradients = 1 if sharded else int(tied) + int(added_at_once)

    always = parameters + state + WORKSPACES
    held = always + earlier_gradients + copies + sum(saved.values())
    last_block = held - final_norm + waiting + recomputed
    # In the first block all gradients exist but its own and an untied embedding's.
    to_come = kept * (arch.mixer_parameters + arch.mlp_parameters) // shard_ranks + (0 if tied else matrix_kept)
    gradients = parameters + waiting if earlier_gradients else parameters - to_come
    first_block = always + gradients + batch + block_saves + weights.block + together * staying
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
        at_update=always + parameters + update_memory(arch, optimizer, kept),
    )


@dataclass(frozen=True)
class _Weights:
    """Bytes of weights in addition to the parameters.

    Attributes:
        block: copies of one block's weights in the compute dtype, held until its backward pass is over.
        gathered: one block that FSDP has gathered.
        head: the head as the loss takes it, if that is not the parameter.
    """

    block: int
    gathered: int
    head: int


def _weights(
    arch: Architecture, precision: str, compute: int, shard_ranks: int, by_vocabulary: bool
) -> _Weights | None:
    autocast = precision == "bf16_autocast"
    # Two of the MLP's three projections have copies: the backward pass makes the last one's again.
    copied = arch.mixer_parameters + 2 * arch.hidden_size * arch.intermediate_size
    block = compute * copied if autocast else 0
    head = compute * arch.embedding_parameters
    if shard_ranks == 1:
        return _Weights(block, 0, head if autocast else 0)
    # If blocks are gathered in fp32, autocast's copies stay.
    if (dtype := gathered_bytes(arch.model, precision)) is None:
        return None
    gathered = dtype * (arch.mixer_parameters + arch.mlp_parameters)
    if by_vocabulary:
        head = head // shard_ranks if autocast else 0
    return _Weights(block if dtype == FP32 else 0, gathered, head)


def _linear_results(arch: Architecture, each: int) -> tuple[int, int]:
    """Bytes of the results of all linear layers in one mixer and in one MLP. `each`: of one entry for every token."""
    flops = facts_of(arch.model).flops
    assert flops is not None  # a model with formulas of its memory has those of its FLOPs
    mixer = sum(outputs for _, outputs in flops.projections(arch))
    return each * mixer, each * (2 * arch.intermediate_size + arch.hidden_size)
