"""Print what can run on this machine, what cannot, why, and what to install: `python scripts/doctor.py`."""

from linrnn.config.cli import run
from linrnn.config.schema import Config


def main(config: Config) -> None:
    from linrnn.experiments.doctor import diagnose

    print(diagnose(config))


if __name__ == "__main__":
    run(main, description=__doc__)
