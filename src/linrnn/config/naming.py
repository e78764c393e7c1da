"""A run's name and identity, derived from its configuration alone."""

import dataclasses
import functools
import hashlib
import re
from typing import Any, cast

from omegaconf import OmegaConf

from linrnn.config.compose import compose_config, leaves
from linrnn.config.schema import Config

# Keys that a resumed run may change; they are no part of its name.
MAY_DIFFER = (
    "trainer.max_steps",
    "trainer.resume",
    "trainer.log_every",
    "trainer.keep_checkpoints",
    "trainer.profile_steps",
    "trainer.memory_snapshot",
    "logger.",
    "device",
    "dry_run",
    "group",
    "run_name",
    "results_dir",
    "data.cache_dir",
    "data.verify",
    "parallel.timeout_seconds",
)
_GROUPS = ("model", "size", "loss", "data", "optimizer", "parallel")
_SHORT = {
    "trainer.batch_size": "b",
    "trainer.seq_len": "t",
    "trainer.accumulation_steps": "a",
    "sequences_per_step": "b",
    "trainer.precision": "",
    "optimizer.lr": "lr",
    "size.vocab_size": "v",
    "size.num_layers": "l",
    "model.chunk_size": "c",
}
_MAX_LENGTH = 80


def identity(config: Config, world_size: int = 1) -> dict[str, Any]:
    """Every key that is part of a run's identity, with its value.

    A distributed run is one by the sequences of its steps, however they are cut over ranks and micro-steps.
    """
    values = _identity(dataclasses.asdict(config))
    if config.parallel.name != "none":
        rows = values.pop("trainer.batch_size") * values.pop("trainer.accumulation_steps")
        values["sequences_per_step"] = rows * config.parallel.data_ranks(world_size)
    return values


def _identity(nested: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in leaves(nested) if not key.startswith(MAY_DIFFER)}


def run_name(config: Config, world_size: int = 1) -> str:
    """`model-size-loss`, every non-default choice, the seed: deterministic and complete.

    Beyond 80 characters the choices are replaced by a short hash of them.
    """
    if config.run_name:
        return config.run_name
    defaults = _defaults(*(f"{group}={getattr(config, group).name}" for group in _GROUPS))
    values = identity(config, world_size)
    menu = _defaults()
    words = [
        getattr(config, group).name
        for group in ("data", "optimizer", "parallel")
        if getattr(config, group).name != menu[f"{group}.name"]
    ]
    for key, value in values.items():
        if key != "seed" and defaults.get(key, "(absent)") != value:
            words.append(f"{_SHORT.get(key, key.rsplit('.', 1)[-1] + '_')}{_word(value)}")
    stem = f"{config.model.name}-{config.size.name}-{config.loss.name}"
    name = "-".join([stem, *words, f"s{config.seed}"])
    if len(name) > _MAX_LENGTH:
        digest = hashlib.sha256("-".join(words).encode()).hexdigest()[:8]
        name = f"{stem}-{digest}-s{config.seed}"
    return name


@functools.cache
def _defaults(*options: str) -> dict[str, Any]:
    """Every key of the identity with its default, for these options of the groups."""
    return _identity(cast(dict[str, Any], OmegaConf.to_container(compose_config(options))))


def _word(value: Any) -> str:
    """A value as part of a file name."""
    text = "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    text = re.sub(r"[^A-Za-z0-9.]+", "_", text).strip("_")
    return text if len(text) <= 24 else hashlib.sha256(str(value).encode()).hexdigest()[:8]
