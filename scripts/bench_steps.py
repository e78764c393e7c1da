"""Measure training steps of our models, where the loss alone differs: `python scripts/bench_steps.py`."""

from linrnn.config.cli import run
from linrnn.config.schema import BenchStepsConfig


def main(config: BenchStepsConfig) -> None:
    from linrnn.bench.records import results_directory
    from linrnn.bench.steps.report import write_report
    from linrnn.bench.steps.rows import read_rows
    from linrnn.bench.steps.run import run_benchmark
    from linrnn.core.output import say
    from linrnn.runs.environment import command_line
    from linrnn.study.benchmarks.line_ratios import line_ratios

    if config.measure:
        run_benchmark(config, command_line(), say)
    directory = results_directory(config, "bench_steps")
    say("wrote " + ", ".join(str(path) for path in write_report(directory)))
    if config.compare_with is not None:
        say(f"divided by {config.compare_with}, unpaired rounds, Welch's 90 % intervals:")
        for line in line_ratios(read_rows(directory), config.compare_with).markdown():
            say(line)


if __name__ == "__main__":
    run(main, "bench_steps", __doc__)
