"""Measure time, memory and errors of the loss layer alone: `python scripts/bench_loss.py shapes=[mve]`."""

from linrnn.config.cli import run
from linrnn.config.schema import BenchLossConfig


def main(config: BenchLossConfig) -> None:
    from linrnn.bench.loss.run import report_set, run_benchmark
    from linrnn.core.output import say
    from linrnn.runs.environment import command_line

    if config.measure:
        run_benchmark(config, command_line(), say)
    say("wrote " + ", ".join(str(path) for path in report_set(config)))


if __name__ == "__main__":
    run(main, "bench_loss", __doc__)
