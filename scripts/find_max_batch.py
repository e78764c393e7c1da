"""Find the largest batch for a memory budget: `python scripts/find_max_batch.py model=gla size=1b3 loss=cce_kahan`."""

from linrnn.config.cli import run_many
from linrnn.config.schema import FindMaxBatchConfig
from linrnn.core.output import say


def main(config: FindMaxBatchConfig, overrides: list[str]) -> None:
    from linrnn.experiments.max_batch import find_max_batch

    find_max_batch(config, overrides, say)


if __name__ == "__main__":
    run_many(main, "find_max_batch", __doc__, only_here="the probes of a search run on this machine")
