"""Keys that have another name today: refused on a command line, renamed in files of earlier versions.

The learning-rate schedule was part of the group `optimizer` before it became the group `schedule`. Compilation was a
yes or no: `trainer.compile_blocks`.
"""

from collections.abc import Sequence
from typing import Any

from linrnn.config.schema import SHARING
from linrnn.core.errors import ConfigError

NEW_NAMES = {
    "optimizer.schedule": "schedule.name",
    "optimizer.schedule_steps": "schedule.steps",
    "optimizer.warmup_steps": "schedule.warmup_steps",
    "optimizer.min_lr_ratio": "schedule.min_lr_ratio",
    "optimizer.decay_fraction": "schedule.decay_fraction",
    "trainer.compile_blocks": "trainer.compile",
}
_COMPILE = {"true": "blocks", "false": "none"}
# Earlier versions wrote every key of every schedule. These are the ones that a schedule has no more.
_UNUSED = {
    "cosine": ("schedule.decay_fraction",),
    "constant": ("schedule.decay_fraction", "schedule.min_lr_ratio"),
}


def refuse_old_names(overrides: Sequence[str]) -> None:
    """Reject overrides of keys that have another name today.

    Raises:
        ConfigError: there is one. The remedy is the override to use instead.
    """
    for override in overrides:
        key, equals, value = override.lstrip("+~").partition("=")
        if key in NEW_NAMES:
            new = NEW_NAMES[key].removesuffix(".name")
            value = _value(key, value)
            raise ConfigError(f"{key} has a new name", f"use {new}{equals}{value}")


def with_new_names(flat: dict[str, Any]) -> dict[str, Any]:
    """A flattened configuration or identity with today's keys, in the same order."""
    renamed = {NEW_NAMES.get(key, key): _value(key, value) for key, value in flat.items()}
    if "optimizer.schedule" in flat:
        for key in _UNUSED.get(str(flat["optimizer.schedule"]), ()):
            renamed.pop(key, None)
    if flat.get("model.name") in SHARING:  # earlier versions lack the key
        renamed.setdefault("model.shared_projection_rank", None)
    return renamed


def regrouped(raw: dict[str, Any]) -> dict[str, Any]:
    """A run's config.yaml, read as a dictionary, with today's keys."""
    old = {group: raw[group] for group in ("optimizer", "trainer") if isinstance(raw.get(group), dict)}
    flat = {f"{group}.{key}": value for group, keys in old.items() for key, value in keys.items()}
    if not flat.keys() & NEW_NAMES.keys():
        return raw
    groups: dict[str, dict[str, Any]] = {}
    for key, value in with_new_names(flat).items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    return {**raw, **groups}


def _value(key: str, value: Any) -> Any:
    """The value that a key has under its new name."""
    return _COMPILE.get(str(value).lower(), value) if key == "trainer.compile_blocks" else value
