"""A run's figures of speed and memory, from the records of metrics.jsonl: over all processes of the run.

Two times of a step are measured. The device's lies between CUDA events round the step. The wall clock's goes from step
to step, and also has what the host does between steps: metrics, wandb, collectives of the hosts, the console.
:class:`linrnn.profiling.SpeedMeter` measures both.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

GIB = 2**30
HOST_DECIDES = 0.02  # share of the wall-clock time between steps from which a report says so


def speed_of_run(records: Sequence[Mapping[str, Any]], tokens_per_step: int) -> dict[str, Any]:
    """The speed in a run's summary, from all of its `records`, whichever process wrote them; null without any.

    * `tokens_per_second`: tokens of the measured steps / their wall-clock seconds; `wall_step_ms`: of one step.
    * `step_time_ms_median`: the device's time of a step. A record of several steps (`trainer.log_every`) holds their
      mean, and counts that many times.
    * `host_step_ms`: mean milliseconds of a step that the wall clock has beyond the device's time.
    * `loss_layer_ms`: medians of the loss layer's passes, as `step_time_ms_median`.
    """
    measured = [record for record in records if record.get("speed/measured_steps")]
    steps = sum(record["speed/measured_steps"] for record in measured)
    wall = _total(measured, "speed/wall_step_ms") / steps if steps else None
    loss = {name: _median(measured, f"speed/loss_{name}_ms") for name in ("forward", "backward")}
    return {
        "tokens_per_second": wall and 1e3 * tokens_per_step / wall,
        "tokens_per_second_is": "wall clock",
        "wall_step_ms": wall,
        "step_time_ms_median": _median(measured, "speed/step_ms"),
        "host_step_ms": wall and wall - _total(measured, "speed/step_ms") / steps,
        "loss_layer_ms": {name: value for name, value in loss.items() if value is not None} or None,
        "measured_steps": steps,
    }


def host_decides(summary: Mapping[str, Any]) -> bool:
    """Whether what the host does between steps takes more than 2 % of the wall-clock time of a run."""
    host, wall = summary.get("host_step_ms"), summary.get("wall_step_ms")
    return host is not None and wall is not None and host > HOST_DECIDES * wall


def memory_of_run(records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes by component: the most that any process has recorded, past its warm-up."""
    most: dict[str, int] = {}
    for record in records:
        for key, gib in record.items():
            if key.startswith("memory/") and gib is not None:
                name = key.removeprefix("memory/").removesuffix("_gib")
                most[name] = max(most.get(name, 0), round(gib * GIB))
    return most


def wall_seconds_of_run(records: Sequence[Mapping[str, Any]]) -> float:
    """That the processes of these records took until the last one, without the time between processes."""
    return max((record.get("train/wall_seconds") or 0.0 for record in records), default=0.0)


def _total(records: Sequence[Mapping[str, Any]], name: str) -> float:
    """The sum over all steps of a mean over each record's steps."""
    return sum(record[name] * record["speed/measured_steps"] for record in records)


def _median(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Over steps, of the records that have the metric."""
    values = [value for r in records if name in r for value in [r[name]] * r["speed/measured_steps"]]
    return statistics.median(values) if values else None
