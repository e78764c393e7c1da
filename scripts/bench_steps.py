"""Measure training steps of our models, where the loss alone differs: `python scripts/bench_steps.py`."""

from linrnn.config.cli import run
from linrnn.config.schema import BenchStepsConfig


def main(config: BenchStepsConfig) -> None:
    from linrnn.bench.records import results_directory
    from linrnn.bench.steps.report import write_report
    from linrnn.bench.steps.run import run_benchmark
    from linrnn.core.output import say
    from linrnn.runs.environment import command_line

    if config.measure:
        run_benchmark(config, command_line(), say)
    say("wrote " + ", ".join(str(path) for path in write_report(results_directory(config, "bench_steps"))))


if __name__ == "__main__":
    run(main, "bench_steps", __doc__)
