"""Show which kernels the loss layer spends its time in: `python scripts/maintain/profile_loss.py`.

Rows and tables go to results/bench_loss/<gpu>/profile.jsonl and profile.md, in place of earlier ones.

    shapes=4096x7168x129280,512x4096x128256 losses="compiled,cce_kahan,cce_kahan workspace_mib=256,nothing"
    logits=peaked results_dir=results device=auto
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import torch

from linrnn.bench.loss.kernel_profile import HOST, STEP, profiled, write
from linrnn.bench.loss.problems import KINDS
from linrnn.bench.records import named_values
from linrnn.core.errors import LinrnnError
from linrnn.core.machine import slug
from linrnn.runs.environment import describe_environment
from linrnn.training.runtime import resolve_device

SHAPES = (  # where cce_kahan misses its targets, and one where it meets them
    "4096x7168x129280", "4096x8192x128256", "3001x2880x201088", "2048x2048x32000", "1536x8192x32000",
    "512x4096x128256", "1024x2048x50304", "mve", "llama_1b3",
)  # fmt: skip
DEFAULTS = {
    "shapes": ",".join(SHAPES),
    "losses": "compiled,cce_kahan,cce_kahan workspace_mib=256,nothing", "logits": "peaked", "results_dir": "results",
    "device": "auto",
}  # fmt: skip


def main(arguments: list[str]) -> None:
    values = named_values(arguments, DEFAULTS, __doc__)
    if values["logits"] not in KINDS:
        raise SystemExit(f"logits={values['logits']}: choose from {', '.join(KINDS)}")
    try:
        device = resolve_device(values["device"])
    except LinrnnError as error:
        raise SystemExit(str(error)) from error
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    command = shlex.join(["python", "scripts/maintain/profile_loss.py", *arguments])
    run = {"command": command, "device": name, "environment": describe_environment()}
    rows = []
    try:
        for row in profiled(values["shapes"].split(","), values["losses"].split(","), values["logits"], device):
            if row.kernel == STEP:
                print(f"{row.shape}, {row.loss}: {row.ms:.2f} ms, {row.products:.2f} products", flush=True)
            elif row.kernel in HOST:
                print(f"  {row.kernel}: {row.ms:.2f} ms", flush=True)
            rows.append(row)
    except LinrnnError as error:
        raise SystemExit(str(error)) from error
    finally:  # a crash of the device loses no row
        if rows:
            paths = write(Path(values["results_dir"]) / "bench_loss" / slug(name), rows, run)
            print("wrote " + ", ".join(str(path) for path in paths))


if __name__ == "__main__":
    main(sys.argv[1:])
