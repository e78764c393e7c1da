"""Measure how long runs take to the end of their first step: `python scripts/bench_first_step.py`."""

from linrnn.config.cli import run
from linrnn.config.schema import BenchFirstStepConfig


def main(config: BenchFirstStepConfig) -> None:
    from linrnn.bench.first_step.report import write_report
    from linrnn.bench.first_step.run import run_benchmark
    from linrnn.bench.records import results_directory
    from linrnn.core.output import say
    from linrnn.runs.environment import command_line

    if config.measure:
        run_benchmark(config, command_line(), say)
    directory = results_directory(config, "bench_first_step")
    say("wrote " + ", ".join(str(path) for path in write_report(directory, config.limit_seconds)))


if __name__ == "__main__":
    run(main, "bench_first_step", __doc__)
