"""A run's name and identity. Both follow from its configuration alone."""

import dataclasses
import functools
import hashlib
import os
import re
from pathlib import Path
from typing import Any

from linrnn.config.compose import menu_of, values_under
from linrnn.config.schema import Config, HubDataConfig, leaves
from linrnn.config.steps import CONSTANT, horizon, sequences_per_step

# Operational keys, these and all of `logger`, say how a run is watched, stored and ended. They do not change what it
# computes until its end. A resumed run may change them. They are no part of its name or identity; environment.json
# records their values.
OPERATIONAL = {
    *("trainer.max_steps", "trainer.max_tokens", "trainer.resume", "trainer.log_every", "trainer.valid_every"),
    *("trainer.checkpoint_every", "trainer.checkpoint_minutes", "trainer.keep_checkpoints"),
    *("trainer.warmup_measurement_steps", "trainer.kernel_choices", "trainer.profile_steps", "trainer.memory_snapshot"),
    *("device", "dry_run", "gpu", "gpu_price", "group", "run_name", "results_dir", "data.cache_dir", "data.verify"),
    *("parallel.timeout_seconds", "parallel.blocks_together", "parallel.keep_gathered"),
}
# Where the data lies: part of a run's name, so that a sweep over texts has a directory for each. It is no part of the
# identity: the data's fingerprint tells whether a run goes on with the text that it began with.
_DATA = ("data.path", "data.sources", "data.valid_path", "data.tokenizer")
_ON_HUB = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # NAME or OWNER/NAME
HORIZON = "schedule.steps"
_GROUPS = ("model", "size", "loss", "data", "optimizer", "schedule", "parallel")
_SHORT = {
    "trainer.batch_size": "b",
    "trainer.seq_len": "t",
    "trainer.accumulation_steps": "a",
    "sequences_per_step": "b",
    "trainer.precision": "",
    "schedule.name": "schedule_",
    HORIZON: "steps",
    "optimizer.lr": "lr",
    "size.vocab_size": "v",
    "size.num_layers": "l",
    "model.chunk_size": "c",
    "model.config": "",
}
_MAX_LENGTH = 80


def identity(config: Config, world_size: int = 1) -> dict[str, Any]:
    """Every key of a run's identity with its value: :func:`hyperparameters` without the places of the data.

    Raises:
        ConfigError: as :func:`hyperparameters`.
    """
    return {key: value for key, value in hyperparameters(config, world_size).items() if key not in _DATA}


def hyperparameters(config: Config, world_size: int = 1) -> dict[str, Any]:
    """Every key that decides what a run computes, with its value. Paths are resolved, so their spelling is no choice.

    The schedule's end is given as a step. A constant schedule has no end of its own: it goes as far as the run.
    A distributed run is identified by the sequences of its steps, however they are split over ranks and micro-steps.

    Raises:
        ConfigError: the run has no end, or its schedule ends before it (:func:`linrnn.config.steps.horizon`).
    """
    ignored = operational_settings(config)
    values = {key: value for key, value in leaves(dataclasses.asdict(config)) if key not in ignored}
    values |= paths(config)
    if values.get("data.sources"):
        del values["data.path"]
    end = horizon(config, world_size)
    if config.schedule.name != CONSTANT:
        values[HORIZON] = end
    if config.parallel.name != "none":
        del values["trainer.batch_size"], values["trainer.accumulation_steps"]
        values["sequences_per_step"] = sequences_per_step(config, world_size)
    return values


def operational_settings(config: Config) -> dict[str, Any]:
    """Every operational key with its value. Two processes of one run may differ in these."""
    values = leaves(dataclasses.asdict(config))
    return {key: value for key, value in values if key in OPERATIONAL or key.startswith("logger.")}


def paths(config: Config) -> dict[str, Any]:
    """Every key that names what a run reads, with its path as :func:`resolved` gives it."""
    of_hub = {"data.tokenizer", "init_from", *(["data.path"] if isinstance(config.data, HubDataConfig) else [])}
    values = dict(leaves(dataclasses.asdict(config)))
    keys = [key for key in (*_DATA, "init_from", "continue_from") if key in values]
    return {key: resolved(values[key], of_hub=key in of_hub) for key in keys}


def resolved(path: Any, *, of_hub: bool = False) -> Any:
    """A path, or a list of paths or sources, in the one spelling that all others lead to; None stays.

    Args:
        of_hub: `path` may be a name on the hub, which stays as it is.
    """
    if isinstance(path, list):
        several = [resolved(one, of_hub=of_hub) for one in path]
        return several[0] if len(several) == 1 else several
    if isinstance(path, dict):  # one of data.sources
        return {**path, "path": resolved(path["path"])}
    if path is None:
        return None
    is_here = os.path.exists(path) or os.path.exists(os.path.dirname(path))
    return path if of_hub and not is_here and _ON_HUB.fullmatch(path) else os.path.realpath(path)


def run_name(config: Config, world_size: int = 1) -> str:
    """`model-size-loss`, every choice that is not the default, and the seed.

    A name has at most 80 characters. If the choices do not fit, a short hash of all of them replaces the last ones; the
    summary lists them all.
    """
    if config.run_name:
        return config.run_name
    menu = menu_of()
    defaults = {**defaults_of(config), "schedule.name": menu["schedule"]}  # a word among the keys, not among the groups
    named = {group: getattr(config, group).name for group in ("data", "optimizer", "parallel")}
    words = [
        *(name for group, name in named.items() if name != menu[group]),
        *(
            f"{_SHORT.get(key, key.rsplit('.', 1)[-1] + '_')}{_word(value)}"
            for key, value in hyperparameters(config, world_size).items()
            if key != "seed" and defaults.get(key, "(absent)") != value
        ),
    ]
    stem, seed = f"{config.model.name}-{config.size.name}-{config.loss.name}", f"s{config.seed}"
    name, kept, digest = "-".join([stem, *words, seed]), list(words), _digest("-".join(words))
    while kept and len(name) > _MAX_LENGTH:
        kept.pop()
        name = "-".join([stem, *kept, digest, seed])
    return name


def place_of(config: Config, world_size: int = 1) -> Path:
    """The run's directory: `results/<group>/<run_name>`."""
    return Path(config.results_dir) / config.group / run_name(config, world_size)


def defaults_of(config: Config) -> dict[str, Any]:
    """Every key with its default value, under the options that a configuration chose."""
    return _defaults(*(f"{group}={getattr(config, group).name}" for group in _GROUPS))


@functools.cache
def _defaults(*options: str) -> dict[str, Any]:
    values = values_under(options)
    if values[HORIZON] is None and values["schedule.name"] != CONSTANT:
        values[HORIZON] = values["trainer.max_steps"]
    return values


def _word(value: Any) -> str:
    """A value as part of a file name. A path shows its last part, and a hash of all of it."""
    if isinstance(value, str) and os.path.isabs(value):
        return f"{_word(Path(value).name[:16])}_{_digest(value)}"
    text = "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    text = re.sub(r"[^A-Za-z0-9.]+", "_", text).strip("_")
    return text if len(text) <= 24 else _digest(str(value))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
