"""Measure time, memory and errors of the loss layer alone: `python scripts/bench_loss.py shapes=[mve]`."""

import shlex
import sys

from linrnn.config.cli import run
from linrnn.config.schema import BenchLossConfig


def main(config: BenchLossConfig) -> None:
    from linrnn.bench.loss.run import report_set, run_benchmark

    if config.measure:
        run_benchmark(config, shlex.join(["python", "scripts/bench_loss.py", *sys.argv[1:]]), say=print)
    print("wrote " + ", ".join(str(path) for path in report_set(config)))


if __name__ == "__main__":
    run(main, "bench_loss", __doc__)
