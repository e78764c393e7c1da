"""Plain-torch versions of the FLA 0.6.0 functions that its layers call, so that its models run without a GPU.

FLA's layers look these functions up in their module at each call. `install()` puts a wrapper in place of each function.
The wrapper sends CPU tensors to the version here and all other tensors to FLA's own. A GPU model in the same process is
not affected.
"""

import functools
from collections.abc import Callable
from typing import Any

from linrnn.core.errors import UnsupportedError
from linrnn.models.cpu_ops import layers, mixers
from linrnn.models.fla_import import import_fla

__all__ = ["MIXERS", "REPLACEMENTS", "check_model", "install"]

Replacements = dict[tuple[str, str], Callable[..., Any]]
# For each model's mixer: (module, name) where FLA looks a function up, and its CPU version. A model that is not listed
# needs a GPU. The Transformer's attention is torch's own (linrnn.models.attention).
MIXERS: dict[str, Replacements] = {
    "gla": {
        ("fla.layers.gla", "chunk_gla"): mixers.chunk_gla,
        ("fla.layers.gla", "fused_recurrent_gla"): mixers.fused_recurrent_gla,
    },
    "gated_deltanet": {
        ("fla.layers.gated_deltanet", "chunk_gated_delta_rule"): mixers.gated_delta_rule,
        ("fla.layers.gated_deltanet", "fused_recurrent_gated_delta_rule"): mixers.gated_delta_rule,
        ("fla.layers.gated_deltanet", "causal_conv1d"): layers.causal_conv1d,
    },
    "kda": {
        ("fla.layers.kda", "chunk_kda"): mixers.gated_delta_rule,
        ("fla.layers.kda", "fused_recurrent_kda"): mixers.gated_delta_rule,
    },
    "transformer": {
        ("fla.modules.rotary.ops", "rotary_embedding"): layers.rotary_embedding,
    },
}
# The same for layers that several models have.
SHARED: Replacements = {
    ("fla.modules.causal_conv1d.ops", "causal_conv1d"): layers.causal_conv1d,
    ("fla.modules.causal_conv1d.ops", "causal_conv1d_update"): layers.causal_conv1d_update,
    ("fla.modules.norm.layernorm", "rms_norm"): layers.rms_norm,
    ("fla.modules.norm.fused_norm_gate", "rms_norm_gated"): layers.rms_norm_gated,
    ("fla.modules.mlp", "swiglu_linear"): layers.swiglu_linear,
}
REPLACEMENTS: Replacements = {key: value for part in (*MIXERS.values(), SHARED) for key, value in part.items()}


def check_model(model: str) -> None:
    """On a CPU, reject a model whose mixer has no version here.

    Raises:
        UnsupportedError: FLA has only Triton kernels for the mixer.
    """
    if model not in MIXERS:
        raise UnsupportedError(
            f"model={model} has no CPU form: FLA has Triton kernels alone for its mixer, which need an NVIDIA GPU",
            f"run it on a GPU machine, choose model={' or model='.join(MIXERS)}, or write its plain-torch version "
            "(docs/extending.md, Add a model)",
        )


def install() -> None:
    """Route CPU tensors of FLA's layers to this package. Calling it again changes nothing."""
    for (module_name, name), replacement in REPLACEMENTS.items():
        module = import_fla(module_name)
        original = getattr(module, name)
        if not hasattr(original, "cpu_version"):
            setattr(module, name, _by_device(replacement, original))


def _by_device(on_cpu: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(elsewhere)
    def call(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(kwargs[name] for name in ("x", "q") if name in kwargs)
        return (on_cpu if first.device.type == "cpu" else elsewhere)(*args, **kwargs)

    call.cpu_version = on_cpu  # type: ignore[attr-defined]
    return call
