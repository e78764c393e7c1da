"""What an update computes and moves, from formulas.

Muon (:mod:`linrnn.training.optimizer`) updates every matrix of the layers, and AdamW all other parameters.
"""

from linrnn.config.schema import MuonConfig, OptimizerConfig
from linrnn.losses.formulas import BF16, FP32
from linrnn.models.architecture import Architecture
from linrnn.models.facts import facts_of
from linrnn.models.fla_any import FlaArchitecture


def layer_matrices(arch: Architecture) -> list[tuple[int, int]] | None:
    """The two sides of every matrix of all layers; None for a model of ours without formulas. FLA's are counted."""
    if isinstance(arch, FlaArchitecture):
        return list(arch.counts.matrices)
    if (mixer := facts_of(arch.model).flops) is None:
        return None
    mlp = [(arch.hidden_size, arch.intermediate_size)] * 3
    return arch.num_layers * [*mixer.projections(arch), *mlp]


def update_flops(arch: Architecture, optimizer: OptimizerConfig | None) -> int | None:
    """FLOPs of the matrix products in one update: Muon's Newton-Schulz iterations; None: no formulas.

    An iteration on a matrix of m by n, m <= n, has three products: X Xᵀ (2 m² n), its square (2 m³), and the result
    times X (2 m² n).
    """
    if not isinstance(optimizer, MuonConfig):
        return 0
    if (matrices := layer_matrices(arch)) is None:
        return None
    sides = [sorted(matrix) for matrix in matrices]
    return optimizer.ns_steps * sum(4 * m * m * n + 2 * m**3 for m, n in sides)


def optimizer_traffic(arch: Architecture, optimizer: OptimizerConfig, precision: str) -> int | None:
    """Bytes of HBM that one update of AdamW moves; None for Muon, whose passes are not counted.

    AdamW reads parameter, gradient and two moments, and writes all but the gradient: 7 passes.
    """
    if isinstance(optimizer, MuonConfig):
        return None
    return 7 * (BF16 if precision == "bf16" else FP32) * arch.n_parameters
