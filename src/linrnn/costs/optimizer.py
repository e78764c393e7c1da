"""What an optimizer keeps, computes and moves, from formulas.

AdamW keeps two moments of every parameter. Muon keeps one mean of the gradients of every matrix of the layers, and
AdamW's two moments of all other parameters (:mod:`linrnn.training.optimizer`).
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


def optimizer_state(arch: Architecture, optimizer: OptimizerConfig | None, kept: int) -> int:
    """Bytes of the optimizer's state. With Muon and a model of ours without formulas: the most that it can be.

    Args:
        optimizer: None for forward and backward passes alone.
        kept: bytes per element of parameters.
    """
    if optimizer is None:
        return 0
    if not isinstance(optimizer, MuonConfig):
        return 2 * kept * arch.n_parameters
    of_muon = _entries(layer_matrices(arch) or [])
    return kept * (2 * arch.n_parameters - of_muon)


def update_memory(arch: Architecture, optimizer: OptimizerConfig | None, kept: int) -> int:
    """Bytes that an update holds in addition to parameters, gradients and state. Fused AdamW holds nothing.

    Muon updates one matrix at a time. It holds the mean with Nesterov's momentum, its bf16 copy, the copy of the next
    iteration, and two bf16 squares of the shorter side.
    """
    matrices = layer_matrices(arch)
    if not isinstance(optimizer, MuonConfig) or matrices is None:
        return 0
    copies = (kept if kept > BF16 else 0) + 2 * BF16
    held = [copies * rows * columns + 2 * BF16 * min(rows, columns) ** 2 for rows, columns in matrices]
    return max(held, default=0)


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
    """Bytes of HBM that one update moves; None: Muon, and a model without formulas.

    AdamW reads parameter, gradient and two moments, and writes all but the gradient: 7 passes. Muon's passes over a
    matrix, each operand read once and each result written once:

    * mean: read mean and gradient, write the mean; Nesterov: read both, write the sum;
    * read the sum, write its bf16 copy; its norm and the division: read twice, write once;
    * an iteration: read X for X Xᵀ, read X and write X again for the last product; five passes over m by m squares;
    * weight decay: read and write the parameter; update: read the parameter and X, write the parameter.
    """
    kept = BF16 if precision == "bf16" else FP32
    if not isinstance(optimizer, MuonConfig):
        return 7 * kept * arch.n_parameters
    if (matrices := layer_matrices(arch)) is None:
        return None
    copied = kept + BF16 if kept > BF16 else 0
    passes = 6 * kept + copied + 3 * BF16 + optimizer.ns_steps * 3 * BF16 + 5 * kept + BF16
    squares = optimizer.ns_steps * 5 * BF16 * sum(min(matrix) ** 2 for matrix in matrices)
    others = 7 * kept * (arch.n_parameters - _entries(matrices))
    return passes * _entries(matrices) + squares + others


def _entries(matrices: list[tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in matrices)
