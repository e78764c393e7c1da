"""Which parameters have weight decay, and which of these are matrices of a layer."""

from collections.abc import Iterable, Iterator

from torch import nn

NO_DECAY_SUFFIXES = ("bias", "A_log", "dt_bias")


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter has weight decay.

    Vectors and scalars (norm weights, biases, A_log, dt_bias) have none, nor has any parameter with FLA's mark
    `_no_weight_decay`. Embeddings and the output head decay like every other matrix, as in GPT-2 and Llama.
    """
    marked = getattr(parameter, "_no_weight_decay", False)
    return parameter.ndim >= 2 and not marked and not name.endswith(NO_DECAY_SUFFIXES)


def layer_matrices(layers: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """The matrices of layers that decay: no convolution, no vector. Muon trains them."""
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if parameter.ndim == 2 and decays(name, parameter):
                yield parameter
