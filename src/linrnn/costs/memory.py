"""GPU memory of a training step from formulas: what is allocated when, by component.

The formulas count the tensors that FLA's blocks save for the backward pass, those that a loss backend holds at once,
and cuBLAS's workspaces. They describe the GPU kernels; the torch fallbacks on CPU hold more. Not counted:

* CUDA's context, and libraries outside PyTorch's allocator.
* What the allocator rounds up (at most 1 MiB a block; up to 0.8 % of the committed runs' peaks), and fragmentation.
* What compiled blocks save besides casts. Their casts are known for GLA and the Transformer.
"""

from dataclasses import dataclass

from linrnn.config.schema import LossConfig, OptimizerConfig
from linrnn.costs.communication import ID, gathered_bytes
from linrnn.costs.layer_memory import LayerMemory, layer_memory
from linrnn.costs.optimizer import optimizer_state, update_memory
from linrnn.losses.cce import over_shards
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
        workspaces: cuBLAS's, always allocated: a set for each stream.
        weight_copies: the blocks' weights in the compute dtype, under autocast. There are none with activation
            checkpointing, or if FSDP gathers the weights in that dtype. Gathered blocks that stay until their backward
            pass count here.
        mixer, mlp, residual: activations saved for the backward pass by the token mixers, the MLPs, and the norms with
            the residual stream and the batch. With activation checkpointing `residual` is the blocks' inputs, and
            `mixer` and `mlp` are 0. With selective checkpointing the results of linear layers are `mixer` and `mlp`.
        loss_inputs: the loss's inputs: hidden states, and the head if it is a copy. Freed after the output layer's
            backward pass.
        block_backward: what the backward pass of one block holds beyond its saved activations. With FSDP this includes
            its gathered weights and those of the next block (or of all blocks that are gathered together).
        loss_forward, loss_backward: the peaks of the output layer's passes beyond their inputs, minus inputs that the
            backward pass has freed by then.
        at_loss: the peak in the output layer.
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
    compiled_blocks: bool = False,
    cuda_graph: bool = False,
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
        compiled_blocks: whether torch.compile compiles each block.
        cuda_graph: whether the passes were captured, on a stream that has workspaces of its own.
    """
    step = _Step(
        arch=arch,
        tokens=batch_size * seq_len,
        precision=precision,
        checkpointing=activation_checkpointing,
        earlier=accumulation_steps > 1,
        ranks=shard_ranks,
        by_vocabulary=by_vocabulary and shard_ranks > 1,
        blocks_together=min(blocks_together, arch.num_layers),
        keep_gathered=keep_gathered,
    )
    layer = layer_memory(
        arch, seq_len, compute=step.compute, kept=step.kept, autocast=step.autocast, compiled=compiled_blocks
    )
    weights = _weights(step)
    computed = over_shards(loss) if step.by_vocabulary else loss
    of_loss = loss_memory(computed, step.loss_tokens, arch.hidden_size, step.rows, step.compute)
    if layer is None or weights is None or of_loss is None:
        return None
    saved = _activations(step, layer, weights)
    inputs, forward, backward = _loss_layer(step, weights, of_loss, FORMULAS_OF_LOSSES[loss.name].freed)
    matrix = _matrix_gradient(step)
    of_block = _block_backward(step, layer, weights)
    parameters, _, state = training_state(arch, precision, shard_ranks=shard_ranks, optimizer=optimizer).values()

    # What is allocated at each moment. When the loss begins, all blocks are saved.
    workspaces = WORKSPACES * (2 if cuda_graph else 1)
    always = parameters + state + workspaces
    held = always + (parameters if step.earlier else 0) + weights.copies + saved.mixer + saved.mlp + saved.residual
    # In the first block all gradients exist but its own and an untied embedding's.
    to_come = step.kept * (arch.mixer_parameters + arch.mlp_parameters) // shard_ranks + matrix.to_come
    gradients = parameters + (matrix.waiting if step.earlier else -to_come)
    # The graph of a compiled block returns all its gradients together, those of cast weights beside their casts.
    own = step.kept + (step.compute if step.autocast else 0)
    returned = own * (arch.mixer_parameters + arch.mlp_parameters) // shard_ranks if compiled_blocks else 0
    last_block = held - step.tokens * layer.norm + matrix.waiting + saved.recomputed  # without the final norm's
    first_block = always + gradients + step.batch + step.tokens * layer.saved + weights.of_first_block
    return MemoryEstimate(
        parameters=parameters,
        gradients=parameters,
        optimizer=state,
        workspaces=workspaces,
        weight_copies=weights.copies,
        mixer=saved.mixer,
        mlp=saved.mlp,
        residual=saved.residual,
        loss_inputs=inputs,
        block_backward=of_block,
        loss_forward=forward,
        loss_backward=backward,
        at_loss=held + inputs + max(forward, backward),
        at_head=held + step.compute * (step.tokens + step.rows) * arch.hidden_size + matrix.cast,
        at_blocks=max(last_block, first_block + returned) + of_block,
        at_embedding=always + parameters + step.batch + step.loss_tokens * step.kept * arch.hidden_size + matrix.at_end,
        at_update=always + parameters + update_memory(arch, optimizer, step.kept),
    )


@dataclass(frozen=True)
class _Step:
    """A step on one rank, as `memory_estimate` is asked for it.

    Attributes:
        tokens: of one micro-step.
        earlier: whether gradients of earlier micro-steps exist.
        by_vocabulary: only with several ranks.
        blocks_together: at most all.
    """

    arch: Architecture
    tokens: int
    precision: str
    checkpointing: str
    earlier: bool
    ranks: int
    by_vocabulary: bool
    blocks_together: int
    keep_gathered: bool

    @property
    def autocast(self) -> bool:
        """Whether fp32 parameters are cast for products."""
        return self.precision == "bf16_autocast"

    @property
    def kept(self) -> int:
        """Bytes of an element of parameters and the residual stream."""
        return BF16 if self.precision == "bf16" else FP32

    @property
    def compute(self) -> int:
        """Bytes of an element in products."""
        return FP32 if self.precision == "fp32" else BF16

    @property
    def rows(self) -> int:
        """Rows of the embedding, and of the head, that this rank computes with."""
        return -(-self.arch.vocab_size // self.ranks) if self.by_vocabulary else self.arch.vocab_size

    @property
    def loss_tokens(self) -> int:
        """Tokens in this rank's output layer."""
        return self.ranks * self.tokens if self.by_vocabulary else self.tokens

    @property
    def batch(self) -> int:
        """Bytes of ids and labels."""
        return 2 * ID * self.tokens


@dataclass(frozen=True)
class _Weights:
    """Bytes of weights in addition to the parameters.

    Attributes:
        block: copies of one block's weights in the compute dtype, held until its backward pass is over.
        copies: of all blocks, when the loss begins: such copies, and gathered blocks that stay.
        gathered: blocks that FSDP gathers for a while. One group is gathered while another is computed.
        of_first_block: copies and gathered blocks in the first block's backward pass.
        head: the head as the loss takes it, if that is not the parameter.
    """

    block: int
    copies: int
    gathered: int
    of_first_block: int
    head: int


def _weights(step: _Step) -> _Weights | None:
    arch, layers = step.arch, step.arch.num_layers
    # Two of the MLP's three projections have copies: the backward pass makes the last one's again.
    copied = arch.mixer_parameters + 2 * arch.hidden_size * arch.intermediate_size
    block = step.compute * copied if step.autocast else 0
    head = step.compute * arch.embedding_parameters
    gathered = 0  # one block
    if step.ranks == 1 or step.by_vocabulary:
        head = head // step.ranks if step.autocast else 0
    if step.ranks > 1:
        if (dtype := gathered_bytes(arch.model, step.precision)) is None:
            return None
        gathered = dtype * (arch.mixer_parameters + arch.mlp_parameters)
        block = block if dtype == FP32 else 0  # if blocks are gathered in fp32, autocast's copies stay
    staying = gathered if step.keep_gathered else 0
    return _Weights(
        block=block,
        copies=layers * ((block if step.checkpointing == "none" else 0) + staying),
        gathered=0 if step.keep_gathered else min(2 * step.blocks_together, max(layers, 2)) * gathered,
        of_first_block=block + step.blocks_together * staying,
        head=head,
    )


@dataclass(frozen=True)
class _Activations:
    """Bytes of activations, by the names of `MemoryEstimate`.

    Attributes:
        recomputed: with activation checkpointing, the activations of the one block that is recomputed, and its copies
            of weights.
    """

    mixer: int
    mlp: int
    residual: int
    recomputed: int


def _activations(step: _Step, layer: LayerMemory, weights: _Weights) -> _Activations:
    tokens, layers = step.tokens, step.arch.num_layers
    beside_blocks = tokens * layer.norm + step.batch  # the final norm's
    if step.checkpointing == "none":
        residual = layers * tokens * 2 * layer.norm + beside_blocks
        return _Activations(layers * tokens * layer.mixer, layers * tokens * layer.mlp, residual, recomputed=0)
    mixer, mlp = (0, 0)
    if step.checkpointing == "selective":
        mixer, mlp = _linear_results(step.arch, tokens * step.compute)
    block_input = tokens * step.kept * step.arch.hidden_size  # saved by the block's first norm
    recomputed = tokens * layer.saved + weights.block - block_input - mixer - mlp
    return _Activations(layers * mixer, layers * mlp, layers * block_input + beside_blocks, recomputed)


def _linear_results(arch: Architecture, each: int) -> tuple[int, int]:
    """Bytes of the results of all linear layers in one mixer and in one MLP. `each`: of one entry for every token."""
    flops = facts_of(arch.model).flops
    assert flops is not None  # a model with formulas of its memory has those of its FLOPs
    mixer = sum(outputs for _, outputs in flops.projections(arch))
    return each * mixer, each * (2 * arch.intermediate_size + arch.hidden_size)


def _block_backward(step: _Step, layer: LayerMemory, weights: _Weights) -> int:
    """Bytes of one block's backward pass beyond its saved activations, with the gathered blocks."""
    projection = step.arch.hidden_size * step.arch.intermediate_size
    # The MLP's backward pass holds the gradient of one projection, and its copy if that was just recomputed.
    copies = 2 if step.checkpointing != "none" and weights.block else 1
    mlp = step.tokens * layer.mlp_backward + copies * step.compute * projection
    # During the mixer's the gradients of the MLP's three projections exist, and of those that follow the scan. Their
    # copies are freed: two in the MLP.
    later = layer.later
    gradients = 0 if step.earlier else step.kept * (3 * projection + later) // step.ranks
    freed = step.compute * (2 * projection + later) if weights.block else 0
    mixer = step.tokens * layer.mixer_backward + gradients - freed
    return weights.gathered + max(mlp, mixer)


def _loss_layer(step: _Step, weights: _Weights, of_loss: Bytes, freed: str) -> tuple[int, int, int]:
    """Bytes of the loss's inputs, and of what its forward and its backward pass hold in addition.

    Only the loss holds its inputs. The compiled loss frees the hidden states before it computes their gradient. Two
    losses (liger, fla) hold only gradients by then.
    """
    forward, backward = of_loss
    d = step.arch.hidden_size
    hidden = step.tokens * d * step.compute
    inputs = hidden + weights.head
    backward -= {"nothing": 0, "hidden": hidden, "inputs": inputs}[freed]
    if step.by_vocabulary:  # the gathered hidden states; their gradient in fp32 before it is scattered
        gathered = step.loss_tokens * d * step.compute
        forward += gathered
        backward += gathered + step.loss_tokens * d * (FP32 - step.compute)
    return inputs, forward, backward


@dataclass(frozen=True)
class _MatrixGradient:
    """Bytes of gradients of embedding and head.

    Attributes:
        cast: the head's, while it is cast to the parameter's dtype.
        waiting: the head's, during the blocks' backward pass.
        to_come: an untied embedding's, as it is kept.
        at_end: those that exist beside the kept ones in the embedding's backward pass.
    """

    cast: int
    waiting: int
    to_come: int
    at_end: int


def _matrix_gradient(step: _Step) -> _MatrixGradient:
    arch, sharded, tied = step.arch, step.ranks > 1, step.arch.tie_embeddings
    # With FSDP the gradient is whole and in fp32 until it is scattered.
    whole = sharded and not step.by_vocabulary
    one = (FP32 if whole else step.kept) * step.rows * arch.hidden_size
    kept = step.kept * arch.embedding_parameters // step.ranks
    added_at_once = step.earlier and not sharded  # to the gradient of earlier micro-steps
    return _MatrixGradient(
        cast=one if step.compute < step.kept or whole else 0,
        waiting=0 if added_at_once and not tied else kept,  # if tied, until the embedding's is added to it
        to_come=0 if tied else kept,
        at_end=one * (1 if sharded else int(tied) + int(added_at_once)),
    )
