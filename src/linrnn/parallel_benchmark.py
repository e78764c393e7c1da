"""Several GPUs against one, in one group of processes: the vocabulary-parallel loss, and whole training steps.

Every figure of several GPUs has the same work on one beside it: done by all ranks at once, each for itself, in rounds
that alternate with theirs (the loss), or just before (steps). Times are medians of the slowest rank's.
"""

import copy
import gc
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from linrnn import accounting
from linrnn.architecture import Architecture, resolve
from linrnn.config import load_config
from linrnn.config.schema import BenchParallelConfig, Config
from linrnn.data import Batch
from linrnn.distributed import DistributedRanks, Ranks
from linrnn.environment import describe_environment
from linrnn.errors import ConfigError
from linrnn.evaluation import loss_inputs
from linrnn.loss_problems import Problem, make_problem, parse_shape, relative_error
from linrnn.loss_timing import peak_bytes, step, synchronize, time_ms
from linrnn.losses import LossBackend, build_loss
from linrnn.models import build_model
from linrnn.optim import build_optimizer, clip_gradients
from linrnn.runtime import compute_dtype, parameter_dtype, resolve_device, resolve_precision
from linrnn.summary import GIB

MIB = 2**20


# ------------------------------------------------------------------------------------------------------- the loss
@dataclass
class LossRow:
    """Forward and backward pass of a loss over N tokens, of all ranks together, and of one GPU alone.

    Attributes:
        ms, ms_alone: of the ranks together; of one GPU that does all.
        ms_shard: of one GPU that does a rank's share without the others: all tokens, a rank's rows of the head.
        mib, mib_alone: memory of a rank beyond inputs and gradients.
        sent_mib: by each rank, from formulas.
        efficiency: ms_alone / (ranks · ms).
        error_hidden, error_weight: of the gradients against one GPU's, relative; of rank 0's part.
    """

    shape: str
    tokens: int
    width: int
    vocabulary: int
    ranks: int
    ms: float
    ms_alone: float
    ms_shard: float
    mib: float | None
    mib_alone: float | None
    sent_mib: float
    efficiency: float
    error_hidden: float
    error_weight: float


def measure_loss(ranks: DistributedRanks, name: str, config: BenchParallelConfig, device: torch.device) -> LossRow:
    """One shape, tokens and head spread evenly over the ranks."""
    shape, dtype, world = parse_shape(name), torch.bfloat16, ranks.world_size
    whole = make_problem(shape, "peaked", dtype, device, config.seed)
    here = ranks.under(_parallel("vocab"))
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
    sent = accounting.vocabulary_loss_bytes(shape.n, shape.d, dtype.itemsize, world)
    return LossRow(
        name, shape.n, shape.d, shape.v, world, ms["together"], ms["alone"], ms["shard"], memory["together"],
        memory["alone"], sent / MIB, ms["alone"] / (world * ms["together"]), *errors,
    )  # fmt: skip


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_()


def _slowest(ranks: DistributedRanks, action: Callable[[], object], device: torch.device) -> float:
    """ms of the rank that takes longest, all beginning together."""
    ranks.total(0)
    return ranks.largest(time_ms(action, device))[0]


# ---------------------------------------------------------------------------------------------------- whole steps
@dataclass
class StepRow:
    """Training steps of a model.

    Attributes:
        scaling: `alone` (each rank by itself), `weak` (the same sequences a rank), `strong` (the same in all).
        efficiency: tokens/s against that of as many GPUs alone.
        gib: peak memory of the rank that has most; null on a CPU.
        sent_gib: by each rank in a step, from formulas.
    """

    model: str
    size: str
    parallel: str
    scaling: str
    ranks: int
    sequences_of_rank: int
    seq_len: int
    step_ms: float
    tokens_per_second: float
    efficiency: float | None
    mfu: float | None
    gib: float | None
    sent_gib: float


def measure_steps(
    ranks: DistributedRanks, name: str, config: BenchParallelConfig, device: torch.device, say: Callable[[str], None]
) -> list[StepRow]:
    """A model (`gla/350m`) alone and under every way to spread it, weak and strong."""
    model_name, size = name.split("/")
    run: Config = load_config([f"model={model_name}", f"size={size}", "loss=cce_kahan"])
    arch = resolve(run.model, run.size, config.vocab_size or run.size.vocab_size or 32000)
    precision = resolve_precision(run.trainer.precision, device)
    model = build_model(arch, device=device, dtype=parameter_dtype(precision), seed=config.seed)
    found: list[StepRow] = []
    plans = [("none", "alone", config.batch_size)]
    plans += [(mode, "weak", config.batch_size) for mode in config.weak]
    plans += [(mode, "strong", config.batch_size // ranks.world_size) for mode in config.strong]
    for mode, scaling, sequences in plans:
        try:
            row = _measure_mode(ranks, copy.deepcopy(model), arch, run, mode, scaling, sequences, config, device)
        except torch.OutOfMemoryError:
            say(f"{name} {mode} {scaling}: out of memory")
            continue
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        base = found[0].tokens_per_second * (ranks.world_size if mode != "none" else 1) if found else None
        row.efficiency = base and row.tokens_per_second / base
        found.append(row)
        say(f"{name} {mode} {scaling}: {row.step_ms:.1f} ms, {row.tokens_per_second:,.0f} tokens/s")
    return found


def _measure_mode(
    ranks: DistributedRanks,
    model: Any,
    arch: Architecture,
    run: Config,
    mode: str,
    scaling: str,
    sequences: int,
    config: BenchParallelConfig,
    device: torch.device,
) -> StepRow:
    precision = resolve_precision(run.trainer.precision, device)
    parallel = _parallel(mode)
    spread = Ranks() if mode == "none" else ranks.under(parallel)
    replica = spread.spread(model, compute_dtype(precision))
    loss = build_loss(run.loss, device=device, vocabulary=spread.vocabulary(arch.vocab_size))
    optimizer = build_optimizer(model, run.optimizer, device)
    random = torch.Generator().manual_seed(config.seed + ranks.rank)
    ids = torch.randint(arch.vocab_size, (sequences, config.seq_len + 1), generator=random)
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), None, sequences * config.seq_len)
    world = ranks.world_size if mode != "none" else 1
    tokens = sequences * config.seq_len * world

    def train_step() -> None:  # as Trainer.train_step
        hidden, weight, labels = loss_inputs(replica, batch, precision, device)
        (loss(hidden, weight, labels).sum_nats / tokens * spread.loss_scale).backward()
        clip_gradients(model.parameters(), run.optimizer.max_grad_norm)
        optimizer.step()
        spread.zero_gradients(optimizer)

    for _ in range(config.warmup):
        train_step()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def several() -> None:
        for _ in range(config.steps):
            train_step()

    ms = statistics.median(_slowest(ranks, several, device) / config.steps for _ in range(3))
    peak = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0.0
    flops = accounting.model_flops(arch, sequences, config.seq_len)
    rate = accounting.peak_flops_per_second(_device_name(device), precision)
    sent = accounting.communication(
        arch, parallel, world_size=world, sequences=sequences, seq_len=config.seq_len, precision=precision
    )
    return StepRow(
        arch.model, arch.size, mode, scaling, world, sequences, config.seq_len, ms, tokens / ms * 1e3, None,
        rate and flops / (ms / 1e3) / rate, ranks.largest(peak)[0] or None, sent.total / GIB,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- the whole
def run_benchmark(ranks: Ranks, config: BenchParallelConfig, command: str) -> Path | None:
    """Measure, and on rank 0 write `<output_dir>/<gpu>-x<ranks>.json` and `.md`; returns the latter.

    Raises:
        ConfigError: one process, or a batch that the ranks cannot share.
    """
    if not isinstance(ranks, DistributedRanks):
        raise ConfigError("one process has nobody to share with", "use torchrun --nproc-per-node=N, N of 2 or more")
    if config.strong and config.batch_size % ranks.world_size:
        raise ConfigError(
            f"strong: {ranks.world_size} ranks cannot share batch_size={config.batch_size} out evenly",
            f"use a multiple of {ranks.world_size}, or strong=[]",
        )
    device = resolve_device(config.device)

    def say(line: str) -> None:
        if ranks.is_first:
            print(line, flush=True)

    losses, steps = [], []
    for name in config.losses:
        losses.append(measure_loss(ranks, name, config, device))
        say(f"loss {name}: {losses[-1].ms:.2f} ms, alone {losses[-1].ms_alone:.2f}")
    for name in config.models:
        steps += measure_steps(ranks, name, config, device, say)
    if not ranks.is_first:
        return None
    directory = Path(config.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{_device_name(device).lower().replace(' ', '_')}-x{ranks.world_size}"
    content = {
        "command": command, "environment": describe_environment(), "loss": [asdict(row) for row in losses],
        "steps": [asdict(row) for row in steps],
    }  # fmt: skip
    (directory / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")
    path = directory / f"{stem}.md"
    path.write_text(markdown(content))
    return path


def markdown(content: dict[str, Any]) -> str:
    """The tables of a benchmark's JSON file."""
    versions, environment = content["environment"]["packages"], content["environment"]
    commit = (environment["git"] or {}).get("commit") or "unknown"
    lines = [
        "# Several GPUs against one", "",
        f"`{content['command']}`; commit {commit[:12]}, torch {versions['torch']}, Triton {versions['triton']}.", "",
    ]  # fmt: skip
    if content["loss"]:
        lines += [
            "## The vocabulary-parallel loss", "",
            "`cce_kahan`, forward and backward, bf16, peaked logits; each rank has its share of the tokens and of the "
            "head's rows. *Shard*: one GPU with all tokens and one rank's rows. Efficiency: time of one / (ranks × "
            "time). Errors: relative to the gradients of one GPU.", "",
            "| N × D × V | GPUs | ms | ms on one | ms of a shard | efficiency | MiB a rank | MiB on one | MiB sent | "
            "dE | dC |",
            "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        ]  # fmt: skip
        lines += [
            f"| {r['tokens']} × {r['width']} × {r['vocabulary']} | {r['ranks']} | {r['ms']:.2f} | "
            f"{r['ms_alone']:.2f} | {r['ms_shard']:.2f} | {r['efficiency']:.3f} | {_number(r['mib'], '.0f')} | "
            f"{_number(r['mib_alone'], '.0f')} | {r['sent_mib']:.0f} | "
            f"{r['error_hidden']:.1e} | {r['error_weight']:.1e} |"
            for r in content["loss"]
        ]
        lines.append("")
    if content["steps"]:
        lines += [
            "## Training steps", "",
            "`loss=cce_kahan`, AdamW. Efficiency: tokens/s against as many GPUs alone, with the first row's batch.", "",
            "| model | parallel | scaling | GPUs | B of a rank | ms | tokens/s | efficiency | MFU | GiB | GiB sent |",
            "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        ]  # fmt: skip
        lines += [
            f"| {r['model']} {r['size']} | {r['parallel']} | {r['scaling']} | {r['ranks']} | "
            f"{r['sequences_of_rank']} | {r['step_ms']:.1f} | {r['tokens_per_second']:,.0f} | "
            f"{_number(r['efficiency'], '.3f')} | {_number(r['mfu'], '.3f')} | {_number(r['gib'], '.1f')} | "
            f"{r['sent_gib']:.2f} |"
            for r in content["steps"]
        ]
        lines.append("")
    return "\n".join(lines)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _parallel(mode: str) -> Any:
    return load_config([f"parallel={mode}"]).parallel


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
