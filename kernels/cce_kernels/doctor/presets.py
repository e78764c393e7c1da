"""Models for the command: from a checkpoint or a config.json on this machine, a model type's defaults, or a preset."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

# Published shapes, with random weights: nothing is downloaded. Model type, what it is, configuration.
PRESETS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama_1b": ("llama", "Llama 3.2 1B: D = 2048, V = 128,256, tied, 16 layers", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    }),
    "llama_8b": ("llama", "Llama 3.1 8B: D = 4096, V = 128,256, 32 layers", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    }),
    "qwen3_0.6b": ("qwen3", "Qwen3 0.6B: D = 1024, V = 151,936, tied, 28 layers", {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    }),
    "gemma2_2b": ("gemma2", "Gemma 2 2B: D = 2304, V = 256,000, tied, softcap 30, 26 layers", {
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000, "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 256, "tie_word_embeddings": True,
    }),
}  # fmt: skip


def build(name: str, overrides: dict[str, str], dtype: torch.dtype, device: torch.device) -> Any:
    """A causal language model in training mode.

    Args:
        name: a folder with a checkpoint or with config.json alone, a path of a config.json, a name in PRESETS, or a
            model type of transformers or FLA, such as llama or gla. Weights are random unless the folder has some.
        overrides: values of the configuration, as text.

    Raises:
        ModuleNotFoundError: transformers is missing.
        ValueError: no such model, or the configuration has no such key (the message names the nearest) or value.
    """
    transformers: Any = importlib.import_module("transformers")
    auto = transformers.AutoModelForCausalLM
    path = Path(name)
    kind = _type_of(path) if path.exists() else PRESETS[name][0] if name in PRESETS else name
    types = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if kind not in types:
        _register_fla()
    if kind not in types:
        known = [*PRESETS, *types]
        near = get_close_matches(name, known, n=3, cutoff=0.5)
        meant = f"did you mean {' or '.join(near)}?" if near else f"presets: {', '.join(PRESETS)}"
        raise ValueError(f"model: there is no folder, config.json, preset or model type {name}; {meant}")
    preset = PRESETS[name][2] if name in PRESETS else {}
    if path.exists():
        with _in_one_line(f"model: {name} has a configuration that transformers refuses"):
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    else:
        config = transformers.AutoConfig.for_model(kind, **preset)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"model: {name} is no causal language model, but of type {kind}")
    values = {key: _override(config, key, text) for key, text in overrides.items()}
    if values and not path.exists():  # anew, because the constructor derives some values from others
        with _in_one_line(f"config: a {type(config).__name__} refuses {', '.join(overrides)}"):
            config = transformers.AutoConfig.for_model(kind, **{**preset, **values})
    if path.is_dir() and any(path.glob("*.safetensors")):
        with _in_one_line(f"model: the weights in {name} cannot be read"):
            model = auto.from_pretrained(path, config=config, dtype=dtype, local_files_only=True)
        return model.to(device).train()
    with device:  # a GPU draws weights faster
        return auto.from_config(config, dtype=dtype).train()


def apply_liger(model: Any) -> None:
    """Give one model Liger's fused linear loss, with Liger's other kernels off.

    Raises:
        ValueError: Liger is not installed, or has no fused loss for this model.
    """
    try:
        patches = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ModuleNotFoundError:
        raise ValueError("liger: liger-kernel is not installed") from None
    function = patches.MODEL_TYPE_TO_APPLY_LIGER_FN.get(model.config.model_type)
    if function is None:
        raise ValueError(f"liger: has no loss for models of type {model.config.model_type}")
    names = inspect.signature(function).parameters
    function(**dict.fromkeys(names.keys() - {"model", "fused_linear_cross_entropy"}, False), model=model)


def _type_of(path: Path) -> str:
    """The model type that a config.json names."""
    file = path / "config.json" if path.is_dir() else path
    try:
        return json.loads(file.read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"model: {file} is no config.json of a model with a model_type") from None


def _register_fla() -> None:
    """Make FLA's model types known to transformers, if FLA is installed."""
    with suppress(ModuleNotFoundError):
        importlib.import_module("fla.models")


def _override(config: Any, key: str, text: str) -> Any:
    """Set a value of the configuration, and return it. Text is read as JSON if it is JSON."""
    known = config.to_dict()
    if key not in known and not hasattr(config, key):
        meant = [f"; did you mean config.{near}?" for near in get_close_matches(key, known, n=1)]
        raise ValueError(f"config.{key}: a {type(config).__name__} has no such key" + "".join(meant))
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    with _in_one_line(f"config.{key}: a {type(config).__name__} refuses {text}"):
        setattr(config, key, value)
    return value


@contextmanager
def _in_one_line(refusal: str) -> Iterator[None]:
    """Raise a ValueError for whatever a configuration raises: transformers has its own errors, and may rename them."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{refusal}: {str(error.__cause__ or error).strip()}") from None
