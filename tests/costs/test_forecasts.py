"""Forecasts for a GPU that is not here, against every committed run of 350M and 1.3B parameters on H100 and H200."""

import json
import lzma
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from linrnn import costs
from linrnn.config import load_config
from linrnn.config.schema import GPUS, FindMaxBatchConfig
from linrnn.core.errors import ConfigError
from linrnn.core.machine import GIB
from linrnn.experiments import max_batch
from linrnn.experiments.dry_run import largest_batch, print_forecast
from linrnn.models.architecture import resolve
from linrnn.training.plan import make_training_plan

ROOT = Path(__file__).resolve().parents[2]
NAMES = {gpu.name: key for key, gpu in costs.GPUS.items()}
# On this machine and day the host decided: the same run with twice the vocabulary was faster.
BUSY_HOST = {("gla", "350m", "standard", 65536)}
FORMULAS = ("model", "size", "loss", "vocab_size", "batch_size", "seq_len", "activation_checkpointing", "device")


def measured() -> Iterator[dict[str, Any]]:
    """Committed summaries of runs as the formulas describe them."""
    for path in sorted((ROOT / "results" / "summaries").glob("*/runs.json.xz")):
        for run in json.loads(lzma.decompress(path.read_bytes()))["runs"]:
            plain = run["parallel"] == "none" and run["precision"] == "bf16_autocast" and run["accumulation_steps"] == 1
            settings = run["training"] or ""
            usual = "compile=none" in settings and "float8=blocks" not in settings and "cuda_graph=True" not in settings
            whole = run["model"] in ("gla", "gated_deltanet", "kda", "transformer") and "-r" not in run["run_name"]
            known = run["device"] in NAMES and run["size"] in ("350m", "1b3")
            if run["status"] == "finished" and run["tokens_per_second"] and plain and usual and whole and known:
                yield run


@cache
def foreseen(model: str, size: str, loss: str, vocab: int, batch: int, seq: int, again: str, device: str) -> tuple:
    """Peak bytes and tokens/s, by the formulas."""
    trainer = [f"trainer.batch_size={batch}", f"trainer.seq_len={seq}", f"trainer.activation_checkpointing={again}"]
    config = load_config([f"model={model}", f"size={size}", f"loss={loss}", *trainer])
    run = resolve(config.model, config.size, vocab), config, "bf16_autocast"
    memory, seconds = costs.memory_estimate(*run), costs.step_seconds(costs.GPUS[NAMES[device]], *run)
    return memory.peak, batch * seq / seconds


def test_committed_runs_lie_within_the_forecasts():
    runs = list(measured())
    assert len(runs) > 100
    assert {run["device"] for run in runs} == {gpu.name for gpu in costs.GPUS.values() if gpu.is_measured}
    inside = []
    for run in runs:
        key = tuple(run[name] for name in FORMULAS)
        peak, speed = foreseen(*key)
        assert peak == pytest.approx(run["peak_memory_bytes"], rel=0.10), key
        off = run["tokens_per_second"] / speed
        assert key[:4] in BUSY_HOST or off == pytest.approx(1, abs=0.25), key
        inside.append(abs(off - 1) <= costs.uncertainty(costs.GPUS[NAMES[run["device"]]]))
    assert sum(inside) / len(inside) >= 0.9, "as the forecast says of its range"


LINE = ["model=gla", "size=1b3", "trainer.batch_size=8", "trainer.seq_len=2048", "size.vocab_size=128256"]
LINE += ["dry_run=true"]


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_has_a_forecast_for_a_loss_that_does_not_run_here(gpu, capsys):
    print_forecast(load_config([*LINE, "loss=liger", f"gpu={gpu}", "gpu_price=2.5"]))
    printed = capsys.readouterr().out
    assert costs.GPUS[gpu].name in printed
    assert "bf16_autocast" in printed, "the precision there"
    for word in ("tokens/s", "MFU", "GPU-hours", "price", "largest batch", "loss_backward"):
        assert word in printed
    assert ("cannot run here" in printed) == (costs.GPUS[gpu].memory_bytes < 26 * GIB)
    assert ("nothing was measured on this GPU" in printed) == (gpu not in ("h100", "h200"))


@pytest.mark.parametrize(
    ("loss", "checkpointing", "largest"),  # of committed searches on an H100 with 80 GB
    [("cce_kahan", "none", 13), ("compiled", "full", 64), ("standard", "none", 7), ("liger", "full", 87)],
)
def test_the_largest_batch_is_the_one_that_searches_found(loss, checkpointing, largest):
    line = [*LINE, f"loss={loss}", f"trainer.activation_checkpointing={checkpointing}", "gpu=h100"]
    plan = make_training_plan(load_config(line))
    found = largest_batch(plan, plan.architecture(512), 77.5 * GIB)
    assert abs(found - largest) <= max(1, 0.05 * largest)


def test_ranks_that_share_a_model_share_its_update():
    config = {name: load_config([*LINE, "loss=cce_kahan", f"parallel={name}"]) for name in ("ddp", "fsdp")}
    arch = resolve(config["ddp"].model, config["ddp"].size, 128256)
    seconds = {name: costs.step_seconds(costs.GPUS["h100"], arch, run, "bf16", 8) for name, run in config.items()}
    spared = 7 / 8 * 28 * arch.n_parameters / 3.35e12
    assert seconds["ddp"] - seconds["fsdp"] == pytest.approx(spared, rel=1e-3)


def test_a_search_is_estimated_without_a_gpu(monkeypatch):
    said: list[str] = []
    line = LINE[:-1]
    config = FindMaxBatchConfig(dry_run=True, gpu="h100")
    monkeypatch.setattr(max_batch, "say", said.append)
    answer = max_batch.find_max_batch(config, [*line, "loss=cce_kahan"])
    assert answer.estimated in (13, 14)
    assert f"estimated for NVIDIA H100 80GB HBM3 with 79.2 GiB: {answer.estimated} sequences" in said


def test_a_gpu_is_named_for_a_forecast_alone():
    with pytest.raises(ConfigError, match=r"(?s)gpu=h100 names the GPU of a forecast.*dry_run=true"):
        make_training_plan(load_config(["gpu=h100", "logger.wandb.mode=disabled"]))
