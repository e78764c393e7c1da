"""Which process trained which steps of a run: environment.json has an entry for every process that trained some.

    {"processes": [{…}, …]}    each entry as `linrnn.runs.environment.describe_process` begins it

`from_step` and `to_step` count optimizer steps done. `ended` and `to_step` are null while a process runs, and stay null
if it is killed. The next process begins at a checkpoint; steps that an earlier process trained after it are lost.
:func:`settled` removes them from the record. The entries then cover the run's steps once, in order.
"""

import json
from pathlib import Path
from typing import Any

from linrnn.core.dates import utc_now
from linrnn.core.errors import DataError

Process = dict[str, Any]


def settled(processes: list[Process], step: int) -> list[Process]:
    """The entries of earlier processes when a new one begins at `step`: each with the steps that remain, if any."""
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
    """The entries of an environment.json; none if there is no file.

    Raises:
        DataError: another version wrote the file, or it is damaged.
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
