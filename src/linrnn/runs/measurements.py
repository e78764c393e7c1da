"""A run's speed and memory, from the records of metrics.jsonl: over all processes of the run.

Two times of a step are measured. The device's time lies between CUDA events around the step. The wall-clock time goes
from step to step, so it also includes the host's work between steps: metrics, wandb, collectives, the console.
:class:`linrnn.profiling.SpeedMeter` measures both.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from linrnn.core.machine import GIB

WALL_CLOCK = "wall clock"  # tokens_per_second_is
NOT_MEASURED = "not measured: other runs shared the GPU"  # tokens_per_second_is of a run with `gpu_shared`
UNEVEN = 0.1
CPU_BOUND_SHARE = 0.02  # above this share of the wall-clock time between steps, a report says so


def speed_of_run(records: Sequence[Mapping[str, Any]], tokens_per_step: int) -> dict[str, Any]:
    """The speed for a run's summary, from all of its `records`. Values are None without records.

    * `tokens_per_second`: tokens of the measured steps / their wall-clock seconds. `wall_step_ms`: their mean time. A
      few slow steps lower the one and raise the other, and leave the median below as it is.
    * `step_time_ms_median`: median of the device's time of a step. A record of several steps (`trainer.log_every`)
      holds their mean, and counts that many times.
    * `host_step_ms`: mean of wall-clock time minus device's time of a step.
    * `loss_layer_ms`: medians for the output layer's passes, like `step_time_ms_median`.
    """
    measured = [record for record in records if record.get("speed/measured_steps")]
    steps = sum(record["speed/measured_steps"] for record in measured)
    wall = _total(measured, "speed/wall_step_ms") / steps if steps else None
    loss = {name: _median(measured, f"speed/loss_{name}_ms") for name in ("forward", "backward")}
    return {
        "tokens_per_second": wall and 1e3 * tokens_per_step / wall,
        "tokens_per_second_is": WALL_CLOCK,
        "wall_step_ms": wall,
        "step_time_ms_median": _median(measured, "speed/step_ms"),
        "host_step_ms": wall and wall - _total(measured, "speed/step_ms") / steps,
        "loss_layer_ms": {name: value for name, value in loss.items() if value is not None} or None,
        "measured_steps": steps,
    }


def by_wall_clock(summary: Mapping[str, Any]) -> bool:
    """Whether tokens/s are by wall clock. Those of some committed rows come from the device time of a step."""
    return summary.get("tokens_per_second_is") == WALL_CLOCK


def is_cpu_bound(summary: Mapping[str, Any]) -> bool:
    """Whether a GPU waits between steps for more than 2 % of a run's wall-clock time; False without the two times."""
    host, wall = summary.get("host_step_ms"), summary.get("wall_step_ms")
    return host is not None and wall is not None and host > CPU_BOUND_SHARE * wall and summary.get("device") != "cpu"


def uneven_steps(summary: Mapping[str, Any]) -> str | None:
    """Says that a run's mean step is off its median step by more than UNEVEN; None if it is not, or not measured."""
    median, host, wall = (summary.get(key) for key in ("step_time_ms_median", "host_step_ms", "wall_step_ms"))
    if not median or host is None or wall is None or abs((ratio := (wall - host) / median) - 1) <= UNEVEN:
        return None
    return f"the mean step takes {ratio:.2f} times the median, as on a busy machine; tokens/s follow from the mean"


def memory_of_run(records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes by component: the maximum that any process recorded after its warm-up."""
    most: dict[str, int] = {}
    for record in records:
        for key, gib in record.items():
            if key.startswith("memory/") and gib is not None:
                name = key.removeprefix("memory/").removesuffix("_gib")
                most[name] = max(most.get(name, 0), round(gib * GIB))
    return most


def wall_seconds_of_run(records: Sequence[Mapping[str, Any]]) -> float:
    """Wall-clock seconds of all processes up to the last record, without the time between processes."""
    return max((record.get("train/wall_seconds") or 0.0 for record in records), default=0.0)


def _total(records: Sequence[Mapping[str, Any]], name: str) -> float:
    """The sum over all steps, if each record holds the mean over its steps."""
    return sum(record[name] * record["speed/measured_steps"] for record in records)


def _median(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The median over all steps, if each record holds the mean over its steps; None if no record has the metric."""
    values = [value for r in records if name in r for value in [r[name]] * r["speed/measured_steps"]]
    return statistics.median(values) if values else None
