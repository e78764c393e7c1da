"""Where a run's steps come from: environment.json has an entry for every process that trained some of them.

    {"processes": [{…}, …]}    each as `linrnn.runs.environment.describe_process` begins it

`from_step` and `to_step` count optimizer steps done; `ended` and `to_step` are null while a process runs, and stay so
when it is killed. The process after it begins at a checkpoint: steps that an earlier one trained beyond that are gone,
and :func:`settled` takes them out of the record. The entries then cover the run's steps once, in order.
"""

import json
from pathlib import Path
from typing import Any

from linrnn.core.dates import utc_now
from linrnn.core.errors import DataError

Process = dict[str, Any]


def settled(processes: list[Process], step: int) -> list[Process]:
    """Earlier processes, once another one begins at `step`: with the steps that are left of each, if any."""
    kept = []
    for process in processes:
        to_step = step if process["to_step"] is None else min(process["to_step"], step)
        if process["from_step"] < to_step:
            kept.append({**process, "to_step": to_step})
    return kept


def ended(process: Process, step: int) -> Process:
    """The entry of a process that ends after `step`."""
    return {**process, "ended": utc_now(), "to_step": step}


def read_processes(path: Path) -> list[Process]:
    """The entries of an environment.json; none where there is no file.

    Raises:
        DataError: the file was not written by this version, or is damaged.
    """
    if not path.exists():
        return []
    try:
        processes = json.loads(path.read_text(encoding="utf-8"))["processes"]
        if not isinstance(processes, list):
            raise TypeError
        return processes
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read as the record of a run's processes",
            "it is damaged or of an earlier version: move the run's directory away",
        ) from error
