"""Certify the loss's errors against fp64: `python scripts/maintain/certify_loss.py`.

Each shape x dtype x option of cce_kernels.linear_cross_entropy becomes a row of one table, the worst ratio first. Rows,
table and runs go to results/certificate/<gpu>/. Runs add up. Stops after `seconds`, and says what is left.

    shapes=257x203x5003,mve options="plain,half ignored" dtypes=bf16,fp16,fp32 seconds=140
    results_dir=results device=auto
"""

from __future__ import annotations

import datetime
import shlex
import sys
from pathlib import Path

import torch
from cce_kernels import linear_cross_entropy

from linrnn.bench.loss.certificate import CALLS, DTYPES, SHAPES, calls_of, certified, write
from linrnn.bench.loss.problems import parse_shape
from linrnn.bench.records import named_values
from linrnn.core.errors import LinrnnError
from linrnn.core.machine import slug
from linrnn.runs.environment import describe_environment
from linrnn.training.runtime import resolve_device

DEFAULTS = {
    "shapes": ",".join(shape.name for shape in SHAPES), "options": ",".join(CALLS), "dtypes": ",".join(DTYPES),
    "seconds": "140", "results_dir": "results", "device": "auto",
}  # fmt: skip


def main(arguments: list[str]) -> None:
    values = named_values(arguments, DEFAULTS, __doc__)
    options, dtypes = values["options"].split(","), values["dtypes"].split(",")
    try:
        seconds, device = float(values["seconds"]), resolve_device(values["device"])
        shapes = [parse_shape(name) for name in values["shapes"].split(",")]
    except ValueError as error:
        raise SystemExit(f"seconds={values['seconds']}: give a number") from error
    except LinrnnError as error:
        raise SystemExit(str(error)) from error
    if wrong := [name for name in options if name not in CALLS] + [name for name in dtypes if name not in DTYPES]:
        raise SystemExit(f"unknown: {', '.join(wrong)}; known: {', '.join((*CALLS, *DTYPES))}")
    calls = calls_of(shapes, options, dtypes)
    now = datetime.datetime.now(datetime.UTC)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    command = shlex.join(["python", "scripts/maintain/certify_loss.py", *arguments])
    run_id = f"{now:%Y%m%dT%H%M%S.%f}"
    run = {"id": run_id, "command": command, "device": name, "environment": describe_environment()}
    rows = []
    try:
        for row in certified(linear_cross_entropy, calls, device, run_id, seconds, print):
            rows.append(row)
    finally:  # a crash of the device loses no row
        if rows:
            paths = write(Path(values["results_dir"]) / "certificate" / slug(name), rows, run)
            print("wrote " + ", ".join(str(path) for path in paths))


if __name__ == "__main__":
    main(sys.argv[1:])
