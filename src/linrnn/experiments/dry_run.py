"""`dry_run=true`: what a run will need, estimated from formulas. Nothing is built, tokenised, run or written."""

import dataclasses
import math
import re
from bisect import bisect_right
from functools import lru_cache
from pathlib import Path

import torch

from linrnn import costs
from linrnn.config import run_name
from linrnn.config.schema import Config, HubDataConfig, TextDataConfig, VocabConfig
from linrnn.core.errors import DataError, LinrnnError
from linrnn.core.machine import GIB, cores, ranks_here, size_in_words
from linrnn.data import vocabulary_size
from linrnn.data.readers import find_files
from linrnn.models.architecture import Architecture
from linrnn.models.language_model import compute_dtype
from linrnn.profiling import matmul_rate
from linrnn.runs.summary import duration, memory_lines
from linrnn.training.plan import Plan, check_step_fits, make_training_plan

DATA_OF_HUB = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # NAME or OWNER/NAME
MODEL_OF_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # OWNER/NAME, as of every model in FLA's format
UNKNOWN = "unknown: linrnn.costs has no formulas for this model or loss"


def print_forecast(config: Config) -> None:
    """Print parameters, memory by component, FLOPs and time of the run that `config` describes.

    Raises:
        LinrnnError: an error that the run would raise and that can be found beforehand.
    """
    plan = make_training_plan(config)
    arch = plan.architecture(vocabulary_size(config.data))
    for line in [
        *_run(plan, arch),
        *_inputs(config),
        *_memory(plan, arch),
        *_room(plan, arch),
        *_communication(plan, arch),
        *(_time_on_gpu(plan, arch) if config.gpu else _time(plan, arch)),
        "",
        "nothing was run or written",
    ]:
        print(line)


def _run(plan: Plan, arch: Architecture) -> list[str]:
    config = plan.config
    where = costs.GPUS[config.gpu].name if config.gpu else plan.device.type
    return [
        f"{arch.model} x {arch.size} x {config.loss.name}, {plan.precision} on {where}",
        f"  would be written to {Path(config.results_dir) / config.group / run_name(config, plan.world_size)}",
        f"  {plan.total_steps:,} steps of {plan.tokens_per_step:,} tokens, "
        f"{plan.total_steps * plan.tokens_per_step:,} in all",
        f"  {arch.num_layers} layers, width {arch.hidden_size}, {arch.num_heads} heads of {arch.head_k_dim} (keys) and "
        f"{arch.head_v_dim} (values), MLP {arch.intermediate_size}, vocabulary {arch.vocab_size:,}",
        "",
        f"parameters  {arch.n_parameters:,} ({'tied' if arch.tie_embeddings else 'untied'} embeddings)",
        f"  body       {arch.body_parameters:,}",
        f"  embedding  {arch.embedding_parameters:,}{'' if arch.tie_embeddings else ', and the head as many'}",
    ]


def _inputs(config: Config) -> list[str]:
    """Lines for text and weights that are not on this machine."""
    missing, of_hub = inputs_elsewhere(config)
    lines = [f"not on this machine: {error.cause}" for error in missing]
    lines += [f"from the hub, which was not asked: {name}" for name in of_hub]
    return ["", *lines] if lines else []


def _memory(plan: Plan, arch: Architecture) -> list[str]:
    heading = "memory of one step, on a GPU" + (
        " (the CPU's torch fallbacks need more)" if plan.device.type == "cpu" else ""
    )
    trainer, estimate = plan.config.trainer, plan.memory_estimate(arch)
    if plan.device.type == "cpu" and trainer.precision == "auto":
        heading += f"\n  here in {plan.precision}; trainer.precision=bf16_autocast shows what a GPU takes by default"
    if estimate is None:
        why = UNKNOWN if trainer.float8 == "none" else "unknown: the formulas describe bf16, not trainer.float8"
        return ["", heading, *memory_lines(plan.training_state(arch)), f"  all else                 {why}"]
    if trainer.compile != "none":
        heading += "\n  as with trainer.compile=none, by whose formulas compiled blocks are foreseen"
    lines = memory_lines(estimate.components())
    return ["", heading, *lines[:-1], f"{lines[-1]}  (the most that is held at once: not the sum)"]


def _room(plan: Plan, arch: Architecture) -> list[str]:
    """A line if the memory does not fit on this machine."""
    try:
        note = check_step_fits(plan, arch)
    except LinrnnError as error:
        return [f"  cannot run here: {error.cause}", f"    -> {error.remedy}"]
    return [f"  {note}"] if note else []


def _communication(plan: Plan, arch: Architecture) -> list[str]:
    if plan.world_size == 1:
        return []
    trainer = plan.config.trainer
    sent = costs.communication(
        arch,
        plan.config.parallel,
        world_size=plan.world_size,
        sequences=plan.sequences_of_rank,
        seq_len=trainer.seq_len,
        precision=plan.precision,
        loss=plan.config.loss,
        micro_steps=trainer.accumulation_steps,
        optimizer=plan.config.optimizer,
    )
    heading = f"sent by each of {plan.world_size} ranks in a step"
    if sent is None:
        return ["", f"{heading}: {UNKNOWN}"]
    parts = {f"sent/{name}": size for name, size in sent.items()}
    return ["", heading, *memory_lines({"sent": sum(sent.values()), **parts})]


def _time(plan: Plan, arch: Architecture) -> list[str]:
    trainer, computed = plan.config.trainer, kernel_flops(plan, arch)
    needed = costs.model_flops(arch, plan.sequences_of_rank * trainer.accumulation_steps, trainer.seq_len)
    lines = [
        "",
        f"FLOPs per step{' and rank' * (plan.world_size > 1)}",
        f"  by the model's definition (MFU)        {UNKNOWN if needed is None else f'{needed:.3e}'}",
        f"  that the kernels compute (for the time) {UNKNOWN if computed is None else f'{computed.total:.3e}'}",
    ]
    if computed is None:
        return lines
    name, share, rate = _assumed_rate(plan)
    seconds = costs.time_estimate(computed.total, rate, share)
    if rate is None or seconds is None:
        return [*lines, f"  not estimated: the peak rate of this device ({name}) is not known"]
    basis = (
        f"{share:.0%} of a matrix product's rate, now {rate / 1e9:,.0f} GFLOP/s (right to a factor of 2)"
        if plan.device.type == "cpu"
        else f"{share:.0%} of its peak (small models reach much less)"
    )
    total = duration(seconds * plan.total_steps)
    each = f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds * 1e3:,.1f} ms"
    return [*lines, f"  {each} a step, {total} in all, if {name} reaches {basis}"]


def _time_on_gpu(plan: Plan, arch: Architecture) -> list[str]:
    """Lines: speed, hours, price and the largest batch on a GPU that need not be here."""
    config, trainer, gpu = plan.config, plan.config.trainer, costs.GPUS[plan.config.gpu or ""]
    peak = costs.peak_flops_per_second(gpu.name, plan.precision) or 0.0
    rates = f"{gpu.bytes_per_second / 1e12:.2f} TB/s, peak {peak / 1e12:,.0f} TFLOP/s"
    lines = ["", f"on {gpu.name}: {size_in_words(gpu.memory_bytes)}, {rates} in {plan.precision}"]
    seconds = costs.step_seconds(
        arch,
        gpu,
        sequences=plan.sequences_of_rank,
        micro_steps=trainer.accumulation_steps,
        seq_len=trainer.seq_len,
        precision=plan.precision,
        loss=config.loss,
        optimizer=config.optimizer,
        activation_checkpointing=trainer.activation_checkpointing,
    )
    if seconds is None:
        return [*lines, f"  time: {UNKNOWN}"]
    off = costs.uncertainty(gpu)
    fast, slow = seconds * (1 - off), seconds * (1 + off)
    speed = [plan.tokens_per_step / time for time in (slow, fast)]
    mfu = [
        costs.mfu(
            arch,
            seq_len=trainer.seq_len,
            tokens_per_second=tokens,
            device_name=gpu.name,
            precision=plan.precision,
            n_devices=plan.world_size,
        )["mfu"]
        for tokens in speed
    ]
    hours = [time * plan.total_steps * plan.world_size / 3600 for time in (fast, slow)]
    price = "; gpu_price=PRICE of an hour gives its price"
    if config.gpu_price is not None:
        price = f", price {hours[0] * config.gpu_price:,.2f} to {hours[1] * config.gpu_price:,.2f}"
    unit = plan.world_size // config.parallel.data_ranks(plan.world_size)  # sequences that the ranks can share
    batch = largest_batch(plan, arch, min(gpu.memory_bytes, (config.memory_budget_gib or math.inf) * GIB), unit)
    rows = (
        "9 of 10 committed rows of H100 and H200 lie within it"
        if gpu.is_measured
        else "no committed row is of this GPU"
    )
    return [
        *lines,
        f"  a step         {fast * 1e3:,.0f} to {slow * 1e3:,.0f} ms",
        f"  speed          {speed[0]:,.0f} to {speed[1]:,.0f} tokens/s"
        + ("" if None in mfu else f", MFU {mfu[0]:.0%} to {mfu[1]:.0%}"),
        f"  the whole run  {duration(fast * plan.total_steps)} to {duration(slow * plan.total_steps)}, "
        + " to ".join(f"{time:,.{2 if hours[0] >= 0.1 else 4}f}" for time in hours)
        + f" GPU-hours{price}",
        f"  largest batch  {UNKNOWN if batch is None else f'trainer.batch_size={unit * batch}'}, without fragmentation",
        f"  the range of times is {off:.0%}: {rows}",
        *(["  several GPUs: the time of their communication is left out"] if plan.world_size > 1 else []),
    ]


def largest_batch(plan: Plan, arch: Architecture, budget_bytes: float, unit: int = 1) -> int | None:
    """The largest trainer.batch_size, in units, whose step the formulas foresee within the budget; None: no formulas.

    Args:
        unit: what trainer.batch_size is a multiple of, such as the ranks that share sequences (parallel=vocab).
    """

    def peak(batch: int) -> float:
        trainer = dataclasses.replace(plan.config.trainer, batch_size=unit * batch)
        larger = dataclasses.replace(plan, config=dataclasses.replace(plan.config, trainer=trainer))
        estimate = larger.memory_estimate(arch)
        return math.inf if estimate is None else estimate.peak

    return None if plan.memory_estimate(arch) is None else bisect_right(range(1, 4097), budget_bytes, key=peak)


def kernel_flops(plan: Plan, arch: Architecture) -> costs.KernelFlops | None:
    """FLOPs that each rank computes in one optimizer step, over all its micro-steps; None: no formulas."""
    trainer, shared = plan.config.trainer, isinstance(plan.config.parallel, VocabConfig)
    return costs.kernel_flops(
        arch,
        plan.sequences_of_rank * trainer.accumulation_steps,
        trainer.seq_len,
        plan.config.loss,
        trainer.activation_checkpointing,
        compute_dtype(plan.precision).itemsize,
        plan.config.optimizer,
        plan.shard_ranks if shared else 1,
    )


def seconds_of_run(plan: Plan, arch: Architecture) -> float | None:
    """Expected seconds of all steps; None if FLOPs or the device's peak rate are unknown."""
    flops, (_, share, rate) = kernel_flops(plan, arch), _assumed_rate(plan)
    seconds = None if flops is None else costs.time_estimate(flops.total, rate, share)
    return None if seconds is None else seconds * plan.total_steps


def _assumed_rate(plan: Plan) -> tuple[str, float, float | None]:
    """The device, the share of its peak rate that a run should reach, and that rate in FLOP/s (measured on a CPU)."""
    if plan.device.type == "cpu":
        return "this CPU", costs.ASSUMED_CPU_SHARE, _cpu_rate(compute_dtype(plan.precision))
    name = torch.cuda.get_device_name(plan.device)
    return name, costs.ASSUMED_MFU, costs.peak_flops_per_second(name, plan.precision)


@lru_cache
def _cpu_rate(dtype: torch.dtype) -> float:
    """FLOP/s of each rank, measured with this process's threads. Ranks with more threads than cores share the cores."""
    return matmul_rate(dtype) * min(1.0, cores() / (torch.get_num_threads() * ranks_here()))


# -------------------------------------------------------------------------------------------------- what a run reads
def inputs_elsewhere(config: Config, *, resumes: bool = False) -> tuple[list[DataError], list[str]]:
    """What the run reads and this machine lacks: the errors that it would raise, and what it may load from the hub.

    Nothing is read, and the hub is not asked. A tokenizer is not looked for: without it no memory can be foreseen.

    Args:
        resumes: the run has a checkpoint of its own, so that it does not read `continue_from`.
    """
    missing: list[DataError] = []
    of_hub: list[str] = []
    data = config.data
    if isinstance(data, TextDataConfig):
        sources = [("data.sources", source.path) for source in data.sources]
        for key, path in (*sources, ("data.path", data.path), ("data.valid_path", data.valid_path)):
            try:
                _ = path is None or find_files(path, key)
            except DataError as error:
                remedy = f"{error.remedy} (docs/data.md), or use data=stdlib, which needs no file"
                missing.append(DataError(error.cause, remedy))
    directories = [
        ("data.path", data.path if isinstance(data, HubDataConfig) else None, DATA_OF_HUB, "give a copy or a hub name"),
        ("init_from", config.init_from, MODEL_OF_HUB, "name the directory of a run; train.py makes one"),
        ("continue_from", None if resumes else config.continue_from, None, "name a run's directory"),
    ]
    for key, path, hub, remedy in directories:
        if path is None or Path(path).is_dir():
            continue
        if hub and hub.fullmatch(path) and (key == "data.path" or not Path(path).parent.is_dir()):
            of_hub.append(path)
        else:
            missing.append(DataError(f"{key}={path} is no directory", remedy))
    return missing, of_hub
