"""Tune FLA's kernels for this GPU and store the choices: `python scripts/tune.py models=[gla] sizes=[350m]`."""

from linrnn.config.cli import run_many
from linrnn.config.schema import TuneConfig
from linrnn.core.output import say


def main(config: TuneConfig, overrides: list[str]) -> None:
    from linrnn.experiments.tuning import tune

    tune(config, overrides, say)


if __name__ == "__main__":
    run_many(main, "tune", __doc__, only_here="kernels are tuned on this machine")
