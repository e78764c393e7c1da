"""Loss backends: ways to compute linear + cross-entropy from the same three tensors, one file each.

`check_loss` says whether a backend can run here, before anything is built. `build_loss` returns the callable. A
backend's library, and torch itself, are imported only when a backend is checked or built.
"""

from linrnn.losses import cce, cce_apple, fla, liger, standard, torch_native  # noqa: F401  each registers its losses
from linrnn.losses.base import IGNORE_INDEX, LossBackend, LossOutput
from linrnn.losses.cce_apple import apple_variants
from linrnn.losses.registry import (
    build_loss,
    check_capturable,
    check_loss,
    check_objective,
    check_vocabulary_parallel,
    loss_names,
    register_loss,
)

KERNELS = "cce_kernels"  # the package of this project that losses of ours call

__all__ = [
    "IGNORE_INDEX",
    "KERNELS",
    "LossBackend",
    "LossOutput",
    "apple_variants",
    "build_loss",
    "check_capturable",
    "check_loss",
    "check_objective",
    "check_vocabulary_parallel",
    "loss_names",
    "register_loss",
]
