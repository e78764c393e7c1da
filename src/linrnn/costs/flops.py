"""FLOPs of a model from its definition, and MFU. No kernel, chunk size or loss backend changes these figures.

**`mfu`** is model FLOPs utilisation: observed tokens/s divided by those of a device that runs at its peak, "without
rematerialization" (Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B). Its convention:

* Every matrix product that the model's definition needs counts: projections, token mixing, MLP, and the logits of every
  token. An (m, k) by (k, n) product counts 2mkn.
* A training step counts 3 times its forward pass, since the backward pass of a product is two products of its size.
  What a kernel or activation checkpointing computes again does not count.
* Causal attention counts the T (T + 1) / 2 pairs of query and key that the definition needs, not T².
* A linear RNN counts its recurrence: updating and reading the K x V state for each token and head. The additional work
  of the chunked form does not count.
* Elementwise work, norms, decays and the short convolutions (4 taps a channel) do not count.
* Sequences count as one document: `data.reset_at_document` does not change the figure.

:func:`kernel_flops` adds what is computed again to save memory, on which a step's time depends.
"""

from linrnn.config.schema import Config, MuonConfig, OptimizerConfig, ParallelConfig, VocabConfig
from linrnn.config.steps import sequences_of_rank
from linrnn.costs.devices import peak_flops_per_second
from linrnn.losses.base import BF16, FP32
from linrnn.losses.cce import over_shards
from linrnn.losses.registry import find_loss
from linrnn.models.architecture import Architecture

BACKWARD = 2  # products of the backward pass for each product of the forward pass
LEAST_PRODUCTS = 3  # of an output layer that computes its logits once: the logits, and the gradients of both factors
# Components that are computed again, by activation checkpointing. Selective keeps the results of all linear layers.
RECOMPUTED = {"none": (), "selective": ("mixer_scan",), "full": ("mixer_projections", "mixer_scan", "mlp")}


def forward_flops(arch: Architecture, n_sequences: int, seq_len: int) -> dict[str, int] | None:
    """FLOPs of a forward pass by component, by the model's definition; None for a model without formulas.

    The components are mixer_projections, mixer_scan (the recurrence, or attention), mlp and vocabulary.
    """
    if (scan := _scan(arch, seq_len)) is None:
        return None
    tokens, (mixers, mlps) = n_sequences * seq_len, arch.linears
    return {
        "mixer_projections": 2 * tokens * mixers,
        "mixer_scan": n_sequences * scan,
        "mlp": 2 * tokens * mlps,
        "vocabulary": 2 * tokens * arch.embedding_parameters,
    }


def _scan(arch: Architecture, seq_len: int) -> int | None:
    """FLOPs of all recurrences and attention layers over one sequence; None if the recurrence has no formula."""
    native = arch.num_layers - len(arch.attention_windows)
    if native and arch.recurrence_flops is None:
        return None
    windows = [min(window or seq_len, seq_len) for window in arch.attention_windows]
    pairs = sum(window * seq_len - window * (window - 1) // 2 for window in windows)
    # Queries times keys and scores times values: 2 products of `hidden_size` elements a pair, over all heads.
    return native * seq_len * (arch.recurrence_flops or 0) + pairs * 4 * arch.hidden_size


def model_flops(arch: Architecture, n_sequences: int, seq_len: int) -> int | None:
    """FLOPs of a training step over `n_sequences` of `seq_len` tokens, counted as for `mfu`; None: unknown."""
    forward = forward_flops(arch, n_sequences, seq_len)
    return None if forward is None else (1 + BACKWARD) * sum(forward.values())


def mfu(
    arch: Architecture,
    *,
    seq_len: int,
    tokens_per_second: float | None,
    device_name: str,
    precision: str,
    n_devices: int = 1,
) -> float | None:
    """The share of the peak of all devices; None if speed, peak or the model's FLOPs are unknown.

    Args:
        tokens_per_second: of all devices, including ignored labels.
        device_name: as `torch.cuda.get_device_name()` returns it.
        precision: fp32 | bf16_autocast | bf16.
    """
    flops, peak = model_flops(arch, 1, seq_len), peak_flops_per_second(device_name, precision)
    if flops is None or peak is None or tokens_per_second is None:
        return None
    return flops / seq_len * tokens_per_second / (peak * n_devices)


def update_flops(arch: Architecture, optimizer: OptimizerConfig) -> int:
    """FLOPs of the matrix products in one update: Muon's Newton-Schulz iterations.

    An iteration on a matrix of m by n, m <= n, has three products: X Xᵀ (2 m² n), its square (2 m³), and the result
    times X (2 m² n).
    """
    if not isinstance(optimizer, MuonConfig):
        return 0
    sides = [sorted(matrix) for matrix in arch.matrices]
    return optimizer.ns_steps * sum(4 * m * m * n + 2 * m**3 for m, n in sides)


def kernel_flops(arch: Architecture, config: Config, precision: str, ranks: int = 1) -> dict[str, int] | None:
    """FLOPs that each of `ranks` computes in an optimizer step of a run, over all its micro-steps, by component.

    The components are those of :func:`forward_flops`, and update: Muon's Newton-Schulz iterations. What activation
    checkpointing and the loss compute again counts; the additional products of chunked kernels do not. None for a model
    or a loss without formulas.

    Args:
        precision: fp32 | bf16_autocast | bf16.
    """
    trainer, loss, sequences = config.trainer, config.loss, sequences_of_rank(config, ranks)
    forward = forward_flops(arch, sequences * trainer.accumulation_steps, trainer.seq_len)
    if forward is None:
        return None
    shards = ranks_of_vocabulary(config.parallel, ranks)
    tokens, rows = sequences * trainer.seq_len * shards, -(-arch.vocab_size // shards)
    of_shard = tokens, arch.hidden_size, rows, FP32 if precision == "fp32" else BF16
    computed, backend = over_shards(loss) if shards > 1 else loss, find_loss(loss.name)
    if backend.memory(computed, *of_shard) is None:  # a loss of which nothing is known
        return None
    found = {name: (1 + BACKWARD) * flops for name, flops in forward.items()}
    found["vocabulary"] += max(backend.products(computed, *of_shard) - LEAST_PRODUCTS, 0) * forward["vocabulary"]
    for component in RECOMPUTED[trainer.activation_checkpointing]:
        found[component] += forward[component]
    return {**found, "update": update_flops(arch, config.optimizer)}


def ranks_of_vocabulary(parallel: ParallelConfig, ranks: int) -> int:
    """Number of ranks that share the vocabulary."""
    return parallel.ranks_of_model(ranks) if isinstance(parallel, VocabConfig) else 1
