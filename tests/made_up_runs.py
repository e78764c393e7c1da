"""Runs as a report reads them, made up for tests: every figure of a summary, without training."""

from collections.abc import Sequence
from typing import Any

from linrnn.report.runs import LOSS, Run
from linrnn.report.targets import Target, Verdict

GIB = 2**30
HERE = {"packages": {"torch": "2.11"}, "gpus": [{"name": "H200"}], "git": {"commit": "a" * 40, "dirty": False}}
ELSEWHERE = {**HERE, "gpus": [{"name": "H100"}]}


def run(loss: str, *, seed: int = 0, gib: float = 10, speed: float = 1000, nats: float = 5.0, **more: Any) -> Run:
    summary = {
        "status": "finished", "reason": None, "device": "H200", "world_size": 1, "group": "g",
        "run_name": f"gla-{loss}-{more.get('batch_size', 8)}-s{seed}", "command": "python train.py experiment=mve",
        "model": "gla", "size": "mve", "loss": loss, "loss_options": {}, "data": "text", "seed": seed,
        "n_parameters": 10_000_000, "vocab_size": 32000, "hidden_size": 256, "chunk_size": None,
        "batch_size": 8, "accumulation_steps": 1, "seq_len": 2048, "steps": 60, "tokens": 1,
        "activation_checkpointing": "none", "precision": "bf16_autocast",
        "training": f"schedule.steps={more.get('steps', 60)}",
        "train_loss_nats": nats, "valid_loss_nats": nats, "valid_perplexity": 150 + 10 * (nats - 5),
        "valid_bits_per_byte": 2.0, "memory_budget_gib": None,
        "peak_memory_bytes": int(gib * GIB), "peak_memory_is": "allocated on the GPU",
        "memory_bytes": {"peak": int(gib * GIB), "loss_forward": 0, "loss_backward": GIB, "parameters": GIB},
        "tokens_per_second": speed, "tokens_per_second_is": "wall clock", "mfu": 0.1, "measured_steps": 50,
        "step_time_ms_median": 1.0, "wall_step_ms": None,
        **more,
    }  # fmt: skip
    return Run(summary, [HERE], {LOSS: [(step, nats + 1 / step) for step in range(1, 41)]})


def only(found: Sequence[Verdict], target: Target, backend: str, against: str | None) -> Verdict:
    (verdict,) = [v for v in found if (v.target, v.backend, v.against) == (target, backend, against)]
    return verdict


FIVE_SEEDS = [
    *(run("compiled", seed=seed, gib=10, speed=1000) for seed in range(5)),
    *(run("standard", seed=seed, gib=20, speed=900) for seed in range(5)),
    *(
        run("cce_kahan", seed=s, gib=g, speed=v, nats=5.004)
        for s, g, v in ((0, 5, 1090), (1, 5.5, 1100), (2, 5.2, 1000), (3, 5.2, 1090), (4, 5.1, 1100))
    ),
]


def five(loss: str, **more: Any) -> list[Run]:
    return [run(loss, seed=seed, **more) for seed in range(5)]


def answer(loss: str, batch: int, speed: float, environment: dict[str, Any] = HERE) -> dict[str, Any]:
    probes = [{"batch": batch, "fits": True, "tokens_per_second": speed, "peak_bytes": 1, "foreseen_bytes": 1}]
    found = {"max_sequences": batch, "exact": True, "memory_budget_gib": 80.0, "probes": probes}
    return {**run(loss).summary, **found, "environment": environment}


BLOCKS, FLOAT8 = (f"trainer.compile=blocks trainer.float8={kind} seed=free" for kind in ("none", "blocks"))


def trained(loss: str, seed: int, training: str, nats: float, model: str = "gla") -> Run:
    name = f"{model}-{loss}-{training}-s{seed}".replace(" ", "-")
    return run(loss, seed=seed, nats=nats, training=training, model=model, run_name=name)
