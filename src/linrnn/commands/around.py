"""The commands around training: data, this machine, runs and reports."""

from pathlib import Path

from linrnn.config.schema import Config, ReportConfig, RunsConfig
from linrnn.core.errors import ConfigError
from linrnn.core.output import as_started


def doctor(config: Config) -> None:
    """Print what can run on this machine, what cannot, why, and what to install."""
    from linrnn.experiments.doctor import diagnose

    print(as_started(diagnose(config)))


def prepare_data(config: Config) -> None:
    """Tokenise data once, or check prepared data."""
    if config.dry_run:
        raise ConfigError("dry_run: this command prepares or checks data, it has no forecast", "drop dry_run=true")
    from linrnn.data import prepare

    data = prepare(config.data)
    data.verify()
    print(data.description)
    for name, split in (("training", data.train), ("validation", data.valid)):
        counts = [f"{split.n_documents:,} documents", f"{split.n_tokens:,} tokens"]
        if split.n_bytes:
            counts.insert(1, f"{split.n_bytes:,} bytes of text")
        print(f"  {name}: {', '.join(counts)}")
    print(f"  in {data.directory}, every file as its hash in meta.json says")


def report(config: ReportConfig) -> None:
    """Write a group's report in Markdown and HTML."""
    from linrnn.report.write import make_report

    paths = make_report(config)
    print(paths[0].read_text(encoding="utf-8"))
    print("wrote " + ", ".join(str(path) for path in paths))


def runs(config: RunsConfig) -> None:
    """List the runs of a group, compare two, or write all their metrics as CSV."""
    from linrnn.report.overview import compared, overview, write_csv

    group = Path(config.results_dir) / config.group
    if len(config.compare) not in (0, 2):
        raise ConfigError(f"compare names {len(config.compare)} runs", "name two: compare=[RUN,RUN]")
    if config.csv:
        print(f"wrote {config.csv}: {write_csv(group, Path(config.csv)):,} rows")
        return
    print("\n".join(compared(group, config.compare) if config.compare else overview(group)))
