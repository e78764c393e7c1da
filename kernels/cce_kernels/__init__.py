"""Cross-entropy of a linear layer without its logits in memory: exact and deterministic, on GPUs and CPUs."""

from .api import PRESETS, linear_cross_entropy
from .cost.measure import profile
from .huggingface.fla_backend import register_in_fla
from .huggingface.patch import is_patched, patch, patch_trainer, unpatch
from .huggingface.trl import register_in_trl
from .log_probs import linear_log_probs, predicted_tokens
from .module import LinearCrossEntropyLoss
from .options import WorkspaceTooSmall
from .parallel.api import vocabulary_parallel_linear_cross_entropy, vocabulary_shards
from .reference import reference_linear_cross_entropy

__all__ = [
    "PRESETS",
    "LinearCrossEntropyLoss",
    "WorkspaceTooSmall",
    "is_patched",
    "linear_cross_entropy",
    "linear_log_probs",
    "patch",
    "patch_trainer",
    "predicted_tokens",
    "profile",
    "reference_linear_cross_entropy",
    "register_in_fla",
    "register_in_trl",
    "unpatch",
    "vocabulary_parallel_linear_cross_entropy",
    "vocabulary_shards",
]
__version__ = "0.1.0"
