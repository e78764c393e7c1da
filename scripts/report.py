"""Write a group's report in Markdown and HTML: `python scripts/report.py group=mve`."""

from linrnn.config.cli import run
from linrnn.config.schema import ReportConfig


def main(config: ReportConfig) -> None:
    from linrnn.report.write import make_report

    paths = make_report(config)
    print(paths[0].read_text(encoding="utf-8"))
    print("wrote " + ", ".join(str(path) for path in paths))


if __name__ == "__main__":
    run(main, "report", __doc__)
