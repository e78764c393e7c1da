"""The runs of a group as a table, verdicts and plots: `python scripts/report.py group=mve`."""

from pathlib import Path

from linrnn.config.cli import run
from linrnn.config.schema import ReportConfig


def main(config: ReportConfig) -> None:
    from linrnn.report import write_report
    from linrnn.results import read_breakdowns, read_max_batches, read_runs

    results = Path(config.results_dir)
    output = Path(config.output_dir) if config.output_dir else results / "summaries" / config.group
    paths = write_report(
        read_runs(results / config.group),
        output,
        config.group,
        read_max_batches(results / config.max_batch_group),
        read_breakdowns(Path(config.breakdowns)),
    )
    print(paths[0].read_text(encoding="utf-8"))
    print("wrote " + ", ".join(str(path) for path in paths))


if __name__ == "__main__":
    run(main, "report", __doc__)
