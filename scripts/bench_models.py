"""Measure training steps of Hugging Face models with three losses: `python scripts/bench_models.py`."""

from linrnn.config.cli import run
from linrnn.config.schema import BenchModelsConfig


def main(config: BenchModelsConfig) -> None:
    from linrnn.bench.models.report import write_report
    from linrnn.bench.models.run import run_benchmark
    from linrnn.bench.records import results_directory
    from linrnn.core.output import say
    from linrnn.runs.environment import command_line

    if config.measure:
        run_benchmark(config, command_line(), say)
    say("wrote " + ", ".join(str(path) for path in write_report(results_directory(config, "bench_models"))))


if __name__ == "__main__":
    run(main, "bench_models", __doc__)
