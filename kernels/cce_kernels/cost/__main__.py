"""What a model's head and loss cost, in time and memory, and what it would cost with the loss of cce_kernels.

usage: python -m cce_kernels.cost model=NAME [key=value …]

Weights are random, nothing is downloaded. config.KEY=VALUE sets a value of the model's configuration, as in
config.num_hidden_layers=4. Other keys, with their defaults:
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches

import torch

from .measure import profile
from .presets import PRESETS, apply_liger, build

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KEYS: dict[str, tuple[str, tuple[str, ...], str]] = {  # the default, the values that there are (none: a number), words
    "model": ("", (), "a config.json or its folder; a model type of transformers or FLA (llama, gla, …); or a preset"),
    "batch": ("1", (), "sequences"),
    "seq": ("2048", (), "tokens of a sequence"),
    "dtype": ("bf16", tuple(DTYPES), ", ".join(DTYPES)),
    "device": ("cuda", ("cuda", "cpu"), "cuda, cpu"),
    "rounds": ("5", (), "how often each pass is timed"),
    "checkpointing": ("false", ("false", "true"), "true: gradient checkpointing"),
    "liger": ("false", ("false", "true"), "true: the model with Liger's fused loss, and none of Liger's other kernels"),
}


def main(arguments: Sequence[str]) -> int:
    """Measure and print. Returns the exit code: 2 if an argument is wrong or the model cannot run."""
    if not arguments or {"-h", "--help"} & set(arguments):
        keys = [f"  {f'{key}={default}':<20} {text}" for key, (default, _, text) in KEYS.items()]
        print("\n".join([str(__doc__), *keys, f"\npresets: {', '.join(PRESETS)}"]))
        return 0
    try:
        values, overrides = parsed(arguments)
        if values["device"] == "cuda" and not torch.cuda.is_available():
            raise ValueError("device: there is no GPU that torch can use; give device=cpu")
        model = build(values["model"], overrides, DTYPES[values["dtype"]], torch.device(values["device"]))
        if values["checkpointing"] == "true":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if values["liger"] == "true":
            apply_liger(model)
        vocab = model.config.get_text_config().vocab_size  # of a model that also reads images: of its text
        ids = torch.randint(vocab, (int(values["batch"]), int(values["seq"])), device=model.device)
        print(profile(model, ids, rounds=int(values["rounds"])))
    except (TypeError, ValueError, ImportError, IndexError, RuntimeError) as error:
        print(f"error: {(str(error).splitlines() or [type(error).__name__])[0]}", file=sys.stderr)
        return 2
    return 0


def parsed(arguments: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The values by key, and the overrides of the configuration.

    Raises:
        ValueError: a key or value is wrong, or there is no model. The message names what is right.
    """
    values, overrides = {key: default for key, (default, *_) in KEYS.items()}, {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if key.startswith("config.") and equals:
            overrides[key.removeprefix("config.")] = text
        elif key not in KEYS or not equals:
            near = get_close_matches(key, KEYS, n=1, cutoff=0)[0]
            raise ValueError(f"{argument}: must be key=value with a known key; did you mean {near}=…? See --help")
        else:
            choices = KEYS[key][1]
            if text not in choices if choices else key != "model" and not (text.isdecimal() and int(text)):
                raise ValueError(f"{key}: must be {' or '.join(choices) or 'a positive integer'}, got {text}")
            values[key] = text
    if not values["model"]:
        raise ValueError(f"model: is missing; give model=NAME, as in model={next(iter(PRESETS))}")
    return values, overrides


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
