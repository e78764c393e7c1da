"""Draw the pictures of README and docs from committed rows: `python scripts/maintain/figures.py`."""

from linrnn.config import CONFIG_DIR
from linrnn.config.cli import run_plain


def main() -> None:
    from study.pictures import draw

    results = CONFIG_DIR.parent / "results"
    for path in draw(results, results / "figures"):
        print(f"wrote {path.relative_to(results.parent)}")


if __name__ == "__main__":
    run_plain(main, __doc__ or "")
