"""FLA's own model classes and their configuration for an `Architecture`. FLA is imported only when a model is built."""

from typing import Any

from linrnn.models.architecture import Architecture
from linrnn.models.fla_import import import_fla

CLASSES = {
    "gla": "GLA",
    "gated_deltanet": "GatedDeltaNet",
    "kda": "KDA",
    "transformer": "Transformer",
}


def fla_classes(model: str) -> tuple[Any, Any]:
    """The class of the causal language model, and the class of its configuration."""
    module = import_fla(f"fla.models.{model}")
    return getattr(module, f"{CLASSES[model]}ForCausalLM"), getattr(module, f"{CLASSES[model]}Config")


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
    match arch.model:
        case "gla":
            d = arch.hidden_size
            mixer = {"expand_k": arch.key_dim / d, "expand_v": arch.value_dim / d}
        case "gated_deltanet" | "kda":
            mixer = {"head_dim": arch.head_k_dim, "expand_v": arch.head_v_dim / arch.head_k_dim}
        case _:
            mixer = {}
    return fla_classes(arch.model)[1](**shared, **mixer)
