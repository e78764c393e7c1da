"""What committed rows lack that runs of today record, and what stands for it.

The rows of results/summaries are older than some keys of a summary. No other file needs this.
`reason`, `gpu_state` and `loss_layer_ms` are read with `get` where they are used. A run that could not start has no
such figures either.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from linrnn.config import load_config
from linrnn.config.older_keys import NEW_NAMES, with_new_names

WALL_CLOCK = "wall clock"
GROUPS_WITHOUT_EXPERIMENT = ("whole_step",)  # of the study, from before its experiments had files
_HORIZON = re.compile(r"schedule\.steps=(\d+) ?")


def checkpointing_of(row: Mapping[str, Any]) -> str:
    """none | selective | full. Rows without the key were trained before there was activation checkpointing."""
    return row.get("activation_checkpointing") or "none"


def of_study(row: Mapping[str, Any]) -> bool:
    """Whether a run belongs to an experiment of the study: its command names one (`experiment=mve`)."""
    named = [word for word in str(row["command"]).split() if word.startswith("experiment=")]
    return named not in ([], ["experiment=null"]) or row.get("group") in GROUPS_WITHOUT_EXPERIMENT


def by_wall_clock(row: Mapping[str, Any]) -> bool:
    """Whether tokens/s are by wall clock. Those of all committed rows come from the device time of a step."""
    return row.get("tokens_per_second_is") == WALL_CLOCK


def step_ms(summary: Mapping[str, Any]) -> float | None:
    """Of one step, by wall clock. Of a committed row, the median of the device times."""
    return summary.get("wall_step_ms") or summary["step_time_ms_median"]


def hidden_size(summary: Mapping[str, Any]) -> int:
    """Of the model. Rows without the key: of the size that they name."""
    return summary.get("hidden_size") or _hidden_size(summary["size"])


@cache
def _hidden_size(size: str) -> int:
    return int(load_config([f"size={size}"]).size.hidden_size)


def horizon(summary: Mapping[str, Any]) -> int | None:
    """The step at which the schedule ends. Rows that do not record it: the last step of a finished run, or None."""
    recorded = _HORIZON.search(_training(summary.get("training")) or "")
    if recorded:
        return int(recorded[1])
    return summary["steps"] if summary["status"] == "finished" else None


def without_horizon(training: str | None) -> str | None:
    """What a run's `training` says beside its horizon, which follows from its batch and tokens."""
    training = _training(training)
    return training and _HORIZON.sub("", training)


@cache
def _training(recorded: str | None) -> str | None:
    """What a run records as `training`, with today's names of the schedule's keys, and keys that are newer."""
    if not recorded:
        return recorded
    if "trainer.float8=" not in recorded:
        recorded = recorded.replace("trainer.deterministic=", "trainer.float8=none trainer.deterministic=")
    if "trainer.cuda_graph=" not in recorded:
        recorded = recorded.replace("trainer.deterministic=", "trainer.cuda_graph=False trainer.deterministic=")
    if not any(f"{key}=" in recorded for key in NEW_NAMES):
        return recorded
    words = with_new_names(dict(re.findall(r"(\S+?)=(.*?)(?= [\w.]+=|$)", recorded)))
    return " ".join(f"{key}={value}" for key, value in words.items())
