"""Every step of a run has one origin, however the run's processes ended."""

from pathlib import Path
from typing import Any

import pytest

from linrnn.core.errors import DataError
from linrnn.runs.provenance import ended, read_processes, settled


def process(from_step: int, to_step: int | None) -> dict[str, Any]:
    return {"from_step": from_step, "to_step": to_step, "ended": None if to_step is None else "2026-01-01"}


def spans(processes: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(each["from_step"], each["to_step"]) for each in processes]


@pytest.mark.parametrize(
    ("earlier", "step", "left"),
    [
        ([(0, 30)], 30, [(0, 30)]),
        ([(0, None)], 20, [(0, 20)]),  # killed: what its last checkpoint has
        ([(0, 30)], 20, [(0, 20)]),  # it went on after that checkpoint, and those steps are trained again
        ([(0, None)], 0, []),  # no checkpoint: none of its steps is left
        ([(0, 20), (20, None)], 20, [(0, 20)]),  # killed before its first checkpoint
        ([(0, 20), (20, 30)], 10, [(0, 10)]),  # newer checkpoints are damaged
        ([(0, 20), (20, 30)], 25, [(0, 20), (20, 25)]),
    ],
)
def test_earlier_processes_keep_the_steps_that_are_left_of_each(
    earlier: list[tuple[int, int | None]], step: int, left: list[tuple[int, int]]
) -> None:
    kept = settled([process(*span) for span in earlier], step)
    assert spans(kept) == left
    assert [each["ended"] for each in kept] == [process(*span)["ended"] for span in earlier[: len(kept)]]


def test_the_end_of_a_process_is_a_date_and_a_step() -> None:
    after = ended(process(3, None), 9)
    assert spans([after]) == [(3, 9)]
    assert after["ended"].endswith("+00:00")


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"processes": 3}', '{"torch": "2.11"}'])
def test_a_record_of_another_kind_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    assert read_processes(path) == []
    path.write_text(content)
    with pytest.raises(DataError, match="cannot be read as the record of a run's processes"):
        read_processes(path)
