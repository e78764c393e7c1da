"""Dimensions of a model at a size. It is built for them, without weights.

All four architectures of a size have the same depth, width and norms. A layer has about `layer_parameters_per_d2 ·
hidden_size²` parameters. The mixer takes what its heads need; the SwiGLU MLP gets the rest. Its width is rounded to the
nearest multiple of d / 16 (in steps of 8, at least 8), which is 3/16 d² parameters. At 12 d² per layer the bodies of
the four are therefore within 1.6 % of each other.
"""

import json
from dataclasses import replace

import linrnn.models.zoo  # noqa: F401 (makes the models known)
from linrnn.config.schema import FlaModelConfig, ModelConfig, SizeConfig
from linrnn.core.errors import ConfigError
from linrnn.models.facts import FACTS, Architecture, Mixer
from linrnn.models.fla_any import bare_architecture, figures, resolve_fla

__all__ = ["MODELS", "Architecture", "completed", "resolve"]

MODELS = tuple(name for name, facts in FACTS.items() if facts.mixer)


def resolve(model: ModelConfig, size: SizeConfig, vocab_size: int) -> Architecture:
    """The architecture of `model` at `size` of vocabulary size `vocab_size`.

    Raises:
        ConfigError: dimensions do not fit together, or the mixer leaves its layer no room for an MLP. With `model=fla`
            also an option that FLA does not have.
    """
    if isinstance(model, FlaModelConfig):
        return resolve_fla(model, size, vocab_size)
    if model.name not in size.mixers:
        raise ConfigError(
            f"size={size.name} gives no heads for model={model.name}",
            f"add size.mixers.{model.name}, or use one of {', '.join(size.mixers)}",
        )
    bare = bare_architecture(model.name, size, vocab_size, model.chunk_size)
    _mixer(bare).check(bare)
    d = size.hidden_size
    unit = max(8, d // 128 * 8)
    parameters = completed(replace(bare, num_layers=1, intermediate_size=unit)).mixer_parameters
    left = size.layer_parameters_per_d2 * d**2 - parameters
    width = round(left / (3 * d * unit)) * unit
    if width < unit:
        raise ConfigError(
            f"size={size.name}: {model.name} mixers of {parameters / d**2:.2f} d² parameters "
            f"leave no MLP within {size.layer_parameters_per_d2:g} d² per layer",
            f"lower size.mixers.{model.name}'s heads or raise size.layer_parameters_per_d2",
        )
    return completed(replace(bare, intermediate_size=width))


def completed(bare: Architecture) -> Architecture:
    """A matched model with the settings that follow from its dimensions, and the figures of what FLA builds of them."""
    layers = {
        "hidden_size": bare.hidden_size,
        "num_hidden_layers": bare.num_layers,
        "intermediate_size": bare.intermediate_size,
        **_mixer(bare).settings(bare),
    }
    ends = {"vocab_size": bare.vocab_size, "tie_word_embeddings": bare.tie_embeddings, "use_cache": False}
    of_layers = figures(bare.kind, json.dumps(layers, sort_keys=True))
    return replace(bare, settings=json.dumps(layers | ends, sort_keys=True), **of_layers)


def _mixer(bare: Architecture) -> Mixer:
    mixer = FACTS[bare.model].mixer
    assert mixer, f"{bare.model} has heads in size, and no mixer in its facts"
    return mixer
