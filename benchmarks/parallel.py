"""Compare several GPUs with one, loss and whole steps: `torchrun --nproc-per-node=4 benchmarks/parallel.py`.

Every figure of several GPUs stands beside the same work on one GPU. There all ranks work at once, each for itself. For
the loss these rounds alternate with the rounds of all ranks together. For steps they come just before, in every repeat.
Times are medians of the slowest rank's times.
"""

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.problems import Problem, make_problem, parse_shape, peak_bytes, relative_error, step, time_ms
from benchmarks.training_step import TrainingStep, random_batch
from linrnn import costs
from linrnn.config import cli, load_config
from linrnn.config.compose import add_command
from linrnn.config.schema import Config, option
from linrnn.core.errors import ConfigError, DataError, UnsupportedError, ran_out_of_memory
from linrnn.core.files import write_json, write_text
from linrnn.core.machine import GIB, slug
from linrnn.core.output import say
from linrnn.core.tables import show
from linrnn.distributed import DistributedRanks, Launch, Ranks, join, under
from linrnn.distributed.sharding import all_gather, reduce_scatter
from linrnn.losses import LossBackend, build_loss
from linrnn.models import build_model
from linrnn.models.architecture import resolve
from linrnn.models.facts import model_in_words
from linrnn.models.language_model import compute_dtype, parameter_dtype
from linrnn.runs.environment import command_line, describe_environment
from linrnn.runs.intervals import Estimate, estimate
from linrnn.training.optimizer import build_optimizer
from linrnn.training.runtime import device_name, resolve_device, resolve_precision, synchronize

MIB = 2**20
FP32 = 4
SHARDED = ("fsdp", "vocab")
UNITS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times that a rank sends (W − 1) / W of the tensor
LATENCY_CALLS = 20  # of a collective of one number a rank, between two looks at the clock


@dataclass
class BenchConfig:
    """Keys of the command line."""

    measure: bool = option(True, "false: only write the pages again from the existing files, without torchrun")
    collective_mib: list[int] = option(
        [0, 64, 1024], "MiB in all-reduce, all-gather and reduce-scatter; 0: one number per rank; []: none"
    )
    losses: list[str] = option(
        ["llama_1b3", "gemma2_2b"], "shapes of the loss: gemma2_2b | llama_1b3 | mve | lm_350m | NxDxV; []: none"
    )
    models: list[str] = option(["gla/350m", "gla/1b3"], "model/size of training steps; []: none")
    weak: list[str] = option(
        ["ddp", "fsdp", "vocab"], "values of parallel for weak scaling: batch_size sequences on each rank"
    )
    strong: list[str] = option(
        ["ddp", "fsdp"], "values of parallel for strong scaling: batch_size sequences on all ranks together"
    )
    batch_size: int = option(8, "sequences", minimum=1)
    seq_len: int = option(2048, "tokens per sequence", minimum=2)
    rounds: int = option(15, "timed calls of the loss; times are medians", minimum=1)
    steps: int = option(4, "training steps timed together; this is done three times", minimum=1)
    repeats: int = option(
        1, "times that all training steps are measured again; from 5 on the interval decides", minimum=1
    )
    warmup: int = option(3, "calls and steps before the measured ones, which tune kernels", minimum=1)
    device: str = option(
        "auto", "auto (GPUs with NCCL if there are any) | cpu (gloo) | cuda", choices=("auto", "cpu", "cuda")
    )
    timeout_seconds: float = option(300.0, "s that a rank waits for other ranks before all end", minimum=1, maximum=1e8)
    blocks_together: int = option(1, "parallel.blocks_together of fsdp and vocab", minimum=1)
    keep_gathered: bool = option(False, "parallel.keep_gathered of fsdp and vocab")
    cuda_graph: bool = option(False, "true: every step replays a CUDA graph (trainer.cuda_graph); not for ddp")
    output_dir: str = option("results/bench_parallel", "directory of files and pages", path="written")
    part: str | None = option(None, "end of the file's name, to keep several runs on the same number of GPUs")


add_command("bench_parallel", BenchConfig)


# ----------------------------------------------------------------------------------------------------------- rows
@dataclass
class CollectiveRow:
    """A collective of NCCL (on a CPU: gloo) over all ranks, with nothing beside it."""

    operation: str
    ranks: int
    mib: int  # of the whole tensor (fp32), of which a rank has all or a part; 0: one number a rank
    ms: float  # median of the slowest rank's times
    gb_per_second: float | None  # what a rank sends in a ring, by time; null where the time is latency alone


@dataclass
class LossRow:
    """Forward and backward pass of a loss over N tokens, of all ranks together and of one GPU alone."""

    shape: str
    tokens: int
    width: int
    vocabulary: int
    ranks: int
    ms: float  # the ranks together
    ms_alone: float  # one GPU that does everything
    ms_shard: float  # one GPU that does a rank's share alone: all tokens, a rank's rows of the head
    mib: float | None  # memory of a rank beyond inputs and gradients
    mib_alone: float | None
    sent_mib: float | None  # by each rank, from formulas
    efficiency: float  # ms_alone / (ranks x ms)
    error_hidden: float  # relative errors of rank 0's gradients against one GPU's
    error_weight: float


@dataclass
class StepRow:
    """Training steps of a model. Times are medians over the repeats."""

    model: str
    size: str
    vocab_size: int
    precision: str
    parallel: str
    scaling: str  # alone (each rank by itself) | weak (each rank keeps its sequences) | strong (the ranks share them)
    ranks: int
    sequences_of_rank: int
    seq_len: int
    step_ms: float
    tokens_per_second: float
    efficiency: float | None  # tokens/s against as many GPUs alone, with the sequences of `weak`; of `efficiencies`
    gib: float | None  # peak memory of the rank that holds most; null on a CPU
    sent_gib: float | None  # by each rank in a step, from formulas
    gib_is_own: bool = False  # false: FSDP's row comes after DDP's, and lacks DDP's gradients that NCCL still held
    blocks_together: int = 1
    keep_gathered: bool = False
    cuda_graph: bool = False
    host_ms: float | None = None  # in which the slowest rank's host issues a step to an idle GPU
    times_ms: list[float] = field(default_factory=list)  # of each repeat
    efficiencies: list[float] = field(default_factory=list)  # of each repeat, against the GPUs alone in that repeat
    host_times_ms: list[float] = field(default_factory=list)

    def repeat(self, again: "StepRow", alone: "StepRow | None") -> None:
        """Take up another measurement of this row. `alone` is the one GPU's row, whose last time is that repeat's."""
        self.times_ms.append(again.step_ms)
        self.step_ms = statistics.median(self.times_ms)
        if again.host_ms is not None:
            self.host_times_ms.append(again.host_ms)
            self.host_ms = statistics.median(self.host_times_ms)
        self.tokens_per_second = again.tokens_per_second * again.step_ms / self.step_ms
        if alone is not None:
            # A step of one GPU alone has alone.sequences_of_rank; this row's ranks have their own number.
            self.efficiencies.append(
                alone.times_ms[-1] / again.step_ms * again.sequences_of_rank / alone.sequences_of_rank
            )
            self.efficiency = statistics.median(self.efficiencies)

    @property
    def interval(self) -> Estimate | None:
        """Of the efficiency, over the repeats; None with fewer than two."""
        return estimate(self.efficiencies, ratios=True) if len(self.efficiencies) > 1 else None

    @property
    def efficiency_in_words(self) -> str:
        """The efficiency; from two repeats on with its 90 % interval and their number."""
        if (found := self.interval) is None:
            return show(self.efficiency, ".2f")
        return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f}), n = {found.n}"

    @property
    def method(self) -> str:
        """`parallel`, how blocks are gathered if not one by one for each pass, and whether a CUDA graph is replayed."""
        together = f", {self.blocks_together} blocks together" if self.blocks_together > 1 else ""
        kept, graph = ", kept" if self.keep_gathered else "", ", CUDA graph" if self.cuda_graph else ""
        return self.parallel + together + kept + graph

    @property
    def memory(self) -> str:
        """GiB. A row of FSDP that lacks DDP's gradients shows a lower bound."""
        return ("≥ " if self.parallel == "fsdp" and not self.gib_is_own and self.gib else "") + show(self.gib, ".1f")


@dataclass
class Measured:
    """What one run has measured so far, on `ranks` GPUs of one kind; the content of its JSON file."""

    command: str
    device: str
    ranks: int
    environment: dict[str, Any]
    collectives: list[CollectiveRow] = field(default_factory=list)
    loss: list[LossRow] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)


def write(measured: Measured, directory: Path, part: str | None) -> Path:
    """Write `<directory>/<device>-x<ranks>[-<part>].json`. The file is whole at any time."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{slug(measured.device)}-x{measured.ranks}" + (f"-{part}" if part else "")
    path = directory / f"{stem}.json"
    write_json(path, asdict(measured))
    return path


def read_rows(directory: Path) -> list[Measured]:
    """All runs in a directory, by device, ranks and name. Empty where the directory does not exist."""
    found = []
    for path in sorted(directory.glob("*-x*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            for name, kind in (("collectives", CollectiveRow), ("loss", LossRow), ("steps", StepRow)):
                content[name] = [kind(**row) for row in content[name]]
            found.append(Measured(**content))
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"benchmarks/parallel.py has not written {path} ({error})", "remove it") from error
    return sorted(found, key=lambda measured: (measured.device, measured.ranks))


# ---------------------------------------------------------------------------------------------------- collectives
def measure_collective(
    ranks: DistributedRanks, operation: str, mib: int, config: BenchConfig, device: torch.device
) -> CollectiveRow:
    """One collective on an fp32 tensor of `mib` MiB. With 0 it is one number a rank and shows the latency."""
    world = ranks.world_size
    part = torch.ones(max(mib * MIB // FP32 // world, 1), device=device)
    whole = torch.ones(world * len(part), device=device)
    call = {
        "all_reduce": partial(dist.all_reduce, whole),
        "all_gather": partial(all_gather, whole, part, None),
        "reduce_scatter": partial(reduce_scatter, part, whole, None),
    }[operation]
    calls = 1 if mib else LATENCY_CALLS

    def several() -> None:
        for _ in range(calls):
            call()

    for _ in range(config.warmup):
        several()
    ms = statistics.median(_slowest(ranks, several, device) for _ in range(config.rounds)) / calls
    sent = UNITS[operation] * whole.nbytes * (world - 1) / world
    return CollectiveRow(operation, world, mib, ms, sent / ms / 1e6 if mib else None)


# ------------------------------------------------------------------------------------------------------- the loss
def measure_loss(ranks: DistributedRanks, name: str, config: BenchConfig, device: torch.device) -> LossRow:
    """The loss of one shape. The ranks share tokens and head evenly."""
    shape, dtype, world = parse_shape(name), torch.bfloat16, ranks.world_size
    whole = _of_first(make_problem(shape, "peaked", dtype, device, seed=0))
    here = under(_parallel("vocab", config), *ranks.joined)
    shards = -(-shape.v // world)
    rows = slice(ranks.rank * shards, min((ranks.rank + 1) * shards, shape.v))
    tokens = slice(ranks.rank * shape.n // world, (ranks.rank + 1) * shape.n // world)
    weight = whole.weight_VD.detach()[rows].clone()
    own = Problem(_leaf(whole.hidden_ND[tokens]), _leaf(weight), whole.labels_N[tokens], dtype)
    local = Problem(_leaf(whole.hidden_ND), _leaf(weight), whole.labels_N.remainder(len(weight)), dtype)
    loss_config = load_config(["loss=cce_kahan"]).loss
    alone = build_loss(loss_config, device=device)
    together = build_loss(loss_config, device=device, vocabulary=here.vocabulary(shape.v))
    calls: dict[str, tuple[LossBackend, Problem]] = {
        "alone": (alone, whole), "shard": (alone, local), "together": (together, own)
    }  # fmt: skip
    for _ in range(config.warmup):
        for loss, problem in calls.values():
            step(loss, problem)
    (true_hidden, true_weight), (hidden, weight_grad) = whole.gradients(), own.gradients()
    errors = (
        relative_error(hidden / world, true_hidden[tokens].double()),
        relative_error(weight_grad / world, true_weight[rows].double()),
    )
    memory = {}
    for key in ("alone", "together"):
        loss, problem = calls[key]
        problem.clear_gradients()
        peak = peak_bytes(partial(step, loss, problem), device)
        memory[key] = None if peak is None else (peak - problem.gradient_bytes) / MIB
    times: dict[str, list[float]] = {key: [] for key in calls}
    for _ in range(config.rounds):
        for key, (loss, problem) in calls.items():
            times[key].append(_slowest(ranks, partial(step, loss, problem), device))
    ms = {key: statistics.median(values) for key, values in times.items()}
    sent = costs.vocabulary_loss_bytes(loss_config, shape.n, shape.d, shape.v, dtype.itemsize, world)
    return LossRow(
        name, shape.n, shape.d, shape.v, world, ms["together"], ms["alone"], ms["shard"], memory["together"],
        memory["alone"], sent and sent / MIB, ms["alone"] / (world * ms["together"]), *errors,
    )  # fmt: skip


def _of_first(problem: Problem) -> Problem:
    """Rank 0's tensors on every rank, because GPUs may draw different ones."""
    for tensor in (problem.hidden_ND, problem.weight_VD, problem.labels_N):
        dist.broadcast(tensor.detach(), 0)
    return problem


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_()


def _slowest(ranks: DistributedRanks, action: Callable[[], object], device: torch.device) -> float:
    """Time in ms of the slowest rank. All ranks begin together."""
    ranks.total(0)
    return ranks.largest(time_ms(action, device))[0]


def _slowest_host(ranks: DistributedRanks, action: Callable[[], object], device: torch.device) -> float:
    """Time in ms in which the slowest rank's host calls `action`. The device is idle before, and not waited for."""
    synchronize(device)
    ranks.total(0)
    begun = time.perf_counter()
    action()
    return ranks.largest(1e3 * (time.perf_counter() - begun))[0]


# ---------------------------------------------------------------------------------------------------- whole steps
def measure_steps(
    ranks: DistributedRanks, name: str, config: BenchConfig, device: torch.device, tell: common.Say
) -> Iterator[StepRow]:
    """Steps of a model (`gla/350m`) on one GPU, and with every way to spread it, weak and strong.

    Every repeat measures all of them once more, so that each efficiency compares times of one repeat. A row is yielded
    again when a repeat has changed it.
    """
    model_name, size = name.split("/")
    run: Config = load_config([f"model={model_name}", f"size={size}", "loss=cce_kahan"])
    arch = resolve(run.model, run.size, run.size.vocab_size or 32000)
    precision = resolve_precision(run.trainer.precision, device)
    with device:  # draws weights faster than a CPU; their values change no time
        model = build_model(arch, device=device, dtype=parameter_dtype(precision), seed=0)
    plans = [("none", "alone", config.batch_size)]
    plans += [(mode, "weak", config.batch_size) for mode in config.weak]
    plans += [(mode, "strong", config.batch_size // ranks.world_size) for mode in config.strong]
    rows: dict[tuple[str, str, int], StepRow] = {}
    for _ in range(config.repeats):
        alone: StepRow | None = None  # of this repeat
        for plan in plans:
            try:
                measured = _measure_mode(ranks, model, run, precision, *plan, config, device)
            except (RuntimeError, MemoryError) as error:
                if not ran_out_of_memory(error):
                    raise
                tell(f"{name} {plan[0]} {plan[1]}: out of memory")
                continue
            finally:
                common.free(device)
            row = rows.setdefault(plan, measured)
            row.repeat(measured, alone)
            if plan == plans[0]:
                alone = row
            yield row


def _measure_mode(
    ranks: DistributedRanks, model: Any, run: Config, precision: str, mode: str, scaling: str, sequences: int,
    config: BenchConfig, device: torch.device,
) -> StepRow:  # fmt: skip
    """Steps of a copy of `model`."""
    arch, parallel = model.arch, _parallel(mode, config)
    beside = sum(parameter.nbytes for parameter in model.parameters())  # the model itself, while its copy trains
    model = copy.deepcopy(model)
    spread, world = (Ranks(), 1) if mode == "none" else (under(parallel, *ranks.joined), ranks.world_size)
    replica = spread.spread(model, compute_dtype(precision))
    loss = build_loss(run.loss, device=device, vocabulary=spread.vocabulary(arch.vocab_size))
    optimizer = build_optimizer(model, run.optimizer, device)
    batch = random_batch(sequences, config.seq_len, arch.vocab_size, seed=ranks.rank)
    tokens = sequences * config.seq_len * world
    step_of = TrainingStep(
        model, optimizer, batch, tokens=tokens, precision=precision, device=device,
        max_grad_norm=run.optimizer.max_grad_norm, replica=replica, ranks=spread,
    )  # fmt: skip
    train_step: Callable[[], None] = partial(step_of, loss)
    for _ in range(config.warmup):
        train_step()
    synchronize(device)
    # DDP does not wait for its reductions by their handles. ProcessGroupNCCL therefore holds the gradients of the row
    # before. It releases them at its next call after its watchdog has seen the last reduction end.
    dist.all_reduce(torch.zeros((), device=device))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if config.cuda_graph:
        train_step = step_of.graphed(loss)
        train_step()  # captures the passes, with the memory of a step

    def several() -> None:
        for _ in range(config.steps):
            train_step()

    ms = statistics.median(_slowest(ranks, several, device) / config.steps for _ in range(3))
    host_ms = statistics.median(_slowest_host(ranks, train_step, device) for _ in range(config.steps))
    peak = (torch.cuda.max_memory_allocated(device) - beside) / GIB if device.type == "cuda" else 0.0
    sent = costs.communication(
        arch, parallel, world_size=world, sequences=sequences, seq_len=config.seq_len, precision=precision,
        loss=run.loss,
    )  # fmt: skip
    sharded = mode in SHARDED
    return StepRow(
        arch.model, arch.size, arch.vocab_size, precision, mode, scaling, world, sequences, config.seq_len, ms,
        tokens / ms * 1e3, None, ranks.largest(peak)[0] or None, None if sent is None else sum(sent.values()) / GIB,
        gib_is_own=True, blocks_together=config.blocks_together if sharded else 1,
        keep_gathered=config.keep_gathered and sharded, cuda_graph=config.cuda_graph, host_ms=host_ms,
    )  # fmt: skip


def _parallel(mode: str, config: BenchConfig) -> Any:
    """`parallel=mode`. Only modes that shard the model gather blocks."""
    overrides = [f"parallel={mode}"]
    if mode in SHARDED:
        overrides += [f"parallel.blocks_together={config.blocks_together}"]
        overrides += [f"parallel.keep_gathered={config.keep_gathered}"]
    return load_config(overrides).parallel


# ----------------------------------------------------------------------------------------------------------- page
TABLES: dict[str, tuple[str, common.Columns]] = {
    "collectives": (
        "Collectives",
        {"operation": "operation:", "GPUs": "ranks:d", "MiB": "mib:d", "ms": "ms:.3g", "GB/s": "gb_per_second:.3g"},
    ),
    "loss": (
        "The vocabulary-parallel loss",
        {
            "N × D × V": lambda row: f"{row.tokens} × {row.width} × {row.vocabulary}",
            "GPUs": "ranks:d",
            "ms": "ms:.1f",
            "ms on one": "ms_alone:.1f",
            "ms of a shard": "ms_shard:.1f",
            "efficiency": "efficiency:.2f",
            "MiB a rank": "mib:.0f",
            "MiB on one": "mib_alone:.0f",
            "MiB sent": "sent_mib:.0f",
            "dE": "error_hidden:.1e",
            "dC": "error_weight:.1e",
        },
    ),
    "steps": (
        "Training steps",
        {
            "model": lambda row: f"{row.model} {row.size}",
            "parallel": "method:",
            "scaling": "scaling:",
            "GPUs": "ranks:d",
            "B of a rank": "sequences_of_rank:d",
            "ms": "step_ms:.0f",
            "CPU ms": "host_ms:.0f",
            "tokens/s": "tokens_per_second:,.0f",
            "efficiency": "efficiency_in_words:",
            "GiB": "memory:",
            "GiB sent": "sent_gib:.2f",
        },
    ),
}


def write_pages(directory: Path) -> list[Path]:
    """Write `<directory>/<device>.md`, the tables of all runs of that device, and its picture of the weak scaling."""
    runs, paths = read_rows(directory), []
    for device in sorted({run.device for run in runs}):
        own, page = [run for run in runs if run.device == device], directory / f"{slug(device)}.md"
        lines = [f"# Several GPUs against one: {device}", ""]
        if picture := weak_scaling(own):
            paths.append(common.save_picture(picture, page.with_suffix(".png")))
            lines += [f"![Weak scaling of training steps]({page.stem}.png)", ""]
        for key, (title, columns) in TABLES.items():
            numbers = {id(row): number for number, run in enumerate(own, start=1) for row in getattr(run, key)}
            rows = [row for run in own for row in getattr(run, key)]
            numbered = {**columns, "run": lambda row, numbers=numbers: numbers[id(row)]}
            lines += [f"## {title}", "", *common.table(numbered, rows), ""] if rows else []
        listed = [{"command": run.command, "environment": {"gpus": [], "cpu": device} | run.environment} for run in own]
        write_text(page, "\n".join([*lines, *common.runs_section(listed)]))
        paths.append(page)
    return paths


GRAPHED, PLAIN = "with CUDA graphs", "without CUDA graphs"
WORDS = {"ddp": "DDP", "fsdp": "FSDP", "vocab": "vocab-parallel"}


def weak_scaling(runs: list[Measured]) -> Any:
    """Efficiency of FSDP and vocab-parallel with and without CUDA graphs, and of DDP, where both were measured."""
    found: dict[tuple[Any, ...], dict[str, dict[str, list[float]]]] = {}
    for row in (
        row for run in runs for row in run.steps if row.scaling == "weak" and row.efficiency and not row.keep_gathered
    ):
        key, series = (row.model, row.size, row.sequences_of_rank, row.ranks), GRAPHED if row.cuda_graph else PLAIN
        found.setdefault(key, {}).setdefault(row.parallel, {}).setdefault(series, []).append(row.efficiency or 0)
    both = {key: own for key, own in found.items() if any({GRAPHED, PLAIN} <= of.keys() for of in own.values())}
    if not both:
        return None
    (model, size, sequences, ranks), own = max(both.items(), key=lambda entry: len(entry[1]))
    values = {
        WORDS[name]: {series: statistics.median(own[name][series]) for series in own[name]} for name in sorted(own)
    }
    graphed, plain = ([of[series] for of in values.values() if GRAPHED in of] for series in (GRAPHED, PLAIN))
    title = f"With CUDA graphs each of {ranks} GPUs keeps {min(graphed):.0%} of its speed, without {min(plain):.0%}"
    setting = f"{model_in_words(model)} {size}, {ranks} x {runs[0].device}, {sequences} sequences a GPU"
    axis = "tokens/s of a GPU among several / of one alone"
    return common.bars({axis: (".2f", values)}, title, f"{setting}. Medians of repetitions.", at=1)


# -------------------------------------------------------------------------------------------------------- the whole
def run_benchmark(ranks: Ranks, config: BenchConfig, command: str) -> list[Path]:
    """Measure. Rank 0 writes every row into the run's file, then pages and pictures of all runs.

    Returns the paths of pages and pictures.
    """
    if not isinstance(ranks, DistributedRanks):
        raise ConfigError("there is only one process", "use torchrun --nproc-per-node=N, N of 2 or more")
    if config.strong and config.batch_size % ranks.world_size:
        raise ConfigError(
            f"strong: {ranks.world_size} ranks cannot share batch_size={config.batch_size} evenly",
            f"use a multiple of {ranks.world_size}, or strong=[]",
        )
    if uneven := [name for name in config.losses if parse_shape(name).n % ranks.world_size]:
        raise ConfigError(
            f"losses: {ranks.world_size} ranks cannot share the tokens of {', '.join(uneven)} evenly",
            f"use shapes NxDxV with a multiple of {ranks.world_size} for N",
        )
    if config.cuda_graph and "ddp" in (*config.weak, *config.strong):
        raise ConfigError(
            "cuda_graph=true: training refuses CUDA graphs with parallel=ddp", "use weak=[fsdp,vocab] strong=[fsdp]"
        )
    device, directory = resolve_device(config.device), Path(config.output_dir)
    if config.cuda_graph and device.type != "cuda":
        raise UnsupportedError("cuda_graph=true needs GPUs, and these ranks are on the CPU", "use cuda_graph=false")
    measured = Measured(command, device_name(device), ranks.world_size, describe_environment())

    def keep(rows: list[Any], row: Any, line: str) -> None:
        if not any(row is known for known in rows):
            rows.append(row)
        tell(line)
        if ranks.is_first:
            write(measured, directory, config.part)

    tell = say if ranks.is_first else lambda _line: None
    for mib in config.collective_mib:
        for operation in UNITS:
            timed = measure_collective(ranks, operation, mib, config, device)
            keep(measured.collectives, timed, f"{operation} of {mib} MiB: {timed.ms:.3f} ms")
    for name in config.losses:
        loss = measure_loss(ranks, name, config, device)
        keep(measured.loss, loss, f"loss {name}: {loss.ms:.2f} ms, alone {loss.ms_alone:.2f}")
    for name in config.models:
        for row in measure_steps(ranks, name, config, device, tell):
            told = f"{row.step_ms:.1f} ms, host {row.host_ms:.1f}, efficiency {row.efficiency_in_words}"
            keep(measured.steps, row, f"{name} {row.parallel} {row.scaling}: {told}")
    return write_pages(directory) if ranks.is_first else []


def main(config: BenchConfig) -> None:
    if config.measure:
        if not Launch.from_environment().launched:
            raise ConfigError(
                "this process was not started by torchrun",
                "use torchrun --nproc-per-node=N benchmarks/parallel.py …, or measure=false to rewrite the pages",
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
    cli.run(main, "bench_parallel", __doc__)
