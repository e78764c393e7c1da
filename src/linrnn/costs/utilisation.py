"""MFU of a committed or finished run, computed from its summary: dimensions, tokens/s and GPU."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from linrnn import costs
from linrnn.config import load_config
from linrnn.core.errors import ConfigError
from linrnn.models.architecture import Architecture, resolve


def mfu_of_summary(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """`mfu` and `mfu_6n` by today's convention (:mod:`linrnn.costs.flops`), whatever convention the run used.

    Both are None without a speed, for a GPU of unknown peak, and if the dimensions are not those of the size.

    Args:
        summary: a run's summary.json, or a row of a committed runs.json.xz.
    """
    arch = architecture_of(summary)
    if arch is None:
        return {"mfu": None, "mfu_6n": None}
    return costs.mfu(
        arch,
        seq_len=summary["seq_len"],
        tokens_per_second=summary["tokens_per_second"],
        device_name=summary["device"] or "",
        precision=summary["precision"] or "",
        n_devices=summary["world_size"] or 1,
    )


def architecture_of(row: Mapping[str, Any]) -> Architecture | None:
    """The architecture of a row with `model`, `size` and `vocab_size`. A given `n_parameters` must agree.

    None if it agrees with neither tied nor untied embeddings, or if the model or the size no longer exists.
    """
    if row["vocab_size"] is None:
        return None
    for arch in _candidates(row["model"], row["size"], row["vocab_size"]):
        if row.get("n_parameters") in (None, arch.n_parameters):
            return arch
    return None


@lru_cache
def _candidates(model: str, size: str, vocab_size: int) -> tuple[Architecture, ...]:
    """The architectures with tied and untied embeddings; the size's own choice comes first.

    Args:
        model: the label in a summary: a name, and options as `shared_projection_rank=256`.
    """
    name, *options = model.split()
    try:
        config = load_config([f"model={name}", *(f"model.{option}" for option in options), f"size={size}"])
        other = replace(config.size, tie_embeddings=not config.size.tie_embeddings)
        return tuple(resolve(config.model, dimensions, vocab_size) for dimensions in (config.size, other))
    except ConfigError:
        return ()
