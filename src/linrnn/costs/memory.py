"""GPU memory of a training step from formulas, by component, within 10 % of measured peaks (tests/costs).

The formulas count the large tensors: those that FLA's blocks save for the backward pass (FLA 0.6.0, on a GPU; the
torch fallbacks on a CPU hold more), those that a loss holds at once, and cuBLAS's workspaces. The part of a mixer
stands in the model's file (:mod:`linrnn.models.zoo`). CUDA's context, libraries outside PyTorch's allocator, scalars
per token and what the allocator rounds up are left out.
"""

from dataclasses import dataclass

from linrnn.config.schema import Config, FsdpConfig, LossConfig, MuonConfig
from linrnn.config.steps import sequences_of_rank
from linrnn.costs.flops import ranks_of_vocabulary
from linrnn.losses.base import BF16, FP32, Bytes
from linrnn.losses.cce import over_shards
from linrnn.losses.registry import find_loss
from linrnn.models.architecture import Architecture
from linrnn.models.facts import facts_of

# PyTorch gives cuBLAS 32 MiB on Hopper and later (aten/src/ATen/cuda/CublasHandlePool.cpp), before Hopper 8.1 MiB. Two
# threads multiply, forward and backward, each with its own workspace.
WORKSPACES = 2 * 32 * 2**20


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by component, and the most that is allocated at once.

    Attributes:
        state: of `training_state`: parameters, gradients, optimizer.
        activations: what is held beside the state when the loss begins: workspaces, weight_copies (the blocks' weights
            in the compute dtype under autocast, and gathered blocks that stay), mixer, mlp, residual (the norms' and
            checkpointed blocks' inputs) and loss_inputs (hidden states, and the head if it is a copy).
        loss_forward, loss_backward: the most that the passes of the output layer add, gradients included.
        at_loss, at_blocks: the peaks in the output layer, and in the backward pass of the blocks.
        at_update: the peak when all gradients exist.
    """

    state: dict[str, int]
    activations: dict[str, int]
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
        """Bytes by component, under the names of measured memory. Activations are also listed in parts."""
        return {
            **self.state,
            "activations": sum(self.activations.values()),
            **{f"activations/{name}": size for name, size in self.activations.items()},
            "loss_forward": self.loss_forward,
            "loss_backward": self.loss_backward,
            "peak": self.peak,
        }


def training_state(arch: Architecture, config: Config, precision: str, ranks: int = 1) -> dict[str, int]:
    """Bytes of parameters, gradients and the optimizer's state on each of `ranks`. These are known for every model.

    AdamW keeps two moments of every parameter. Muon keeps one of every matrix of the layers, and two of all other
    parameters; for a model of ours without formulas the figure is the most that it can be.

    Args:
        precision: fp32 | bf16_autocast (fp32 parameters) | bf16 (bf16 parameters).
    """
    kept, sharing = BF16 if precision == "bf16" else FP32, config.parallel.ranks_of_model(ranks)
    parameters, moments = kept * arch.n_parameters // sharing, 2 * arch.n_parameters
    if isinstance(config.optimizer, MuonConfig):
        moments -= sum(rows * columns for rows, columns in arch.matrices)
    return {"parameters": parameters, "gradients": parameters, "optimizer": kept * moments // sharing}


def loss_memory(loss: LossConfig, n_tokens: int, d: int, vocab: int, compute: int) -> Bytes | None:
    """The most that both passes of a loss hold beyond their inputs, bytes; None for a loss without formulas.

    Args:
        compute: bytes of an element of hidden states, weight and logits.
    """
    return find_loss(loss.name).memory(loss, n_tokens, d, vocab, compute)


def memory_estimate(arch: Architecture, config: Config, precision: str, ranks: int = 1) -> MemoryEstimate | None:
    """Memory of an optimizer step of a run on each of `ranks`; None for a model or a loss without formulas.

    With more than one micro-step, the gradients of the first exist at the peak of the next, and those of DDP's replicas
    always, in their buckets. Else gradients appear while activations are freed.

    Args:
        precision: as for :func:`training_state`.
    """
    trainer, parallel, loss = config.trainer, config.parallel, config.loss
    kept, compute = BF16 if precision == "bf16" else FP32, FP32 if precision == "fp32" else BF16
    autocast, tokens = precision == "bf16_autocast", sequences_of_rank(config, ranks) * trainer.seq_len
    layers, d, mixing = arch.num_layers, arch.hidden_size, facts_of(arch.model).mixer
    sharded, shards = parallel.ranks_of_model(ranks) > 1, ranks_of_vocabulary(parallel, ranks)
    blocks_together = parallel.blocks_together if isinstance(parallel, FsdpConfig) else 1
    keep_gathered = isinstance(parallel, FsdpConfig) and parallel.keep_gathered
    gathered = (FP32 if autocast and arch.keeps_fp32 else compute) if sharded else 0  # bytes of an element of a block
    rows, loss_tokens = -(-arch.vocab_size // shards), shards * tokens
    of_loss = loss_memory(over_shards(loss) if shards > 1 else loss, loss_tokens, d, rows, compute)
    if mixing is None or mixing.linears is None or of_loss is None:
        return None
    state = training_state(arch, config, precision, ranks)

    # One layer, bytes per token: what mixer, MLP and each norm save, and the results of all linear layers in it, which
    # selective checkpointing keeps. Under autocast the residual stream is fp32 (embeddings are not cast). Each linear
    # layer of the mixer then saves its own cast of the norm's output, otherwise they share one. Attention's output is
    # o_proj's input. A gated norm saves its two inputs and its output.
    width = arch.intermediate_size
    inputs, outputs = d * (mixing.linears if autocast else 1), arch.value_dim * (3 if mixing.gated else 1)
    of_mixer = compute * (inputs + outputs) + mixing.saved(arch, trainer.seq_len, compute)
    of_mlp = compute * (d + 2 * width)  # input, gate and up; the product of gate and up is computed again
    of_norm = kept * d
    mlp_results = compute * (2 * width + d)
    mixer_results = compute * sum(outputs for outputs, _ in arch.matrices) // layers - mlp_results
    # What the MLP's backward pass holds in addition: dz, dgate, dup, the output of swiglu, and the residual stream's
    # gradient. The mixer's, by when the MLP is freed, holds no more.
    of_backward = 4 * compute * width + kept * d

    # Weights beside the parameters: copies of a block's in the compute dtype (of the MLP's last projection it is made
    # again), the head, and FSDP's gathered blocks. One group of blocks is gathered while another is computed.
    block = arch.mixer_parameters + arch.mlp_parameters
    copies = compute * (arch.mixer_parameters + 2 * arch.mlp_parameters // 3) if autocast and gathered != BF16 else 0
    head = compute * rows * d if autocast or (sharded and shards == 1) else 0
    staying = gathered * block if keep_gathered else 0
    passing = 0 if keep_gathered else min(2 * blocks_together, layers) * gathered * block

    # What the blocks save for the backward pass, and with checkpointing the block that is computed again.
    one_block = tokens * (of_mixer + of_mlp + 2 * of_norm) + copies
    mixer, mlp, residual, again = {
        "none": (of_mixer, of_mlp, 2 * of_norm, 0),
        "selective": (mixer_results, mlp_results, of_norm, one_block),
        "full": (0, 0, of_norm, one_block),
    }[trainer.activation_checkpointing]
    activations = {
        "workspaces": WORKSPACES,
        "weight_copies": layers * (staying + (0 if again else copies)),
        "mixer": layers * tokens * mixer,
        "mlp": layers * tokens * mlp,
        "residual": layers * tokens * residual,
        "loss_inputs": tokens * d * compute + head,
    }
    forward, backward = of_loss
    if shards > 1:  # hidden states of all ranks; their gradients in fp32
        forward, backward = forward + loss_tokens * d * compute, backward + loss_tokens * d * FP32

    # What is allocated at each moment. FSDP's gradients of embedding and head are whole and in fp32 for a while.
    always = state["parameters"] + state["optimizer"]
    stay = trainer.accumulation_steps > 1 or (ranks > 1 and not sharded)
    held = always + sum(activations.values()) + (state["gradients"] if stay else 0)
    with_gradients = always + state["gradients"] + WORKSPACES
    matrix = (FP32 if sharded else kept) * rows * d
    last_block = held - activations["loss_inputs"] + matrix + again  # the backward pass begins with it
    first_block = with_gradients + one_block + staying
    return MemoryEstimate(
        state=state,
        activations=activations,
        loss_forward=forward,
        loss_backward=backward,
        at_loss=held + max(forward, backward),
        at_blocks=max(last_block, first_block) + passing + tokens * of_backward,
        at_update=with_gradients + matrix,
    )
