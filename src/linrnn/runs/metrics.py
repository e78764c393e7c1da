"""Metrics: their names and units, the arithmetic behind them, and metrics.jsonl, a run's source of truth."""

import errno
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from linrnn.core.dates import utc_now
from linrnn.core.errors import DataError
from linrnn.core.files import storing, whole_lines, write_bytes

# Every metric with its description and unit. A loss backend's own metrics (from rank 0's last micro-step) are named
# `loss/…` and are not listed here.
METRICS: dict[str, str] = {
    "train/loss_nats": "mean cross-entropy of the step's tokens, nats per token",
    "train/grad_norm": "global L2 norm of the gradients before clipping",
    "train/lr": "learning rate of the step",
    "train/tokens": "tokens trained on since step 0, all ranks",
    "train/epoch": "passes over the training data, fractional",
    "train/wall_seconds": "seconds that the run has taken, all its processes, without the time between processes",
    "speed/tokens_per_second": "tokens of the measured steps since the last record / wall-clock time, all ranks",
    "speed/wall_step_ms": "wall-clock time of such a step, what the CPU does between steps included, milliseconds",
    "speed/step_ms": "the device's time of such a step, all its micro-steps, milliseconds",
    "speed/loss_forward_ms": "the device's time in the output layer's forward passes of such a step, milliseconds",
    "speed/loss_backward_ms": "the same of its backward passes, milliseconds",
    "speed/measured_steps": "such steps: those since the last record that are past the process's warm-up",
    "speed/mfu": "FLOPs per second that the model's definition needs / the devices' peak, share of 1",
    "memory/peak_gib": "most memory allocated at once since the warm-up (as all of these: of the rank with most), GiB",
    "memory/parameters_gib": "parameters, GiB",
    "memory/gradients_gib": "gradients, GiB",
    "memory/optimizer_gib": "optimizer state, GiB",
    "memory/activations_gib": "all else that is allocated when the output layer begins, GiB",
    "memory/loss_forward_gib": "most that the output layer's forward adds to that, GiB",
    "memory/loss_backward_gib": "most that the output layer's backward adds to that, GiB",
    "memory/resident_peak_gib": "most memory the process held at once (CPU), GiB",
    "valid/loss_nats": "mean cross-entropy of the validation tokens, nats per token",
    "valid/perplexity": "exp(valid/loss_nats)",
    "valid/bits_per_byte": "cross-entropy of these tokens in bits per byte of the text that they stand for",
    "valid/tokens": "validation tokens read",
}
LOSS_GROUP = "loss/"
DATE = "time"  # when a record was written: ISO 8601, UTC


def perplexity(nats_per_token: float) -> float:
    """exp(nats); infinity if that exceeds a double, NaN for NaN."""
    return math.inf if nats_per_token > 709 else math.exp(nats_per_token)


def bits_per_byte(nats: float, n_bytes: float) -> float | None:
    """Cross-entropy in bits per byte, comparable between tokenizers, of a text with `n_bytes` and `nats` in total."""
    return nats / (math.log(2) * n_bytes) if n_bytes else None


class JsonlWriter:
    """Appends one line of strict JSON per record to metrics.jsonl. A line has left the process when `write` returns.

    A last line that was cut off (the process was killed, the disk was full) is dropped when the file is opened.

    Raises:
        StorageError: the file cannot be opened or written.
        DataError: a whole line is no record of metrics.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._keep(lambda record: True)

    def write(self, record: Mapping[str, float | int | None]) -> None:
        """Append `record`: metrics by name, and `step`, the number of optimizer steps done.

        The line also gets the date as `time`. NaN and infinities become null, because strict JSON cannot express them.

        Raises:
            ValueError: the record has no `step`, or a name that is neither in METRICS nor a loss backend's own
                (`loss/…`).
            StorageError: the line cannot be written.
        """
        if "step" not in record:
            raise ValueError("a record needs its step")
        if unknown := [name for name in record if name not in {"step", *METRICS} and not name.startswith(LOSS_GROUP)]:
            raise ValueError(f"unknown metrics {unknown}: add them to METRICS with their unit")
        values = {**{name: finite(value) for name, value in record.items()}, DATE: utc_now()}
        line = (json.dumps(values, allow_nan=False) + "\n").encode()
        with storing(self.path):
            if (written := self._file.write(line)) < len(line):
                self._file.truncate(self._file.tell() - written)
                raise OSError(errno.ENOSPC, "no space left")

    def truncate_after(self, step: int, *, keep_validation: bool = True) -> None:
        """Drop every record after `step`, so that a run resumed from `step` writes none twice.

        Args:
            keep_validation: False also drops the validation of `step`, because the run will repeat it.
        """
        self.close()
        self._keep(
            lambda record: (
                record["step"] < step
                or (record["step"] == step and (keep_validation or "valid/loss_nats" not in record))
            )
        )

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()

    def _keep(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Open the file with some of its whole lines. A kill loses nothing."""
        if self.path.exists():
            lines = b"".join(line for line, record in _records(self.path) if keep(record))
            with storing(self.path):
                if len(lines) != self.path.stat().st_size:
                    write_bytes(self.path, lines)
        with storing(self.path):
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  close() closes it


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Every whole record of a metrics file, oldest first. A last line that was cut off is left out.

    Raises:
        DataError: the file is missing, or a whole line is no record of metrics.
    """
    return [record for _, record in _records(path)]


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Every whole line of a metrics file, and the record that it holds."""
    try:
        lines = whole_lines(path.read_bytes()).splitlines(keepends=True)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})", "check the path and permissions") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or "step" not in record:
            cause = f"{path}, line {number} is not a record of metrics"
            raise DataError(cause, "repair the line or move the file aside")
        yield line, record


def finite(value: float | int | None) -> float | int | None:
    """`value`; None for NaN and infinities, which strict JSON cannot express."""
    return value if value is not None and math.isfinite(value) else None
