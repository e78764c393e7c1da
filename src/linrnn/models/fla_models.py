"""FLA's own model classes and their configuration for an `Architecture`. FLA is imported only when a model is built."""

from typing import Any

from linrnn.config.fla.names import fla_models
from linrnn.models.facts import Architecture, matched
from linrnn.models.fla_import import import_fla


def fla_classes(model: str) -> tuple[Any, Any]:
    """The class of the causal language model with this `model_type`, and the class of its configuration."""
    module = import_fla(f"fla.models.{fla_models().get(model, model)}")
    causal_lm = getattr(module, next(name for name in module.__all__ if name.endswith("ForCausalLM")))
    return causal_lm, causal_lm.config_class


def fla_config(arch: Architecture) -> Any:
    """FLA's configuration. Settings not named here keep FLA's default (initializer_range 0.02, norm_eps 1e-6)."""
    shared = {
        "hidden_size": arch.hidden_size,
        "num_hidden_layers": arch.num_layers,
        "num_heads": arch.num_heads,
        "intermediate_size": arch.intermediate_size,
        "vocab_size": arch.vocab_size,
        "tie_word_embeddings": arch.tie_embeddings,
        "use_cache": False,
    }
    return fla_classes(arch.model)[1](**shared, **matched(arch.model).settings(arch))
