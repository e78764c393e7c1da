"""Open a Hugging Face directory in FLA's format with FLA's own `from_pretrained`."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from linrnn.config.fla.names import fla_models
from linrnn.core.checksums import check_checksums
from linrnn.core.errors import ConfigError, DataError, first_line
from linrnn.models import cpu_ops
from linrnn.models.attention import install_sdpa
from linrnn.models.fla_import import fla_classes


def open_pretrained(directory: Path, device: torch.device) -> Any:
    """The causal language model in `directory`, in fp32. It reads only safetensors and runs no code from the directory.

    Raises:
        ConfigError: flash-linear-attention has no such model.
        UnsupportedError: the model has no CPU form, and `device` is a CPU.
        DataError: the model has no safetensors, lacks parameters, is damaged, or differs from its checksums.
    """
    check_checksums(directory)
    try:
        name = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{directory}/config.json cannot be read ({error})", "export the model again") from error
    if name not in fla_models():
        raise ConfigError(f"{directory} holds a {name}", f"name one of {', '.join(fla_models())}")
    if device.type == "cpu":
        cpu_ops.check_model(name)
    model_class, _ = fla_classes(name)
    install_sdpa()
    if device.type == "cpu":
        cpu_ops.install()
    try:
        model, report = model_class.from_pretrained(
            directory, use_safetensors=True, local_files_only=True, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise DataError(f"{directory} cannot be loaded ({first_line(error)})", "export the model again") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(what):
            raise DataError(
                f"{directory} has {what.replace('_', ' ')}: {min(map(str, report[what]))}", "export it again"
            )
    return model.to(device)
