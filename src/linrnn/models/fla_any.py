"""`model=fla`: any causal language model of FLA's; and the figures of every model, counted without weights.

FLA's classes decide what a model computes. Its figures come from what was built: no formula of parameters is needed.
FLOPs follow from the linear layers and, where the model's facts have one, from the formula of its recurrence.
"""

import functools
import inspect
import json
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from linrnn.config.schema import FlaModelConfig, SizeConfig
from linrnn.core.errors import ConfigError, UnsupportedError, first_line
from linrnn.models.attention import with_sdpa
from linrnn.models.decay import layer_matrices
from linrnn.models.facts import KEPT_IN_FP32, Architecture, facts_of
from linrnn.models.fla_import import fla_classes

# What linrnn itself decides: the loss is not FLA's, and training keeps no state.
DECIDED_HERE = ("use_cache", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp")


def resolve_fla(model: FlaModelConfig, size: SizeConfig, vocab_size: int) -> Architecture:
    """The architecture of FLA's model at `size`. It is built once without weights, to count its parameters.

    Raises:
        ConfigError: an option that FLA's configuration does not have, or dimensions that do not fit together.
        UnsupportedError: the model is not built of an embedding, layers, a norm and a head, or needs a package.
    """
    of_fla = _settings(model, size, vocab_size)
    settings = json.dumps(of_fla, sort_keys=True)
    return Architecture(
        model=f"fla:{model.config}",
        kind=model.config,
        size=size.name,
        num_layers=of_fla["num_hidden_layers"],
        hidden_size=of_fla["hidden_size"],
        vocab_size=of_fla["vocab_size"],
        tie_embeddings=of_fla["tie_word_embeddings"],
        settings=settings,
        **figures(model.config, settings),
    )


def bare_architecture(model: str, size: SizeConfig, vocab_size: int, chunk_size: int | None = None) -> Architecture:
    """A matched model at a size that gives it heads, before its MLP has a width."""
    heads = size.mixers[model]
    return Architecture(
        model=model,
        kind=model,
        size=size.name,
        num_layers=size.num_layers,
        hidden_size=size.hidden_size,
        vocab_size=vocab_size,
        tie_embeddings=size.tie_embeddings,
        num_heads=heads.num_heads,
        head_k_dim=heads.head_k_dim,
        head_v_dim=heads.head_v_dim,
        chunk_size=chunk_size,
    )


def _settings(model: FlaModelConfig, size: SizeConfig, vocab_size: int) -> dict[str, Any]:
    """The arguments of FLA's configuration."""
    allowed = _fields(model.config)
    for key in model.options:
        if key in DECIDED_HERE:
            raise ConfigError(f"model.options.{key}: linrnn decides it", f"leave model.options.{key} out")
        if key not in allowed:
            names = sorted(allowed)
            raise ConfigError(
                f"model.options.{key}: FLA's {model.config} has no such option",
                f"nearest: {', '.join(get_close_matches(key, names, cutoff=0))}; all: {', '.join(names)}",
            )
    heads = size.mixers["transformer"].num_heads if "transformer" in size.mixers else None
    settings = {
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.num_layers,
        "vocab_size": vocab_size,
        "tie_word_embeddings": size.tie_embeddings,
        "use_cache": False,
    }
    own = facts_of(model.config)
    if own.mixer and model.config in size.mixers:
        settings |= own.mixer.settings(bare_architecture(model.config, size, vocab_size))
    elif heads is not None:
        by_heads = {"num_heads": heads, "head_dim": size.hidden_size // heads, **own.sized(size.hidden_size, heads)}
        settings |= {key: value for key, value in by_heads.items() if key in allowed}
    settings |= {"use_l2warp": False} if "use_l2warp" in allowed else {}
    settings |= model.options
    if not isinstance(layers := settings["num_hidden_layers"], int) or layers < 1:
        raise ConfigError(f"model.options.num_hidden_layers={layers} is no number of layers", "use 1 or more")
    if not isinstance(entries := settings["vocab_size"], int) or entries < vocab_size:
        raise ConfigError(
            f"model.options.vocab_size={entries} does not hold the vocabulary of {vocab_size}",
            f"use a whole number of {vocab_size} or more",
        )
    return settings | _attention(model, settings, allowed, heads)


def _attention(
    model: FlaModelConfig, settings: dict[str, Any], allowed: dict[str, Any], heads: int | None
) -> dict[str, Any]:
    """FLA's settings of a hybrid's attention layers."""
    every, window = model.attention_every, model.attention_window
    if every is None:
        if window is not None:
            raise ConfigError(
                f"model.attention_window={window}: there is no model.attention_every",
                "add it, or use model.options.window_size if FLA's model has this option",
            )
        return {}
    what, layers = f"model.attention_every={every}", settings["num_hidden_layers"]
    if "attn" not in allowed:
        raise ConfigError(
            f"{what}: FLA's {model.config} has no option for attention layers (`attn`)",
            "use a model that has one, as delta_net or gated_deltanet, or leave model.attention_every out",
        )
    if settings.get("attn"):
        raise ConfigError("model.attention_every and model.options.attn are both given", "use one of them")
    if every > layers:
        raise ConfigError(f"{what}: the model has {layers} layers", f"use model.attention_every={layers} or less")
    heads, width = heads or settings.get("num_heads"), settings["hidden_size"]
    if not heads or width % (2 * heads):
        raise ConfigError(
            f"{what}: a width of {width} does not split into {heads} heads of even dimension",
            "set size.mixers.transformer.num_heads",
        )
    return {"attn": {"layers": list(range(every - 1, layers, every)), "num_heads": heads, "window_size": window}}


def _fields(name: str) -> dict[str, Any]:
    """The arguments of FLA's configuration itself. Those of transformers for every model are not among them."""
    parameters = dict(inspect.signature(fla_classes(name)[1].__init__).parameters)
    return {key: value for key, value in parameters.items() if key not in ("self", "kwargs")}


@functools.lru_cache(maxsize=64)
def figures(name: str, settings: str) -> dict[str, Any]:
    """The fields of :class:`Architecture` that follow from the modules of FLA's model `name`.

    Args:
        settings: JSON of the arguments of FLA's configuration. Vocabulary and tied embeddings change no figure.
    """
    hf = build_hf(name, settings, "meta")
    config, backbone = hf.config, backbone_of(hf)
    _check_structure(name, hf, backbone)
    mixers: list[Any] = [module for block in backbone.layers for module in parts_of(block)["mixers"]]
    mlps = [module for block in backbone.layers for module in parts_of(block)["mlps"]]
    ends = {hf.lm_head.weight, *backbone.embeddings.parameters()}
    plain = not getattr(config, "attnres_block_size", None)  # without residuals over several layers
    return {
        "body_parameters": sum(parameter.numel() for parameter in {*hf.parameters()} - ends),
        "linears": (_linears(mixers), _linears(mlps)),
        "matrices": tuple((len(matrix), matrix.shape[1]) for matrix in layer_matrices(backbone.layers)),
        "recurrence_flops": facts_of(name).recurrence(config),
        "keeps_fp32": any(name.endswith(KEPT_IN_FP32) for name, _ in hf.named_parameters()),
        "attention_windows": tuple(m.window_size for m in mixers if type(m).__name__ == "Attention" and plain),
    }


def build_hf(name: str, settings: str, device: str) -> Any:
    """FLA's causal language model, initialised as FLA does."""
    try:
        model_class, config_class = fla_classes(name)
        with torch.device(device):
            return with_sdpa(model_class)(config_class(**json.loads(settings)))
    except (ValueError, TypeError, AssertionError, RuntimeError, NotImplementedError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{name}: FLA cannot build it with these dimensions ({first_line(error)})",
            "change them in size, or with model=fla in model.options.KEY=VALUE",
        ) from error
    except ImportError as error:
        raise UnsupportedError(f"model.config={name}: {error}", "install the package, or use another model") from error


def backbone_of(hf: Any) -> Any:
    """FLA's model without its head."""
    return hf.model if hasattr(hf, "model") else hf.backbone


def parts_of(block: nn.Module) -> dict[str, list[nn.Module]]:
    """The modules of a layer: `norms` over the hidden size, `mlps` (a layer may have none), and the rest, `mixers`."""
    parts: dict[str, list[nn.Module]] = {"norms": [], "mlps": [], "mixers": []}
    for name, module in block.named_children():
        parts["norms" if "norm" in name else "mlps" if name in ("mlp", "ffn") else "mixers"].append(module)
    return parts


def _check_structure(name: str, hf: Any, backbone: Any) -> None:
    children = {child for child, _ in backbone.named_children()}
    wrong = None
    if not children <= {"embeddings", "layers", "norm", "norm_f"} or "layers" not in children:
        wrong = f"FLA's model is not an embedding, layers, a norm and a head, but {', '.join(sorted(children))}"
    elif hasattr(hf, "aux_loss_scale"):
        wrong = "FLA adds a loss of its own to the cross-entropy, which loss backends do not have"
    elif type(hf.lm_head) is not nn.Linear or hf.lm_head.bias is not None:
        wrong = "its head is no matrix alone"
    if wrong:
        raise UnsupportedError(f"model.config={name}: {wrong}", "use another model")


def reads_documents(backbone: Any) -> bool:
    """Whether FLA keeps packed documents apart: `cu_seqlens` reaches every mixer, and the mixer reads it."""
    passing = [backbone, *backbone.layers]
    mixers = [mixer for block in backbone.layers for mixer in parts_of(block)["mixers"]]
    return all(_passes(module) for module in passing) and all(
        "cu_seqlens" in inspect.getsource(kind) for kind in {type(mixer) for mixer in mixers}
    )


def _passes(module: nn.Module) -> bool:
    parameters = inspect.signature(type(module).forward).parameters
    return "cu_seqlens" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _linears(modules: list[nn.Module]) -> int:
    return sum(part.weight.numel() for module in modules for part in module.modules() if isinstance(part, nn.Linear))
