"""Several GPUs against one, loss and whole steps: `torchrun --nproc-per-node=4 scripts/bench_parallel.py`."""

import shlex
import sys

from linrnn.config import load_config
from linrnn.config.cli import run
from linrnn.config.schema import BenchParallelConfig


def main(config: BenchParallelConfig) -> None:
    from linrnn.distributed import join
    from linrnn.parallel_benchmark import run_benchmark

    with join(load_config(["parallel=ddp"]).parallel, config.device) as ranks:
        nodes = f"torchrun --nproc-per-node={ranks.world_size}"
        path = run_benchmark(ranks, config, shlex.join([*nodes.split(), "scripts/bench_parallel.py", *sys.argv[1:]]))
        if path:
            print(path.read_text())
            print(f"wrote {path} and .json")


if __name__ == "__main__":
    run(main, "bench_parallel", __doc__)
