"""Compare several GPUs with one, loss and whole steps: `torchrun --nproc-per-node=4 scripts/bench_parallel.py`."""

from pathlib import Path

from linrnn.config import load_config
from linrnn.config.cli import run
from linrnn.config.schema import BenchParallelConfig
from linrnn.core.errors import ConfigError


def main(config: BenchParallelConfig) -> None:
    from linrnn.bench.parallel.report import write_pages
    from linrnn.bench.parallel.run import run_benchmark
    from linrnn.distributed import Launch, join
    from linrnn.runs.environment import command_line

    if config.measure:
        if not Launch.from_environment().launched:
            raise ConfigError(
                "this process was not started by torchrun",
                "use torchrun --nproc-per-node=N scripts/bench_parallel.py …, or measure=false to rewrite the pages",
            )
        parallel = load_config(["parallel=ddp", f"parallel.timeout_seconds={config.timeout_seconds}"]).parallel
        with join(parallel, config.device) as ranks:
            pages = run_benchmark(ranks, config, command_line())
    else:
        pages = write_pages(Path(config.output_dir))
    for path in pages:
        if path.suffix == ".md":
            print(path.read_text(encoding="utf-8"))
        print(f"wrote {path}")


if __name__ == "__main__":
    run(main, "bench_parallel", __doc__)
