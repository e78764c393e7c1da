"""The loss doctor: time and memory of a model's head and loss as they stand, and of cce_kernels in their place.

usage: python -m cce_kernels.doctor model=NAME [key=value …]

  model           a folder with a checkpoint, or a config.json, on this machine; a model type of transformers or FLA
                  with its default sizes (llama, qwen3, gla, …); or a preset. Nothing is downloaded. Weights are
                  random unless the folder has some.
  batch=1         sequences
  seq=2048        tokens of a sequence
  dtype=          bf16 | fp16 | fp32; default: bf16 on a GPU, fp32 on a CPU
  device=         cuda | cpu; default: cuda if there is a GPU
  rounds=5        how often each pass is timed
  checkpointing=  true | false; gradient checkpointing; default: false
  liger=          true | false; apply Liger's fused loss to the model first, its other kernels off; default: false
  workspace_mib=  of linear_cross_entropy; default: its own
  json=           true | false; print JSON in place of the table; default: false
  config.KEY=     a value of the model's configuration, as in config.num_hidden_layers=4

presets:"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from ..api import try_options
from .measure import profile
from .presets import PRESETS, apply_liger, build

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_FLAGS = ("checkpointing", "liger", "json")
_NUMBERS = ("batch", "seq", "rounds")
_KEYS = ("model", *_NUMBERS, "dtype", "device", *_FLAGS, "workspace_mib")


def main(arguments: Sequence[str]) -> int:
    """Measure and print. Returns the exit code: 2 if an argument is wrong or the model cannot run."""
    if not arguments or {"-h", "--help", "help"} & set(arguments):
        print("\n".join([str(__doc__), *(f"  {name:<15} {text}" for name, (_, text, _) in PRESETS.items())]))
        return 0
    try:
        values, overrides = parsed(arguments)
        device = torch.device(values.get("device", "cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("device: there is no GPU that torch can use; give device=cpu")
        dtype = _DTYPES[values.get("dtype", "bf16" if device.type == "cuda" else "fp32")]
        options = {"workspace_mib": values["workspace_mib"]} if "workspace_mib" in values else {}
        try_options(**options)  # before a model is built, which may take minutes
        torch.manual_seed(0)
        model = build(values["model"], overrides, dtype, device)
        if values.get("checkpointing"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if values.get("liger"):
            apply_liger(model)
        vocab = model.config.get_text_config().vocab_size  # of a model that also reads images: of its text
        ids = torch.randint(vocab, (values.get("batch", 1), values.get("seq", 2048)), device=device)
        found = profile(model, ids, rounds=values.get("rounds", 5), **options)
    except (TypeError, ValueError, ImportError, IndexError, RuntimeError) as error:
        print(f"error: {_in_words(error)}", file=sys.stderr)
        return 2
    print(json.dumps(_record(found)) if values.get("json") else found)
    return 0


def _in_words(error: Exception) -> str:
    """One line. A RuntimeError comes from the model's own code or from the device."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, ModuleNotFoundError):
        return f"{first}; the doctor needs it: pip install {error.name}"
    if isinstance(error, torch.OutOfMemoryError):
        return f"{first}; give a smaller batch or seq"
    if isinstance(error, IndexError):
        return f"the model failed: {first}; it may have fewer positions than tokens of a sequence: give a smaller seq"
    if isinstance(error, RuntimeError):
        return f"the model failed on this device: {first}; most models of FLA and Liger's loss need a GPU"
    return first


def parsed(arguments: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values by key, and the overrides of the configuration.

    Raises:
        ValueError: a key or value is wrong, or there is no model. The message names the nearest key.
    """
    values: dict[str, Any] = {}
    overrides: dict[str, str] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if key.startswith("config.") and equals:
            overrides[key.removeprefix("config.")] = text
            continue
        if key not in _KEYS or not equals:
            near = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.4)
            meant = f"did you mean {near[0]}=…?" if near else f"keys: {', '.join(_KEYS)}, config.KEY"
            raise ValueError(f"{argument}: must be key=value with a known key; {meant}")
        values[key] = _value(key, text)
    if not values.get("model"):
        raise ValueError(f"model: is missing; give model=NAME, as in model={next(iter(PRESETS))}")
    return values, overrides


def _value(key: str, text: str) -> Any:
    if key in _FLAGS:
        if text not in ("true", "false"):
            raise ValueError(f"{key}: must be true or false, got {text}")
        return text == "true"
    if key in _NUMBERS:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"{key}: must be a positive integer, got {text}")
        return int(text)
    if key == "workspace_mib":
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{key}: must be a number, got {text}") from None
    choices = {"dtype": tuple(_DTYPES), "device": ("cuda", "cpu")}.get(key)
    if choices and text not in choices:
        raise ValueError(f"{key}: must be one of {', '.join(choices)}, got {text}")
    return text


def _record(found: Any) -> dict[str, Any]:
    """The profile with its shares, for JSON."""
    return {**asdict(found), "tflops": found.tflops, "share_of_step": found.share_of_step,
            "share_of_peak": found.share_of_peak, "same_loss": found.same_loss}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
