"""Run many runs, each in its own process, and skip finished ones: `python scripts/sweep.py sweep=mve`."""

from linrnn.config.cli import run_many
from linrnn.config.schema import RunSweepConfig
from linrnn.core.output import say


def main(config: RunSweepConfig, overrides: list[str], launcher: list[str]) -> None:
    from linrnn.experiments.sweep import run_sweep

    run_sweep(config, overrides, launcher, say)


if __name__ == "__main__":
    run_many(main, "run_sweep", __doc__)
