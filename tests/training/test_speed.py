"""A run's reported speed equals the wall clock's, over all processes of the run."""

import time
from typing import Any
from unittest.mock import Mock

import pytest
from fitting import fitted, records, summary_of

from linrnn.config import load_config
from linrnn.core.errors import SharedGpuFullError
from linrnn.core.machine import SHARED_GPU
from linrnn.runs.measurements import is_cpu_bound, memory_of_run, speed_of_run, uneven_steps
from linrnn.runs.metrics import JsonlWriter, read_jsonl
from linrnn.training import trainer as trainer_module
from linrnn.training.checkpoint import Checkpointer
from linrnn.training.trainer import Trainer

TOKENS = 160  # of a step of the small run


def slow_writing(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    write = JsonlWriter.write
    monkeypatch.setattr(JsonlWriter, "write", lambda self, record: (time.sleep(seconds), write(self, record)))


@pytest.mark.parametrize("log_every", [1, 4])
def test_a_slow_host_shows_in_the_wall_clock_and_not_in_the_steps(log_every, small, monkeypatch, capsys):
    """Writing metrics takes a quarter of a second. This time lies between steps, while a GPU would be idle."""
    seconds = 0.25
    slow_writing(monkeypatch, seconds)
    options = ("trainer.max_steps=8", "trainer.warmup_measurement_steps=2", f"trainer.log_every={log_every}")
    trainer = fitted(small(*options))
    summary = summary_of(trainer)
    assert summary["measured_steps"] == 6
    assert summary["tokens_per_second_is"] == "wall clock"
    writes = 6 if log_every == 1 else 1  # of steps 2 to 7
    assert summary["host_step_ms"] >= 0.99e3 * seconds * writes / 6
    assert summary["wall_step_ms"] >= summary["host_step_ms"]
    assert summary["tokens_per_second"] == pytest.approx(1e3 * TOKENS / summary["wall_step_ms"])
    steps = records(trainer)
    assert min(record["speed/step_ms"] for record in steps if "speed/step_ms" in record) < 1e3 * seconds
    assert [r.get("speed/measured_steps") for r in steps] == ([None, None] + [1] * 6 if log_every == 1 else [2, 4])
    out = capsys.readouterr().out
    assert "CPU-bound" not in out, "a CPU has no host beside it"
    assert "on the device" not in out


def test_validation_and_checkpoints_are_no_part_of_the_speed(small, monkeypatch):
    """Each takes half a second every time. All steps, and the host's work between them, are counted once."""
    pauses: list[float] = []
    starts: list[float] = []

    def slowly(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            time.sleep(0.5)
            result = function(*arguments, **options)
            pauses.append(time.perf_counter() - begun)
            return result

        monkeypatch.setattr(owner, name, call)

    slowly(trainer_module, "evaluate")
    slowly(Checkpointer, "save")
    step = Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", lambda self: (starts.append(time.perf_counter()), step(self))[1])
    every = ("trainer.valid_every=3", "trainer.checkpoint_every=3")
    options = ("trainer.max_steps=8", "trainer.warmup_measurement_steps=0", *every)
    trainer = fitted(small(*options))
    summary = summary_of(trainer)
    assert summary["measured_steps"] == 8
    before_last = starts[-1] - starts[0]
    last = records(trainer)[-1]["speed/wall_step_ms"] / 1e3
    measured = summary["wall_step_ms"] * 8 / 1e3
    *between, _, _ = pauses  # the last checkpoint and validation follow the last step
    assert measured == pytest.approx(before_last + last - sum(between), abs=0.25)
    assert measured < before_last + last - 1.9


def test_a_resumed_run_has_the_figures_of_all_its_processes(small):
    """The last process makes four steps, all of them warm-up."""
    options = ("trainer.warmup_measurement_steps=5", "schedule.steps=24")
    first = Trainer(load_config(small(*options, "trainer.max_steps=12"))).fit()
    trainer = Trainer(load_config(small(*options, "trainer.max_steps=16")))
    second = trainer.fit()
    assert second["steps"] == 16
    for name in ("tokens_per_second", "wall_step_ms", "step_time_ms_median", "measured_steps", "loss_layer_ms", "mfu"):
        assert second[name] == first[name], name
    assert second["memory_bytes"] == first["memory_bytes"]
    assert second["wall_seconds"] > first["wall_seconds"] - 1, "of both processes, less what followed the last step"
    third = Trainer(load_config(small(*options, "trainer.max_steps=24"))).fit()
    assert third["measured_steps"] == 7 + 3


def test_a_run_on_a_shared_gpu_has_losses_and_memory_and_no_times(small, monkeypatch, capsys):
    """The second process of the run shares its GPU, the first had its own."""
    options = ("trainer.warmup_measurement_steps=1", "schedule.steps=8")
    alone = Trainer(load_config(small(*options, "trainer.max_steps=4"))).fit()
    assert (alone["gpu_shared"], alone["measured_steps"]) == (False, 3)
    monkeypatch.setenv(SHARED_GPU, "1")
    capsys.readouterr()
    trainer = Trainer(load_config(small(*options, "trainer.max_steps=8")))
    shared = trainer.fit()
    assert shared.keys() == alone.keys()
    assert shared["gpu_shared"] is True
    assert shared["tokens_per_second_is"] == "not measured: other runs shared the GPU"
    times = "tokens_per_second wall_step_ms step_time_ms_median host_step_ms loss_layer_ms mfu"
    assert {shared[name] for name in times.split()} == {None}
    assert shared["measured_steps"] == 0
    assert shared["train_loss_nats"] is not None
    assert shared["peak_memory_bytes"] > 0
    timed = [record["step"] for record in records(trainer) if any(key.startswith("speed/") for key in record)]
    assert timed == [2, 3, 4], "of the process that had the GPU alone"
    said = capsys.readouterr().out
    assert "not measured: other runs shared the GPU" in said
    assert "tokens/s by wall clock" not in said


def test_memory_that_runs_out_on_a_shared_gpu_is_a_failure_with_a_remedy(small, monkeypatch):
    monkeypatch.setattr(Trainer, "train_step", Mock(side_effect=RuntimeError("CUDA out of memory")))
    monkeypatch.setenv(SHARED_GPU, "1")
    trainer = Trainer(load_config(small()))
    with pytest.raises(SharedGpuFullError, match="lower jobs"):
        trainer.fit()
    summary = summary_of(trainer)
    assert (summary["status"], summary["gpu_shared"]) == ("failed", True)


def record(**metrics: Any) -> dict[str, Any]:
    return {"step": 1, **{f"speed/{name}": value for name, value in metrics.items()}}


def test_figures_weigh_records_by_their_steps():
    records = [
        {"step": 1, "train/loss_nats": 1.0},  # warm-up
        record(wall_step_ms=30.0, step_ms=10.0, measured_steps=1),
        record(wall_step_ms=10.0, step_ms=8.0, measured_steps=3),
    ]
    figures = speed_of_run(records, tokens_per_step=600)
    assert figures["wall_step_ms"] == 15
    assert figures["tokens_per_second"] == 40_000
    assert figures["step_time_ms_median"] == 8
    assert figures["host_step_ms"] == 15 - 34 / 4
    assert figures["measured_steps"] == 4
    assert is_cpu_bound(figures)
    assert not is_cpu_bound({**figures, "host_step_ms": 0.3})
    assert not is_cpu_bound({**figures, "device": "cpu"})
    assert not is_cpu_bound({"tokens_per_second": 1.0}), "a summary of an earlier version"
    nothing = speed_of_run(records[:1], tokens_per_step=600)
    assert (nothing["tokens_per_second"], nothing["measured_steps"], nothing["loss_layer_ms"]) == (None, 0, None)


def test_a_mean_step_far_from_the_median_is_named():
    even = {"step_time_ms_median": 10.0, "wall_step_ms": 11.5, "host_step_ms": 0.6}
    assert uneven_steps(even) is None
    assert "2.00 times the median" in (uneven_steps(even | {"wall_step_ms": 20.6}) or "")


def test_memory_is_the_most_of_any_process():
    records = [
        {"step": 6, "memory/peak_gib": 1.5, "memory/optimizer_gib": 0.25},
        {"step": 9, "valid/loss_nats": 1.0, "memory/peak_gib": 1.25},
    ]
    assert memory_of_run(records) == {"peak": 3 * 2**29, "optimizer": 2**28}


@pytest.mark.gpu
def test_on_a_gpu_a_slow_host_shows_in_the_wall_clock_alone(small, monkeypatch):
    slow_writing(monkeypatch, 0.2)
    summary = Trainer(load_config(small("trainer.max_steps=30", "device=cuda"))).fit()
    assert summary["step_time_ms_median"] < 100
    assert 195 < summary["host_step_ms"] < summary["wall_step_ms"]


@pytest.mark.gpu
def test_on_a_gpu_no_record_beside_a_validation_stands_out(small):
    """The host reads the last step before a validation at once, and every other step after the next has begun."""
    trainer = fitted(small("trainer.max_steps=30", "trainer.valid_every=4", "device=cuda"))
    measured = [r for r in records(trainer) if "speed/step_ms" in r]
    assert len(measured) == 30 - trainer.plan.unmeasured_steps
    for record in measured:
        assert record["speed/wall_step_ms"] >= 0.99 * record["speed/step_ms"], record["step"]


def test_what_a_run_records_about_itself(small):
    from datetime import UTC, datetime

    began = datetime.now(UTC).replace(microsecond=0)
    trainer = fitted(small("trainer.valid_every=2"))
    ended, summary = datetime.now(UTC), summary_of(trainer)
    log = (trainer.directory.path / "train.log").read_text().splitlines()
    dates = [
        *(record["time"] for record in read_jsonl(trainer.directory.metrics)),
        summary["started"],
        summary["ended"],
        *(line.split()[0] for line in log if line),
    ]
    assert all(began <= datetime.fromisoformat(date) <= ended for date in dates)
    assert all(date.endswith("+00:00") for date in dates)
    promised = (
        "status model size loss data seed n_parameters batch_size seq_len steps tokens train_loss_nats "
        "valid_loss_nats valid_perplexity valid_bits_per_byte peak_memory_bytes tokens_per_second "
        "step_time_ms_median loss_layer_ms mfu device"
    )
    assert set(promised.split()) <= summary.keys()
    last = records(trainer)[-1]
    assert last["speed/tokens_per_second"] == pytest.approx(160 / (last["speed/wall_step_ms"] / 1e3))
    assert last["speed/wall_step_ms"] >= last["speed/step_ms"] > last["speed/loss_forward_ms"] > 0
    assert last["train/lr"] > 0
    assert last["train/tokens"] == 3 * 160
    assert last["train/epoch"] == summary["epochs"] == 3 * 2 / 249, "of (20,000 - 1) // 80 blocks"
    assert any("0.02 epochs" in line for line in log)
    validations = records(trainer, "valid/loss_nats")
    assert [r["step"] for r in validations] == [2, 3]
    assert validations[-1]["memory/parameters_gib"] == pytest.approx(4 * 461_696 / 2**30)
