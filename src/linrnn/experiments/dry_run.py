"""`dry_run=true`: what a run will need, estimated from formulas. Nothing is built, tokenised, run or written."""

import dataclasses
import math
from bisect import bisect_right
from functools import lru_cache

import torch

from linrnn import costs
from linrnn.config import place_of
from linrnn.config.schema import Config
from linrnn.core.errors import LinrnnError
from linrnn.core.machine import GIB, cores, ranks_here, size_in_words
from linrnn.data import vocabulary_size
from linrnn.models.architecture import Architecture
from linrnn.models.language_model import compute_dtype
from linrnn.profiling import matmul_rate
from linrnn.runs.summary import duration, memory_lines
from linrnn.training.plan import Plan, check_step_fits, make_training_plan
from linrnn.training.runtime import device_name

UNKNOWN = "unknown, without formulas for this model or loss"


def print_forecast(config: Config) -> None:
    """Print parameters, memory by component, FLOPs and time of the run that `config` describes.

    Raises:
        LinrnnError: an error that the run would raise and that can be found beforehand.
    """
    plan = make_training_plan(config)
    arch = plan.architecture(vocabulary_size(config.data))
    for line in [
        *_run(plan, arch),
        *_memory(plan, arch),
        *_room(plan, arch),
        *_time(plan, arch),
        "",
        "nothing was run or written",
    ]:
        print(line)


def _run(plan: Plan, arch: Architecture) -> list[str]:
    config = plan.config
    where = costs.GPUS[config.gpu].name if config.gpu else plan.device.type
    heads = f"{arch.num_heads} heads of {arch.head_k_dim} (keys) and {arch.head_v_dim} (values), "
    heads = f"{heads}MLP {arch.intermediate_size}, " if arch.matched else ""
    return [
        f"{arch.model} x {arch.size} x {config.loss.name}, {plan.precision} on {where}",
        f"  would be written to {place_of(config, plan.world_size)}",
        f"  {plan.total_steps:,} steps of {plan.tokens_per_step:,} tokens, "
        f"{plan.total_steps * plan.tokens_per_step:,} in all",
        f"  {arch.num_layers} layers, width {arch.hidden_size}, {heads}vocabulary {arch.vocab_size:,}",
        "",
        f"parameters  {arch.n_parameters:,} ({'tied' if arch.tie_embeddings else 'untied'} embeddings)",
        f"  body       {arch.body_parameters:,}",
        f"  embedding  {arch.embedding_parameters:,}{'' if arch.tie_embeddings else ', and the head as many'}",
    ]


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
        heading += "\n  as with trainer.compile=none, by whose formulas compiled blocks are estimated"
    lines = memory_lines(estimate.components())
    return ["", heading, *lines[:-1], f"{lines[-1]}  (the most that is held at once: not the sum)"]


def _room(plan: Plan, arch: Architecture) -> list[str]:
    """A line if the memory does not fit on this machine."""
    try:
        note = check_step_fits(plan, arch)
    except LinrnnError as error:
        return [f"  cannot run here: {error.cause}", f"    -> {error.remedy}"]
    return [f"  {note}"] if note else []


def _time(plan: Plan, arch: Architecture) -> list[str]:
    """Lines: FLOPs, speed and duration; for a GPU of linrnn.costs also MFU, GPU-hours, price and the largest batch."""
    config, trainer, gpu, steps = plan.config, plan.config.trainer, _gpu(plan), plan.total_steps
    computed = costs.kernel_flops(arch, config, plan.precision, plan.world_size)
    found = seconds_of_step(plan, arch)
    needed = costs.model_flops(arch, plan.sequences_of_rank * trainer.accumulation_steps, trainer.seq_len)
    if computed is None or needed is None:
        return ["", f"FLOPs and time: {UNKNOWN}"]
    lines = [
        "",
        f"FLOPs per step{' and rank' * (plan.world_size > 1)}: {needed:.3e} of the model (as MFU counts), "
        f"{sum(computed.values()):.3e} with recomputation",
    ]
    if found is None:
        return [*lines, f"  time: {UNKNOWN if gpu else 'not estimated: the peak rate of this device is not known'}"]
    seconds, off = found
    fast, slow = seconds * max(1 - off, 0.5), seconds * (1 + off)
    step = f"{fast:,.0f} to {slow:,.0f} s" if slow >= 10 else f"{fast * 1e3:,.0f} to {slow * 1e3:,.0f} ms"
    speed = f"{plan.tokens_per_step / slow:,.0f} to {plan.tokens_per_step / fast:,.0f} tokens/s"
    whole = f"{duration(fast * steps)} to {duration(slow * steps)}"
    basis, more = "a factor of 2 either way; small models on a GPU are slower", []
    if gpu:
        peak = costs.peak_flops_per_second(gpu.name, plan.precision) or math.inf
        rates = f"{gpu.bytes_per_second / 1e12:.2f} TB/s, peak {peak / 1e12:,.0f} TFLOP/s"
        lines += [f"on {gpu.name}: {size_in_words(gpu.memory_bytes)}, {rates} in {plan.precision}"]
        speed += f", MFU {needed / (slow * peak):.0%} to {needed / (fast * peak):.0%}"
        hours = [time * steps * plan.world_size / 3600 for time in (fast, slow)]
        whole += f", {hours[0]:,.3f} to {hours[1]:,.3f} GPU-hours"
        if config.gpu_price is None:
            whole += "; gpu_price=PRICE of an hour gives its price"
        else:
            whole += f", price {hours[0] * config.gpu_price:,.2f} to {hours[1] * config.gpu_price:,.2f}"
        unit = plan.world_size // config.parallel.data_ranks(plan.world_size)
        batch = largest_batch(plan, arch, min(gpu.memory_bytes, (config.memory_budget_gib or math.inf) * GIB), unit)
        most = UNKNOWN if batch is None else f"trainer.batch_size={unit * batch}, without fragmentation"
        more = [f"  largest batch  {most}"]
        within = "9 of 10 steps measured on H100s and H200s lie in it"
        basis = (
            f"{off:.0%} either way; {within if gpu.is_measured else 'nothing was measured on this GPU'}"
            if off < 1
            else basis
        )
    return [
        *lines,
        f"  a step         {step}",
        f"  speed          {speed}",
        f"  the whole run  {whole}",
        *more,
        f"  range of times: {basis}",
        *(["  several GPUs: the time of their communication is left out"] if plan.world_size > 1 else []),
    ]


def largest_batch(plan: Plan, arch: Architecture, budget_bytes: float, unit: int = 1) -> int | None:
    """The largest trainer.batch_size, in units, whose step the formulas expect within the budget; None: no formulas.

    Args:
        unit: what trainer.batch_size is a multiple of, such as the ranks that share sequences (parallel=vocab).
    """

    def peak(batch: int) -> float:
        trainer = dataclasses.replace(plan.config.trainer, batch_size=unit * batch)
        larger = dataclasses.replace(plan, config=dataclasses.replace(plan.config, trainer=trainer))
        estimate = larger.memory_estimate(arch)
        return math.inf if estimate is None else estimate.peak

    return None if plan.memory_estimate(arch) is None else bisect_right(range(1, 4097), budget_bytes, key=peak)


def _gpu(plan: Plan) -> costs.Gpu | None:
    """The GPU of the forecast: the one that `gpu` names, else this device; None if linrnn.costs does not know it."""
    if plan.config.gpu:
        return costs.GPUS[plan.config.gpu]
    return next((gpu for gpu in costs.GPUS.values() if gpu.name == device_name(plan.device)), None)


def seconds_of_step(plan: Plan, arch: Architecture) -> tuple[float, float] | None:
    """Expected seconds of a step, and the share by which they may be too few; None: unknown FLOPs or peak rate."""
    run, gpu = (arch, plan.config, plan.precision, plan.world_size), _gpu(plan)
    flops = costs.kernel_flops(*run)
    seconds = gpu and costs.step_seconds(gpu, *run)
    if gpu and seconds:
        return seconds, costs.uncertainty(gpu)
    if plan.config.gpu:
        return None
    rate: float | None
    if plan.device.type == "cpu":
        rate, share = _cpu_rate(compute_dtype(plan.precision)), costs.ASSUMED_CPU_SHARE
    else:
        rate, share = costs.peak_flops_per_second(device_name(plan.device), plan.precision), costs.ASSUMED_MFU
    return None if flops is None or rate is None else (sum(flops.values()) / (rate * share), 1.0)


@lru_cache
def _cpu_rate(dtype: torch.dtype) -> float:
    """FLOP/s of each rank, measured with this process's threads. Ranks with more threads than cores share the cores."""
    return matmul_rate(dtype) * min(1.0, cores() / (torch.get_num_threads() * ranks_here()))
