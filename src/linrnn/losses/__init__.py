"""Loss backends: ways to compute linear + cross-entropy from the same three tensors, one file each.

`check_loss` says before anything is built whether one can run here; `build_loss` gives the callable. The
library behind a backend, torch as well, is imported only when that backend is checked or built.
"""

from linrnn.losses import cce, cce_apple, fla, liger, standard, torch_native  # noqa: F401  each registers its losses
from linrnn.losses.base import IGNORE_INDEX, LossBackend, LossOutput
from linrnn.losses.cce_apple import apple_variants
from linrnn.losses.registry import build_loss, check_loss, check_vocabulary_parallel, loss_names, register_loss

__all__ = [
    "IGNORE_INDEX",
    "LossBackend",
    "LossOutput",
    "apple_variants",
    "build_loss",
    "check_loss",
    "check_vocabulary_parallel",
    "loss_names",
    "register_loss",
]
