"""How long a first call takes on a machine without compiled kernels: `python benchmarks/first_call.py [setting …]`.

Every measurement is a process of its own with an empty Triton cache. On a GPU it times forward and backward pass of the
first call, of the first call with another number of tokens, and of a call that compiles nothing. Without a GPU it
compiles the same kernels for an H100 and runs nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "kernels")]

SETTINGS: dict[str, dict[str, Any]] = {
    "exact": {},
    "filter": {"preset": "cce_filter"},
    "256MiB": {"workspace_mib": 256},
}
GPU = "cuda:0"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="setting", help=f"of {', '.join(SETTINGS)}; default: all")
    parser.add_argument("--tokens", type=int, nargs=2, default=(16384, 15000), help="of the first and the second call")
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--serial", action="store_true", help="compile one kernel after another, as Triton does")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process, one setting
    found = parser.parse_args(arguments)
    if unknown := set(found.settings) - SETTINGS.keys():
        parser.error(f"unknown setting {', '.join(unknown)}; choose from {', '.join(SETTINGS)}")
    return found


def main() -> None:
    options = parse()
    if options.here:
        print(json.dumps(measure(options)))
        return
    print(f"{'setting':10}{'call':>12}{'kernels':>9}{'seconds':>9}")
    for setting in options.settings or SETTINGS:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, *sys.argv[1:], "--here"]
            command = [word for word in command if word not in SETTINGS] + [setting]
            environment = {**os.environ, "TRITON_CACHE_DIR": cache}
            out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
        for call, kernels, seconds in json.loads(out.splitlines()[-1]):
            print(f"{setting:10}{call:>12}{kernels:9}{seconds:9.2f}")


def measure(options: argparse.Namespace) -> list[tuple[str, int, float]]:
    """(call, kernels that it compiled, seconds) of the setting's calls."""
    import torch
    from cce_kernels import linear_cross_entropy
    from cce_kernels.runtime import ahead
    from triton import knobs
    from triton.runtime import driver

    compiled: list[Any] = []
    knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about)
    if options.serial:
        ahead.MOST_KINDS, ahead.cores = 0, lambda: 1
    present = torch.cuda.is_available()
    if not present:
        driver.set_active(Hopper())

    def step(tokens: int, device: str) -> None:
        e, c = (
            torch.empty(n, options.dim, dtype=torch.bfloat16, device=device, requires_grad=True)
            for n in (tokens, options.vocab)
        )
        targets = torch.zeros(tokens, dtype=torch.int64, device=device)
        linear_cross_entropy(e, c, targets, **SETTINGS[options.settings[0]]).backward()

    def call(tokens: int) -> None:
        if present:
            step(tokens, GPU)
            torch.cuda.synchronize()
            return
        with ahead.rehearsal(torch.device(GPU)):
            step(tokens, "meta")

    if present:
        torch.ones(1, device=GPU).sum().item()  # CUDA has started
    first, second = options.tokens
    rows = []
    for name, tokens in (("first", first), ("other N", second), ("again", first)):
        before, start = len(compiled), time.perf_counter()
        call(tokens)
        rows.append((name, len(compiled) - before, time.perf_counter() - start))
    return rows


class Hopper:
    """What compiling for an H100 needs of a driver, where there is none."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


if __name__ == "__main__":
    main()
