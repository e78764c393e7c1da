"""List the runs of a group, and compare two: `python scripts/runs.py group=default [compare=[RUN,RUN]]`."""

from pathlib import Path

from linrnn.config.cli import run
from linrnn.config.schema import RunsConfig
from linrnn.core.errors import ConfigError


def main(config: RunsConfig) -> None:
    from linrnn.report.overview import compared, overview

    group = Path(config.results_dir) / config.group
    if len(config.compare) not in (0, 2):
        raise ConfigError(f"compare names {len(config.compare)} runs", "name two: compare=[RUN,RUN]")
    print("\n".join(compared(group, config.compare) if config.compare else overview(group)))


if __name__ == "__main__":
    run(main, "runs", __doc__)
