"""parallel=ddp on gloo: N processes train like one, stop together, can continue with another N, and never hang."""

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data_helpers import sentences, write_jsonl
from forked import ended, run_torchrun, start, torchrun_anew
from rank_process import ROUNDING, as_rank, assert_same_curve, curve, output, start_ranks, summary_of, wait_for_step

from linrnn.config import load_config
from linrnn.core.errors import ConfigError
from linrnn.distributed import Launch
from linrnn.training.checkpoint import found
from linrnn.training.trainer import Trainer

Small = Callable[..., list[str]]
RESET = ("data.reset_at_document=true", "loss=standard", "trainer.valid_every=2")


def gpus(*values: object) -> Any:
    """A case that needs two GPUs."""
    few = torch.cuda.device_count() < 2
    return pytest.param(*values, marks=[pytest.mark.gpu, pytest.mark.skipif(few, reason="needs 2 GPUs")])


# How the ranks of a fault train. With "graph" the fault comes in the first replay that is not the capture's own.
WAYS = {
    "cpu": ("parallel=ddp", "device=cpu"),
    "cuda": ("parallel=ddp", "device=cuda"),
    "graph": (
        *("parallel=fsdp", "device=cuda", "loss=cce_kahan"),
        *("trainer.cuda_graph=true", "trainer.warmup_measurement_steps=2"),
    ),
}


@pytest.fixture(scope="module")
def one(small_of_module: Small) -> tuple[Trainer, dict[str, Any]]:
    """One process that trained on four sequences a step, and its summary."""
    trainer = Trainer(load_config(small_of_module(*RESET, "trainer.batch_size=4")))
    return trainer, trainer.fit()


@pytest.mark.parametrize(("world_size", "batch_size", "accumulation_steps"), [(1, 4, 1), (4, 1, 1), (2, 1, 2)])
def test_n_ranks_have_the_losses_gradients_and_validation_of_one(
    world_size, batch_size, accumulation_steps, one, small, trained, tmp_path
):
    """With document resets ranks have different numbers of labels, so a mean of means would differ."""
    trainer, reference = one
    cut = (f"trainer.batch_size={batch_size}", f"trainer.accumulation_steps={accumulation_steps}")
    directory = trained(small(*RESET, *cut, "parallel=ddp", "group=ddp"), world_size)
    summary = summary_of(directory)
    assert_same_curve(directory, trainer.directory.path)
    assert summary["valid_loss_nats"] == pytest.approx(reference["valid_loss_nats"], rel=ROUNDING)
    for name in ("steps", "tokens", "status", "data_fingerprint"):
        assert summary[name] == reference[name]
    assert summary["world_size"] == world_size
    assert summary["tokens_per_second"] == pytest.approx(4 * 80 / (summary["wall_step_ms"] / 1e3))
    assert 0 < summary["step_time_ms_median"] < summary["wall_step_ms"] + 1
    assert (directory / "train.log").read_text().count("valid at step 2") == 1
    assert output(tmp_path / "ranks", world_size).count("valid at step 2") == 1, "rank 0 alone speaks"


def test_a_rank_whose_rehearsal_fails_trains_with_the_others(one, small, tmp_path):
    """A rehearsal waits for no other rank, and leaves no gradient behind."""
    log = tmp_path / "ranks"
    overrides = small(*RESET, "trainer.batch_size=2", "parallel=ddp", "group=ddp")
    assert ended(start_ranks(overrides, 2, log, "not_rehearsed")) == [0, 0], output(log, 2)
    failed = "compiling ahead failed (ValueError: no rehearsal)"
    assert [output(log, 2).count(failed), Path(f"{log}.1").read_text().count(failed)] == [1, 1]
    assert_same_curve(next((tmp_path / "results/ddp").iterdir()), one[0].directory.path)


def test_ranks_count_the_bytes_of_the_labels_that_each_evaluates(on_text, trained, tmp_path):
    """Five batches of short documents on two ranks: in the last round one rank has no batch."""
    documents = [text.encode("ascii", "ignore").decode() for text in sentences(600)]
    path = write_jsonl(tmp_path / "text.jsonl", documents)
    text = on_text(f"data.path={path}", "data.valid_fraction=0.05", "data.reset_at_document=true")
    one = Trainer(load_config([*text, "trainer.batch_size=2"]))
    reference = one.fit()
    summary = summary_of(trained([*text, "trainer.batch_size=1", "parallel=ddp", "group=ddp"], 2))
    assert summary["valid_bits_per_byte"] == pytest.approx(reference["valid_bits_per_byte"], rel=ROUNDING)
    valid, tokenizer = one.data.valid, one.data.tokenizer
    firsts = [0, *valid.document_ends.tolist()]
    labels = [int(i) for at, i in enumerate(valid.read(0, 401)) if at not in firsts and i != tokenizer.eos_id]
    assert valid.document_ends[3] < 401, "several documents"
    n_bytes = len(tokenizer.decode(labels).encode())
    n_labels = 401 - sum(at < 401 for at in firsts)
    expected = n_labels * summary["valid_loss_nats"] / math.log(2) / n_bytes
    assert summary["valid_bits_per_byte"] == pytest.approx(expected, rel=1e-9)


def test_muon_updates_every_replica_alike(small, trained):
    """Newton-Schulz computes in bf16, so that after an update rounding differs by more than without it."""
    options = ("model=transformer", "optimizer=muon")
    one = Trainer(load_config(small(*options, "trainer.batch_size=2")))
    one.fit()
    ranks = curve(trained(small(*options, "trainer.batch_size=1", "parallel=ddp", "group=ddp"), 2))
    for step, figures in curve(one.directory.path).items():
        assert ranks[step] == pytest.approx(figures, rel=ROUNDING if step == 1 else 1e-3)


def test_a_signal_to_one_rank_stops_all_at_one_step_and_another_number_of_ranks_continues(small, trained, tmp_path):
    same = ("schedule=constant", "schedule.steps=2000", "schedule.warmup_steps=0")  # of another max_steps
    distributed = (*same, "parallel=ddp", "group=ddp")
    log = tmp_path / "stopped"
    ranks = start_ranks(small(*distributed, "trainer.batch_size=1", "trainer.max_steps=2000"), 4, log)
    directory = wait_for_step(tmp_path / "results/ddp", 5)
    os.kill(ranks[2].pid or 0, signal.SIGTERM)
    assert ended(ranks) == [128 + signal.SIGTERM] * 4, output(log, 4)
    assert output(log, 4).count("error: interrupted at step") == 1
    stopped = summary_of(directory)
    assert stopped["status"] == "interrupted"
    assert 5 <= stopped["steps"] < 2000
    assert found(directory / "checkpoints")[-1].name == f"step_{stopped['steps']:08d}"
    end = f"trainer.max_steps={stopped['steps'] + 3}"
    assert trained(small(*distributed, "trainer.batch_size=2", end), 2) == directory
    assert f"resuming at step {stopped['steps']}" in (directory / "train.log").read_text()
    one = Trainer(load_config(small(*same, "trainer.batch_size=4", end)))
    reference = one.fit()
    expected = curve(one.directory.path)
    assert list(curve(directory)) == list(range(1, stopped["steps"] + 4))
    for step, (loss, _) in curve(directory).items():
        assert loss == pytest.approx(expected[step][0], rel=1e-3), step  # rounding grows over the steps
    assert summary_of(directory)["valid_loss_nats"] == pytest.approx(reference["valid_loss_nats"], rel=1e-3)


def test_a_signal_before_the_first_step_ends_the_ranks_with_its_exit_code(small, tmp_path):
    log = tmp_path / "ranks"
    codes = ended(start_ranks(small("parallel=ddp", "group=ddp"), 2, log, "signalled_at_once"))
    assert codes == [128 + signal.SIGUSR1] * 2, output(log, 2)
    assert output(log, 2).count("error: interrupted; no checkpoint was written") == 1
    assert not (tmp_path / "results").exists()


FAULTS = {
    "nan": (6, "diverged", "step 3: loss nan"),
    "killed": (1, "failed", "rank 1 stopped: its process has died"),
    "killed_and_waited_for": (1, "failed", "rank 1 stopped: its process has died"),
    "out_of_memory": (5, "out_of_memory", "rank 1 stopped: out of memory at step 3"),
    "out_of_memory_and_waited_for": (5, "out_of_memory", "rank 1 stopped: out of memory at step 3"),
    "full_disk": (7, "failed", "checkpoint of step 20 was not written ([Errno 28] No space left on device)"),
    "stuck": (1, "failed", "no answer from the other ranks within 3 s"),
}
FAULTS_ON_GPUS = [fault for fault in FAULTS if not fault.endswith("waited_for") and fault != "stuck"]


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        *(("cpu", fault) for fault in FAULTS if fault != "out_of_memory"),
        *(gpus(way, fault) for way in ("cuda", "graph") for fault in FAULTS_ON_GPUS),
    ],
)
def test_when_one_rank_fails_the_others_stop_and_say_why(way, fault, small, tmp_path):
    """Two ranks; three on a CPU if one is killed or stuck. On GPUs NCCL raises no exception: "killed" is waited for."""
    code, status, words = FAULTS[fault]
    log, world_size = tmp_path / "ranks", 3 if way == "cpu" and fault in ("killed", "stuck") else 2
    overrides = small("trainer.max_steps=20", "trainer.batch_size=1", "group=ddp", *WAYS[way])
    if fault == "stuck":
        overrides.append("parallel.timeout_seconds=3")
    codes = ended(start_ranks(overrides, world_size, log, fault), seconds=30 if way == "cpu" else 240)
    printed = output(log, world_size)
    expected = [code, -signal.SIGKILL if fault.startswith("killed") else code, code]
    assert codes == expected[:world_size], printed
    # If two ranks wait in vain, one may report the other's error: "rank 0 stopped: no answer …".
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]  # NCCL's warnings say "error: ", too
    assert any(words in error for error in errors), printed
    assert len(errors) <= (1 if status == "diverged" else 3), printed
    directory = next((tmp_path / "results/ddp").iterdir())
    summary = summary_of(directory)
    assert summary["status"] == status
    assert words in summary["reason"]


@pytest.mark.parametrize("way", ["cpu", gpus("cuda"), gpus("graph")])
def test_a_rank_that_stands_still_ends_the_others(way, small, tmp_path):
    """It gives no sign of life. On GPUs NCCL's own watchdog would end the other rank a minute later, without a word."""
    log, patience = tmp_path / "ranks", 3 if way == "cpu" else 12
    run = ("trainer.max_steps=20", "trainer.batch_size=1", "group=ddp", *WAYS[way])
    ranks = start_ranks(small(*run, f"parallel.timeout_seconds={patience}"), 2, log, "stopped")
    directory = wait_for_step(tmp_path / "results/ddp", 1, seconds=240)
    begun = time.monotonic()
    [code] = ended(ranks[:1], seconds=120)
    print(f"the other rank ended after {time.monotonic() - begun:.0f} s with exit code {code}")
    ranks[1].kill()
    words = f"rank 1 stopped: its process stands still: no sign of life for {patience} s"
    assert code == 1, output(log, 2)
    assert time.monotonic() - begun < patience + 20, output(log, 2)
    assert f"error: {words}" in output(log, 2)
    assert summary_of(directory)["reason"].startswith(words)


GRAPHED = ("parallel=fsdp", *WAYS["graph"][3:])


@pytest.mark.parametrize(
    ("first", "then", "ranks"),
    [
        gpus(("parallel=ddp",), ("parallel=ddp", "trainer.batch_size=2"), 2),
        gpus(("parallel=ddp",), ("parallel=ddp", "trainer.batch_size=4"), 1),
        gpus(("parallel=ddp",), ("parallel=fsdp", "trainer.batch_size=2"), 2),
        gpus(("parallel=ddp",), ("parallel=vocab", "trainer.batch_size=4"), 2),
        gpus(GRAPHED, (*GRAPHED, "trainer.batch_size=2"), 2),
        gpus(GRAPHED, (*GRAPHED, "trainer.batch_size=4"), 1),
        gpus(GRAPHED, ("parallel=vocab", *GRAPHED[1:], "trainer.batch_size=4"), 2),
    ],
)
def test_on_gpus_a_stopped_run_goes_on_with_two_with_one_and_with_other_parallelism(
    first, then, ranks, small, trained, tmp_path
):
    same = ("device=cuda", "schedule=constant", "schedule.steps=2000", "schedule.warmup_steps=0", "loss=cce_kahan")
    log = tmp_path / "stopped"
    two = small(*same, *first, "group=stopped", "trainer.batch_size=2", "trainer.max_steps=2000")
    processes = start_ranks(two, 2, log)
    stopped = wait_for_step(tmp_path / "results/stopped", 8, seconds=240)
    os.kill(processes[1].pid or 0, signal.SIGUSR1)
    assert ended(processes) == [128 + signal.SIGUSR1] * 2, output(log, 2)
    steps = summary_of(stopped)["steps"]
    assert found(stopped / "checkpoints")[-1].name == f"step_{steps:08d}"
    if then[0] == first[0]:
        on = trained(small(*same, *then, "group=stopped", f"trainer.max_steps={steps + 3}"), ranks)
        assert f"resuming at step {steps}" in (on / "train.log").read_text()
        assert list(curve(on)) == list(range(1, steps + 4))
    else:
        on = trained(small(*same, *then, "group=on", f"continue_from={stopped}", f"trainer.max_steps={3}"), ranks)
        assert list(curve(on)) == [1, 2, 3]
        assert curve(on)[1][0] < curve(stopped)[1][0], "it went on from trained weights"


@pytest.mark.parametrize("way", ["cpu", gpus("cuda"), gpus("graph")])
def test_torchrun_hands_a_signal_on_and_every_rank_ends_with_a_checkpoint(way, small, tmp_path):
    untuned = "trainer.kernel_choices=first"
    overrides = small("trainer.max_steps=2000", "trainer.batch_size=1", "group=ddp", untuned, *WAYS[way])
    on_gpus = way != "cpu"
    handled = "--signals-to-handle=SIGTERM,SIGUSR1"
    arguments = ["--standalone", "--nproc-per-node=2", handled, "train.py", *overrides]
    printed = tmp_path / "printed"
    begin = torchrun_anew if on_gpus else run_torchrun
    launcher = start(begin, arguments, printed)
    try:
        directory = wait_for_step(tmp_path / "results/ddp", 8, seconds=240 if on_gpus else 100)
        os.kill(launcher.pid or 0, signal.SIGUSR1)
        launcher.join(60)
        assert launcher.exitcode is not None, printed.read_text()
    finally:
        launcher.kill()
    summary = summary_of(directory)
    assert summary["status"] == "interrupted", printed.read_text()
    assert found(directory / "checkpoints")[-1].name == f"step_{summary['steps']:08d}"


def test_processes_and_parallel_must_belong_together(small, monkeypatch):
    with pytest.raises(ConfigError, match="not started by torchrun"):
        Trainer(load_config(small("parallel=ddp")))
    as_rank(monkeypatch.setenv, 1, 2)
    assert Launch.from_environment() == Launch(rank=1, local_rank=1, world_size=2, launched=True)
    with pytest.raises(ConfigError, match="started 2 processes"):
        Trainer(load_config(small()))
