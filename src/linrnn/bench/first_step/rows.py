"""Rows of the benchmark of first steps: a line of JSON each in rows.jsonl, beside the commands in runs.jsonl."""

from dataclasses import dataclass
from pathlib import Path

from linrnn.bench.records import last_rows


@dataclass
class Row:
    """One run of train.py, from its command to the end of its first step.

    Attributes:
        line: of the configuration: overrides of train.py.
        run: id in runs.jsonl: one call of the benchmark, on one machine.
        number: its place among all runs of that call, from 1. Later runs find the machine's files in memory.
        seconds: from the start of the process to the line that it prints after its first step.
        seconds_to: of each stage, as `environment.json` records them, from an instant less than a second later.
        stored, near, first, tuned: kernels whose choice was stored, was stored for another batch, was not made (the
            first configuration ran), or was tuned in this run; null where no kernel has configurations.
    """

    line: str
    model: str
    size: str
    loss: str
    run: str
    number: int
    seconds: float
    seconds_to: dict[str, float]
    stored: int | None = None
    near: int | None = None
    first: int | None = None
    tuned: int | None = None

    def at(self, stage: str) -> float | None:
        """Seconds from the start of the process to the end of a stage; None if the run has no such stage."""
        if stage not in self.seconds_to:
            return None
        return self.seconds - self.seconds_to["first_step"] + self.seconds_to[stage]


def read_rows(directory: Path) -> list[Row]:
    """All rows, in the order in which they were measured.

    Raises:
        DataError: nothing was measured, or the file is damaged.
    """
    return last_rows(directory, Row, key=lambda row: (row.run, row.number))
