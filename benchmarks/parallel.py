"""Compare training steps on several GPUs with steps on one: `torchrun --nproc-per-node=4 benchmarks/parallel.py`.

Every figure of several GPUs stands beside the same work on one GPU, where all ranks work at once, each for itself. It
comes just before, in every repeat. Times are medians of the slowest rank's times.
"""

import copy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.problems import time_ms
from benchmarks.training_step import TrainingStep, random_batch
from linrnn.config import cli, load_config
from linrnn.config.schema import COMMANDS, Config, option
from linrnn.core.errors import ConfigError, UnsupportedError, ran_out_of_memory
from linrnn.core.machine import GIB
from linrnn.core.output import say
from linrnn.core.tables import show
from linrnn.distributed import DistributedRanks, Launch, Ranks, join, under
from linrnn.losses import build_loss
from linrnn.models import build_model
from linrnn.models.architecture import resolve
from linrnn.models.language_model import compute_dtype, parameter_dtype
from linrnn.runs.intervals import estimate
from linrnn.training.optimizer import build_optimizer
from linrnn.training.runtime import resolve_device, resolve_precision, synchronize


@dataclass
class BenchConfig(common.Keys):
    """Keys of the command line."""

    models: list[str] = option(["gla/350m", "gla/1b3"], "model/size of training steps")
    weak: list[str] = option(
        ["ddp", "fsdp", "vocab"],
        "values of parallel with their options, as in 'fsdp blocks_together=4 keep_gathered=true'; each rank has "
        "batch_size sequences",
    )
    batch_size: int = option(8, "sequences of each rank", minimum=1)
    seq_len: int = option(2048, "tokens per sequence", minimum=2)
    steps: int = option(4, "training steps timed together; this is done three times", minimum=1)
    repeats: int = option(
        1, "times that all training steps are measured again; from 5 on the interval decides", minimum=1
    )
    warmup: int = option(3, "steps before the measured ones, which tune kernels", minimum=1)
    timeout_seconds: float = option(300.0, "s that a rank waits for other ranks before all end", minimum=1, maximum=1e8)
    cuda_graph: bool = option(False, "true: every step replays a CUDA graph (trainer.cuda_graph); not for ddp")


COMMANDS["bench_parallel"] = BenchConfig


# ----------------------------------------------------------------------------------------------------------- rows
@dataclass
class StepRow:
    """Training steps of a model in one repeat."""

    model: str
    size: str
    vocab_size: int
    precision: str
    parallel: str  # with its options
    scaling: str  # alone (each rank by itself) | weak (each rank keeps its sequences) | strong (they shared them)
    ranks: int
    sequences_of_rank: int
    seq_len: int
    step_ms: float
    efficiency: float | None  # tokens/s against as many GPUs alone, in this repeat, with the sequences of `weak`
    gib: float | None  # peak memory of the rank that holds most; null on a CPU
    gib_is_own: bool = True  # false: FSDP's row comes after DDP's, and lacks DDP's gradients that NCCL still held
    cuda_graph: bool = False
    host_ms: float | None = None  # in which the slowest rank's host issues a step to an idle GPU
    repeat: int = 1
    run: str = ""

    status: ClassVar[str] = "ok"

    @property
    def method(self) -> str:
        return f"{self.parallel}, CUDA graph" if self.cuda_graph else self.parallel

    @property
    def tokens_per_second(self) -> float:
        return self.ranks * self.sequences_of_rank * self.seq_len / self.step_ms * 1e3

    @property
    def memory(self) -> str:
        """GiB. A row of FSDP that lacks DDP's gradients shows a lower bound."""
        return ("≥ " if self.parallel == "fsdp" and not self.gib_is_own and self.gib else "") + show(self.gib, ".1f")


def read_steps(directory: Path) -> list[StepRow]:
    """Every repeat of every setting."""
    return common.last_rows(directory, StepRow, key=lambda row: (*_setting(row), row.repeat))


def _setting(row: StepRow) -> tuple[Any, ...]:
    size = row.model, row.size, row.ranks, row.sequences_of_rank, row.seq_len
    return (row.run, *size, row.method, row.scaling)


# ------------------------------------------------------------------------------------------------------ measuring
def _times(count: int, action: Callable[[], object]) -> None:
    for _ in range(count):
        action()


def _slowest(ranks: DistributedRanks, action: Callable[[], object], device: torch.device) -> float:
    """Time in ms of the slowest rank. All ranks begin together."""
    ranks.sum_on_host(0)
    return ranks.max_on_host(time_ms(action, device))[0]


def _slowest_host(ranks: DistributedRanks, action: Callable[[], object], device: torch.device) -> float:
    """Time in ms in which the slowest rank's host calls `action`. The device is idle before, and not waited for."""
    synchronize(device)
    ranks.sum_on_host(0)
    begun = time.perf_counter()
    action()
    return ranks.max_on_host(1e3 * (time.perf_counter() - begun))[0]


def measure_steps(
    ranks: DistributedRanks, name: str, config: BenchConfig, device: torch.device, tell: Callable[[str], None]
) -> Iterator[StepRow]:
    """Steps of a model (`gla/350m`) on one GPU, and with every way to parallelize it.

    Every repeat measures all of them once more, so that each efficiency compares times of one repeat.
    """
    model_name, size = name.split("/")
    run: Config = load_config([f"model={model_name}", f"size={size}", "loss=cce_kahan"])
    arch = resolve(run.model, run.size, run.size.vocab_size or 32000)
    precision = resolve_precision(run.trainer.precision, device)
    with device:  # draws weights faster than a CPU; their values change no time
        model = build_model(arch, device=device, dtype=parameter_dtype(precision), seed=0)
    for repeat in range(1, config.repeats + 1):
        alone: StepRow | None = None  # of this repeat
        for mode in ("none", *config.weak):
            try:
                row = _measure_mode(ranks, model, run, precision, mode, config, device)
            except (RuntimeError, MemoryError) as error:
                if not ran_out_of_memory(error):
                    raise
                tell(f"{name} {mode}: out of memory")
                continue
            finally:
                common.free(device)
            row.repeat = repeat
            if mode == "none":
                alone = row
            elif alone is not None:
                row.efficiency = alone.step_ms / row.step_ms
            yield row


def _measure_mode(
    ranks: DistributedRanks, model: Any, run: Config, precision: str, mode: str, config: BenchConfig,
    device: torch.device,
) -> StepRow:  # fmt: skip
    """Steps of a copy of `model`."""
    arch, sequences = model.arch, config.batch_size
    beside = sum(parameter.nbytes for parameter in model.parameters())  # the model itself, while its copy trains
    model = copy.deepcopy(model)
    sharing, world = (Ranks(), 1) if mode == "none" else (under(_parallel(mode), *ranks.joined), ranks.world_size)
    replica = sharing.parallelize(model, compute_dtype(precision))
    loss = build_loss(run.loss, device=device, vocabulary=sharing.vocabulary(arch.vocab_size))
    optimizer = build_optimizer(model, run.optimizer, device)
    batch = random_batch(sequences, config.seq_len, arch.vocab_size, seed=ranks.rank)
    step_of = TrainingStep(
        model, optimizer, batch, tokens=sequences * config.seq_len * world, precision=precision, device=device,
        max_grad_norm=run.optimizer.max_grad_norm, replica=replica, ranks=sharing,
    )  # fmt: skip
    train_step: Callable[[], None] = partial(step_of, loss)
    _times(config.warmup, train_step)
    synchronize(device)
    # DDP does not wait for its reductions by their handles. ProcessGroupNCCL therefore holds the gradients of the row
    # before. It releases them at its next call after its watchdog has seen the last reduction end.
    dist.all_reduce(torch.zeros((), device=device))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if config.cuda_graph:
        train_step = step_of.graphed(loss)
        train_step()  # captures the passes, with the memory of a step
    several = partial(_times, config.steps, train_step)
    ms = median(_slowest(ranks, several, device) / config.steps for _ in range(3))
    host_ms = median(_slowest_host(ranks, train_step, device) for _ in range(config.steps))
    peak = (torch.cuda.max_memory_allocated(device) - beside) / GIB if device.type == "cuda" else 0.0
    scaling = "alone" if mode == "none" else "weak"
    return StepRow(
        arch.model, arch.size, arch.vocab_size, precision, mode, scaling, world, sequences, config.seq_len, ms, None,
        ranks.max_on_host(peak)[0] or None, cuda_graph=config.cuda_graph, host_ms=host_ms,
    )  # fmt: skip


def _parallel(text: str) -> Any:
    name, *options = text.split()
    return load_config([f"parallel={name}", *(f"parallel.{option}" for option in options)]).parallel


# ----------------------------------------------------------------------------------------------------------- page
def in_one(rows: list[StepRow]) -> StepRow:
    """The repeats of a setting, with the medians of their times."""
    hosts = [row.host_ms for row in rows if row.host_ms is not None]
    step_ms, host_ms = median(row.step_ms for row in rows), median(hosts) if hosts else None
    return replace(rows[0], step_ms=step_ms, host_ms=host_ms)


def efficiency_of(rows: list[StepRow]) -> str:
    """The median; from two repeats on with its 90 % interval and their number."""
    own = [row.efficiency for row in rows if row.efficiency]
    found = estimate(own, ratios=True) if own else None
    if found is None or found.low is None:
        return show(None if found is None else found.value, ".2f")
    return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f}), n = {found.n}"


def write_report(directory: Path) -> list[Path]:
    """Write steps.md; returns its path."""
    repeats = {_setting(own[0]): own for own in common.grouped(read_steps(directory), key=_setting)}
    sections = {own[0].run: own for own in common.grouped(list(map(in_one, repeats.values())), key=lambda row: row.run)}
    columns: common.Columns = {
        "model": lambda row: f"{row.model} {row.size}",
        "parallel": lambda row: row.method,
        "scaling": lambda row: row.scaling,
        "GPUs": "ranks:d",
        "B of a rank": "sequences_of_rank:d",
        "ms": "step_ms:.0f",
        "CPU ms": "host_ms:.0f",
        "tokens/s": "tokens_per_second:,.0f",
        "efficiency": lambda row: efficiency_of(repeats[_setting(row)]),
        "GiB": lambda row: row.memory,
    }
    return common.write_report(directory, "steps", "Training steps", sections, columns)


# -------------------------------------------------------------------------------------------------------- the whole
def run_benchmark(ranks: DistributedRanks, config: BenchConfig) -> None:
    """Measure. Rank 0 writes every row."""
    for text in config.weak:
        _parallel(text)  # a wrong option is refused before anything is measured
    if config.cuda_graph and any(text.split()[0] == "ddp" for text in config.weak):
        raise ConfigError("cuda_graph=true: training refuses CUDA graphs with parallel=ddp", "use weak=[fsdp,vocab]")
    device = resolve_device(config.device)
    if config.cuda_graph and device.type != "cuda":
        raise UnsupportedError("cuda_graph=true needs GPUs, and these ranks are on the CPU", "use cuda_graph=false")
    record = common.Record(config, "bench_parallel") if ranks.is_first else None

    def tell(line: str) -> None:
        if record is not None:
            say(line)

    for name in config.models:
        for row in measure_steps(ranks, name, config, device, tell):
            told = f"{row.step_ms:.1f} ms, host {show(row.host_ms, '.1f')}, efficiency {show(row.efficiency, '.3f')}"
            tell(f"{name} {row.parallel}: {told}")
            if record is not None:
                row.run = record.id
                record.add(row)


def main(config: BenchConfig) -> None:
    if config.measure:
        if Launch.from_environment().world_size < 2:
            raise ConfigError(
                "torchrun has not started several processes",
                "use torchrun --nproc-per-node=N benchmarks/parallel.py …, N of 2 or more, or measure=false to rewrite "
                "the page",
            )
        parallel = load_config(["parallel=ddp", f"parallel.timeout_seconds={config.timeout_seconds}"]).parallel
        with join(parallel, config.device) as ranks:
            assert isinstance(ranks, DistributedRanks)
            run_benchmark(ranks, config)
            if not ranks.is_first:
                return
    say("wrote " + ", ".join(map(str, write_report(common.results_directory(config, "bench_parallel")))))


if __name__ == "__main__":
    cli.run(main, "bench_parallel", __doc__)
