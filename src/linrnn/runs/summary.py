"""summary.json, and the lines that a run prints: progress, memory and results."""

import dataclasses
import os
import shlex
from pathlib import Path
from typing import Any

from linrnn.config import overrides_of, run_name
from linrnn.config.naming import HORIZON, paths
from linrnn.config.schema import Config
from linrnn.config.steps import CONSTANT, ending_at, horizon
from linrnn.core.dates import utc_now
from linrnn.core.machine import size_in_words
from linrnn.losses.base import OBJECTIVE
from linrnn.runs.directory import CHECKPOINTS, CONFIG, ENVIRONMENT, LOG, METRICS, PICTURE, SUMMARY, RunDirectory
from linrnn.runs.measurements import NOT_MEASURED, is_cpu_bound, uneven_steps

MEAN_OF_LAST = 50  # train_loss_nats is the mean over this many last steps, or over all if there are fewer
WIDTH = 13  # of the names of printed figures

# Keys that every summary has in addition to those that name the run. They are null if the run did not get that far.
MEASURED = (
    *("continues", "n_parameters", "hidden_size", "world_size", "vocab_size", "precision", "epochs"),
    *("train_loss_nats", "entropy_floor_nats", "valid_loss_nats", "valid_perplexity", "valid_bits_per_byte"),
    *("peak_memory_bytes", "peak_memory_is", "memory_bytes", "gpu_shared"),
    *("tokens_per_second", "tokens_per_second_is", "wall_step_ms", "step_time_ms_median", "host_step_ms"),
    *("loss_layer_ms", "measured_steps", "mfu", "wall_seconds", "started", "ended"),
    *("device", "gpu_state", "data_fingerprint"),
)


def names_of_run(config: Config, world_size: int = 1) -> dict[str, Any]:
    """The keys by which a summary tells a run from others."""
    trainer = config.trainer
    return {
        "choices": shlex.join(overrides_of(config)),  # all choices; a long run name has only some
        "model": config.model.label,
        "size": config.size.name,
        "loss": config.loss.name,
        "data": config.data.name,
        "seed": config.seed,
        "group": config.group,
        "run_name": run_name(config, world_size),
        "batch_size": trainer.batch_size,
        "accumulation_steps": trainer.accumulation_steps,
        "seq_len": trainer.seq_len,
        "activation_checkpointing": trainer.activation_checkpointing,
        "chunk_size": config.model.chunk_size,
        "parallel": config.parallel.name,
        "loss_options": {k: v for k, v in dataclasses.asdict(config.loss).items() if k not in ("name", *OBJECTIVE)},
        "memory_budget_gib": config.memory_budget_gib,
        "training": _training(config, world_size),
    }


def _training(config: Config, world_size: int) -> str:
    """Everything else that decides how a run learns and is validated. Runs that differ in it are not compared."""
    values = {f"optimizer.{key}": value for key, value in dataclasses.asdict(config.optimizer).items()}
    values |= {f"schedule.{key}": value for key, value in dataclasses.asdict(config.schedule).items()}
    values |= {
        HORIZON: horizon(config, world_size),
        **{key: _from_here(path) for key, path in paths(config).items() if not key.startswith("data.")},
        "data.reset_at_document": config.data.reset_at_document,
        "size.tie_embeddings": config.size.tie_embeddings,
        "trainer.valid_tokens": config.trainer.valid_tokens,
        "trainer.compile": config.trainer.compile,
        "trainer.float8": config.trainer.float8,
        "trainer.cuda_graph": config.trainer.cuda_graph,
        "trainer.deterministic": config.trainer.deterministic,
        **{f"loss.{key}": value for key in OBJECTIVE if (value := getattr(config.loss, key))},
    }
    return " ".join(f"{key}={value}" for key, value in values.items())


def _from_here(path: str | None) -> str | None:
    """A resolved path without the working directory, so that runs on several machines compare."""
    return path and path.removeprefix(f"{os.path.realpath('.')}/")


def summary_without_measurements(
    config: Config, world_size: int, status: str, reason: str | None, command: str
) -> dict[str, Any]:
    """The summary of a run that measured nothing: it could not start, or died before it wrote one."""
    return {
        "status": status,
        "reason": reason,
        **names_of_run(config, world_size),
        "steps": 0,
        "tokens": 0,
        **dict.fromkeys(MEASURED),
        "ended": utc_now(),
        "command": command,
    }


def status_of(exit_code: int) -> str:
    """The status of a run whose process ended with this exit code (not 0)."""
    return {4: "unsupported", 5: "out_of_memory", 6: "diverged"}.get(exit_code, "failed")


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def progress_line(
    loss: float,
    lr: float,
    grad_norm: float,
    tokens_per_second: float | None,
    mfu: float | None,
    seconds_left: float | None,
) -> str:
    """Smoothed loss, speed and time left, learning rate, gradient norm, MFU."""
    words = [
        f"loss {loss:.4f}",
        "warming up" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s",
        None if seconds_left is None else f"{duration(seconds_left)} left",
        f"lr {lr:.1e}",
        f"grad norm {grad_norm:.2f}",
        None if mfu is None else f"MFU {mfu:.1%}",
    ]
    return " | ".join(filter(None, words))


def memory_lines(components: dict[str, int]) -> list[str]:
    """Bytes by component as lines. A name `whole/part` is indented."""
    rows = [("  " * name.count("/") + name.rsplit("/", 1)[-1], size) for name, size in components.items()]
    return [f"  {name:<24}{size_in_words(size):>12}" for name, size in rows]


def finished_lines(config: Config, directory: RunDirectory, steps: int, horizon: int) -> list[str]:
    """What a command prints if its run is finished already: nothing was done, and how to go on."""
    end = 2 * steps if config.schedule.name == CONSTANT else horizon  # a constant schedule has no end
    return [
        f"{directory.path} is finished: {steps} steps; nothing was run or written",
        *([f"  -> {ending_at(end, config)} continues it on its schedule"] * (steps < end)),
        "  -> trainer.resume=never moves it aside and runs it again",
        f"  -> {directory.taking_over} trains on from its state, under a schedule of its own",
    ]


def final_lines(config: Config, directory: Path, summary: dict[str, Any]) -> list[str]:
    """The printed summary: figures and files."""
    names = (SUMMARY, PICTURE, METRICS, LOG, CONFIG, ENVIRONMENT, CHECKPOINTS)
    return [
        "",
        f"{config.model.label} x {config.size.name} x {config.loss.name} on {summary['device']}:",
        *(f"  {key:<{WIDTH}}  {value}" for key, value in _figures(summary).items()),
        "",
        f"wrote {directory}/",
        f"  {', '.join(name for name in names if (directory / name).exists())}",
    ]


def _figures(summary: dict[str, Any]) -> dict[str, str]:
    """Figures by name, in words, without those that were not measured."""
    s, on_device = summary, "" if summary["device"] == "cpu" else " on the device"
    of_loss = "".join(f", loss {name} {ms:.1f} ms" for name, ms in (s["loss_layer_ms"] or {}).items())
    from_step = f", {s['wall_step_ms']:.1f} ms from step to step (mean)" if s["wall_step_ms"] else ""
    forms = {
        "parameters": ("n_parameters", "{:,}"),
        "train loss": ("train_loss_nats", f"{{:.4f}} nats (mean of the last {min(MEAN_OF_LAST, s['steps'])} steps)"),
        "valid loss": ("valid_loss_nats", "{:.4f} nats"),
        "entropy floor": ("entropy_floor_nats", "{:.4f} nats"),
        "perplexity": ("valid_perplexity", "{:.3f}"),
        "bits per byte": ("valid_bits_per_byte", "{:.4f}"),
        "speed": ("tokens_per_second", "{:,.0f} tokens/s by wall clock" + from_step),
        "step time": ("step_time_ms_median", f"{{:.1f}} ms{on_device} (median){of_loss}"),
        "MFU": ("mfu", "{:.1%}"),
    }
    figures = {
        "status": f"{s['status']} after {s['steps']} steps, {s['tokens']:,} tokens, {s['epochs']:.2f} epochs",
        **{name: form.format(s[key]) for name, (key, form) in forms.items() if s[key] is not None},
        **({"speed": NOT_MEASURED} if s["gpu_shared"] else {}),
    }
    if is_cpu_bound(s):
        figures["host"] = f"CPU-bound: {s['host_step_ms']:.1f} ms of each step pass between the device's steps"
    if uneven := uneven_steps(s):
        figures["uneven steps"] = uneven
    if s["peak_memory_bytes"]:
        figures["peak memory"] = f"{size_in_words(s['peak_memory_bytes'])} ({s['peak_memory_is']})"
    return figures
