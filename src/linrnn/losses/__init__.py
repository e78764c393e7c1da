"""Loss backends: eight ways to compute linear + cross-entropy from the same three tensors.

`check_loss` says before anything is built whether one can run here; `build_loss` gives the callable. The
library behind a backend is imported only when that backend is checked or built.
"""

from linrnn.losses.base import IGNORE_INDEX, LossBackend, LossOutput
from linrnn.losses.cce_apple import apple_variants
from linrnn.losses.registry import build_loss, check_loss, check_vocabulary_parallel, loss_names, rival_names

__all__ = [
    "IGNORE_INDEX",
    "LossBackend",
    "LossOutput",
    "apple_variants",
    "build_loss",
    "check_loss",
    "check_vocabulary_parallel",
    "loss_names",
    "rival_names",
]
