"""Models of flash-linear-attention with one interface: `LanguageModel`. Four of them are the study's."""

from linrnn.models.build import BlankModel, build_model
from linrnn.models.language_model import LanguageModel
from linrnn.models.support import check_device, check_installed, check_supported, explain_refusal
from linrnn.models.weights import (
    check_dimensions,
    check_finite,
    find_pretrained,
    load_weights,
    open_pretrained,
    pretrained_vocab_size,
)

__all__ = [
    "BlankModel",
    "LanguageModel",
    "build_model",
    "check_device",
    "check_dimensions",
    "check_finite",
    "check_installed",
    "check_supported",
    "explain_refusal",
    "find_pretrained",
    "load_weights",
    "open_pretrained",
    "pretrained_vocab_size",
]
