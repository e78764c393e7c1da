"""64 to 1,024 GPUs on paper, at the rates in results/bench_parallel: writes results/scale_out.md."""

from pathlib import Path

from linrnn.config.cli import run_plain


def main() -> None:
    from linrnn.bench.parallel.report import read
    from linrnn.bench.parallel.scale_out import page

    results = Path(__file__).resolve().parents[2] / "results"
    path = results / "scale_out.md"
    path.write_text(page(read(results / "bench_parallel")) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    run_plain(main, __doc__ or "")
