"""Train one model with one loss backend: `python train.py model=gla loss=cce_kahan size=mve data=stdlib`."""

from linrnn.config.bounds import check_outputs
from linrnn.config.cli import run
from linrnn.config.schema import Config


def main(config: Config) -> None:
    if not config.dry_run:
        check_outputs(config)
    # Imported here, because torch takes seconds: --help and wrong keys answer at once.
    from linrnn.distributed import join

    with join(config.parallel, config.device) as ranks:
        if not config.dry_run:
            from linrnn.training.trainer import Trainer

            Trainer(config, ranks).fit()
        elif ranks.is_first:
            from linrnn.experiments.dry_run import print_forecast

            print_forecast(config)


if __name__ == "__main__":
    run(main, description=__doc__)
