"""FLOPs that the device computes in a training step, by component. Its time depends on them.

They exceed the FLOPs of the model's definition (:mod:`linrnn.costs.flops`): kernels work in chunks, and some results
are computed twice.
"""

from dataclasses import dataclass

from linrnn.config.schema import LossConfig, OptimizerConfig
from linrnn.costs.flops import BACKWARD, forward_flops
from linrnn.costs.optimizer import update_flops
from linrnn.losses.cce import over_shards
from linrnn.losses.formulas import BF16
from linrnn.losses.registry import FORMULAS_OF_LOSSES
from linrnn.models.architecture import Architecture
from linrnn.models.facts import facts_of

LEAST_PRODUCTS = 3  # of a output layer that computes its logits once: the logits, and the gradients of both factors
# Components that are computed again, by activation checkpointing. Selective keeps the results of all linear layers.
RECOMPUTED = {"none": (), "selective": ("mixer_scan",), "full": ("mixer_projections", "mixer_scan", "mlp")}


@dataclass(frozen=True)
class KernelFlops:
    """FLOPs of a step by component.

    The components are mixer_projections, mixer_scan (a Transformer's attention), mlp and vocabulary.

    Attributes:
        forward: the products of the forward pass.
        backward: twice the forward pass, for the gradients of both factors.
        recomputed: computed again to save memory: activation checkpointing, a output layer that recomputes its logits,
            kernels that recompute their states or scores.
        update: the optimizer's: Muon's Newton-Schulz iterations. Elementwise work does not count.
    """

    forward: dict[str, int]
    backward: dict[str, int]
    recomputed: dict[str, int]
    update: int = 0

    @property
    def total(self) -> int:
        """All FLOPs that the device computes."""
        return sum(sum(part.values()) for part in (self.forward, self.backward, self.recomputed)) + self.update


def kernel_flops(
    arch: Architecture,
    n_sequences: int,
    seq_len: int,
    loss: LossConfig,
    activation_checkpointing: str,
    compute: int = BF16,
    optimizer: OptimizerConfig | None = None,
    vocabulary_ranks: int = 1,
) -> KernelFlops | None:
    """What the kernels compute in a step over `n_sequences` (all micro-steps) of `seq_len` tokens.

    None for a model or a loss without formulas.

    Args:
        loss: decides whether the backward pass computes the logits again.
        activation_checkpointing: none | selective (all but the linear layers is computed again) | full (every block's
            forward pass is computed again).
        compute: bytes per element of hidden states and head.
        optimizer: None for forward and backward passes alone.
        vocabulary_ranks: number of ranks that share the vocabulary. The FLOPs are one rank's.
    """
    forward, update = forward_flops(arch, n_sequences, seq_len), update_flops(arch, optimizer)
    mixer, formulas = facts_of(arch.model).flops, FORMULAS_OF_LOSSES.get(loss.name)
    if forward is None or update is None or mixer is None or formulas is None:
        return None
    tokens = n_sequences * seq_len
    mixed = tokens * arch.num_layers * arch.num_heads
    forward["mixer_scan"] = mixed * mixer.kernel(arch, seq_len)
    again = {"mixer_scan": mixed * mixer.kernel_again(arch, seq_len)}
    of_shard = tokens * vocabulary_ranks, arch.hidden_size, -(-arch.vocab_size // vocabulary_ranks), compute
    computed = over_shards(loss) if vocabulary_ranks > 1 else loss
    if (more := formulas.products(computed, *of_shard) - LEAST_PRODUCTS) > 0:
        again["vocabulary"] = more * forward["vocabulary"]
    for component in RECOMPUTED[activation_checkpointing]:
        again[component] = again.get(component, 0) + forward[component]
    backward = {name: BACKWARD * flops for name, flops in forward.items()}
    return KernelFlops(forward, backward, again, update)
