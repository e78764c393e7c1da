"""Time, memory and errors of the loss layer alone: `python scripts/bench_loss.py shapes=[mve]`."""

import shlex
import sys

from linrnn.config.cli import run
from linrnn.config.schema import BenchLossConfig


def main(config: BenchLossConfig) -> None:
    from linrnn.loss_benchmark import run_benchmark

    run_benchmark(config, shlex.join(["python", "scripts/bench_loss.py", *sys.argv[1:]]), say=print)
    print(f"wrote {config.output}")


if __name__ == "__main__":
    run(main, "bench_loss", __doc__)
