"""Plain-torch versions of the FLA 0.6.0 functions that its layers call, so that its models run without a GPU.

FLA's layers look these functions up in their module at each call. `install()` puts a wrapper in place of each function.
The wrapper sends CPU tensors to the version here and all other tensors to FLA's own. A GPU model in the same process is
not affected.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from linrnn.core.errors import UnsupportedError
from linrnn.models.cpu_ops import layers
from linrnn.models.facts import FACTS, Replacements, facts_of
from linrnn.models.fla_import import import_fla

__all__ = ["check_model", "install", "prepare", "replacements"]

# For layers that several models have: (module, name) where FLA looks a function up, and its CPU version. Those of a
# model's mixer stand in its file (linrnn.models.zoo).
SHARED: Replacements = {
    ("fla.modules.causal_conv1d.ops", "causal_conv1d"): layers.causal_conv1d,
    ("fla.modules.causal_conv1d.ops", "causal_conv1d_update"): layers.causal_conv1d_update,
    ("fla.modules.norm.layernorm", "rms_norm"): layers.rms_norm,
    ("fla.modules.norm.fused_norm_gate", "rms_norm_gated"): layers.rms_norm_gated,
    ("fla.modules.mlp", "swiglu"): layers.swiglu,
    ("fla.modules.mlp", "swiglu_linear"): layers.swiglu_linear,
}


def replacements() -> Replacements:
    """Every function of FLA's that has a CPU version."""
    known = (facts.cpu for facts in FACTS.values() if facts.cpu)
    return {key: value for part in (*known, SHARED) for key, value in part.items()}


def check_model(model: str) -> None:
    """On a CPU, reject a model whose mixer has no version here.

    Raises:
        UnsupportedError: there is no plain-torch version of the mixer.
    """
    if facts_of(model).cpu is None:
        own = [name for name, facts in FACTS.items() if facts.mixer and facts.cpu]
        of_fla = [name for name, facts in FACTS.items() if not facts.mixer and facts.cpu]
        raise UnsupportedError(
            f"{model} has no CPU form: linrnn has no plain-torch version of its mixer",
            f"run it on a machine with an NVIDIA GPU; on a CPU use model={', '.join(own)}, or model=fla "
            f"model.config={', '.join(of_fla)}; or write its plain-torch version (docs/extending.md, Add a model)",
        )


def prepare(model: str, device: torch.device) -> None:
    """On a CPU, give FLA what a model needs: the functions of this package.

    Raises:
        UnsupportedError: the model has no CPU form, and `device` is a CPU.
    """
    if device.type != "cpu":
        return
    check_model(model)
    install()


def install() -> None:
    """Route CPU tensors of FLA's layers to this package. Calling it again changes nothing."""
    for (module_name, name), replacement in replacements().items():
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
