"""Models with random weights: from a config.json, from a model type's defaults, or of a published shape."""

from __future__ import annotations

import importlib
import inspect
import json
from contextlib import suppress
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..huggingface.checks import imported

# Published shapes: model type, hidden size, width of the MLP, layers, heads, heads of keys, vocabulary size, and more.
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_TIED = {"tie_word_embeddings": True}
_GEMMA2 = {"head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0}
PRESETS: dict[str, tuple[Any, ...]] = {
    "llama_1b": ("llama", 2048, 8192, 16, 32, 8, 128256, _TIED),
    "llama_8b": ("llama", 4096, 14336, 32, 32, 8, 128256, {}),
    "qwen3_0.6b": ("qwen3", 1024, 3072, 28, 16, 8, 151936, _TIED | {"head_dim": 128}),
    "gemma2_2b": ("gemma2", 2304, 9216, 26, 8, 4, 256000, _TIED | _GEMMA2),
}


def build(name: str, overrides: dict[str, str], dtype: torch.dtype, device: torch.device) -> Any:
    """A causal language model with random weights, in training mode.

    Args:
        name: a config.json or its folder, a name in PRESETS, or a model type of transformers or FLA: llama, gla, ….
        overrides: values of the configuration, as text; JSON where it is JSON.

    Raises:
        ValueError: there is no such model, or its configuration has no such key or refuses a value.
    """
    transformers = imported("transformers", "transformers")
    types, path = transformers.models.auto.configuration_auto.CONFIG_MAPPING, Path(name)
    kind, *sizes, more = PRESETS.get(name, (name, {}))
    values = dict(zip((*_SIZES, "vocab_size"), sizes, strict=False)) | more
    try:
        if path.exists():
            values = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
            kind = values.pop("model_type")
        if kind not in types:
            with suppress(ModuleNotFoundError):
                importlib.import_module("fla.models")  # makes FLA's model types known to transformers
        if kind not in types:
            near = " or ".join(get_close_matches(kind, [*PRESETS, *types], n=3, cutoff=0))
            missing = "" if find_spec("fla") else " FLA's types need flash-linear-attention"
            raise ValueError(f"there is no such folder, file, model type or preset; did you mean {near}?{missing}")
        known = list({**transformers.AutoConfig.for_model(kind).to_dict(), **inspect.signature(types[kind]).parameters})
        for key, text in overrides.items():
            if key not in known:
                near = get_close_matches(key, known, n=1, cutoff=0)[0]
                raise ValueError(f"{types[kind].__name__} has no key {key}; did you mean config.{near}?")
            values[key] = text
            with suppress(ValueError):
                values[key] = json.loads(text)
        config = transformers.AutoConfig.for_model(kind, **values)
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError("is no causal language model")
    except Exception as error:  # transformers has error classes of its own, and may rename them
        raise ValueError(f"model={name}: {str(error.__cause__ or error).strip()}") from None
    with device:  # a GPU draws weights faster
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def apply_liger(model: Any) -> None:
    """Give one model Liger's fused linear loss, with Liger's other kernels off; ValueError if Liger has none for it."""
    patches = imported("liger_kernel.transformers.monkey_patch", "liger-kernel")
    if (function := patches.MODEL_TYPE_TO_APPLY_LIGER_FN.get(model.config.model_type)) is None:
        raise ValueError(f"liger: has no loss for models of type {model.config.model_type}")
    names = inspect.signature(function).parameters
    function(**dict.fromkeys(names.keys() - {"model", "fused_linear_cross_entropy"}, False), model=model)
