"""A killed, interrupted or diverged run loses nothing: a resumed run equals an unbroken one, bit for bit."""

import itertools
import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fitting import fitted, processes, summary_of
from forked import run_script, start
from rank_process import curve, wait_for_step
from safetensors.torch import load_file

from linrnn.config import load_config
from linrnn.core.errors import ConfigError, DataError, DivergedError
from linrnn.training import trainer as trainer_module
from linrnn.training.checkpoint import found
from linrnn.training.evaluation import Evaluation
from linrnn.training.trainer import Trainer

STEPS = 20
LONG = (f"trainer.max_steps={STEPS}", "trainer.checkpoint_every=3")
LONG += ("trainer.accumulation_steps=2", "trainer.valid_every=5")


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    """Bytes of every tensor; their order in a file may differ."""
    [file] = checkpoint.glob("*.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()}


def test_a_run_on_a_mixture_goes_on_with_the_batches_that_were_next(on_text, tmp_path, command_here, data_cache):
    for name, word in ("a.txt", "cat"), ("b.txt", "dog"):
        (tmp_path / name).write_text("\n".join(f"the {word} {i} sat on mat {i * i % 97}" for i in range(300)))
    one, other = (f"data.sources=[{{path:{tmp_path}/a.txt,weight:{w}}},{{path:{tmp_path}/b.txt}}]" for w in (3, 0.5))
    plan = on_text(one, "data.valid_fraction=0.2", "schedule.steps=6")
    whole = fitted([*plan, "group=whole", "trainer.max_steps=6"])
    fitted([*plan, "trainer.max_steps=3"])
    second = fitted([*plan, "trainer.max_steps=6"])
    assert curve(second.directory.path) == curve(whole.directory.path)
    log = (second.directory.path / "train.log").read_text()
    assert f"epochs of {tmp_path}/a.txt" in log
    changed = Trainer(load_config([other if override == one else override for override in plan]))
    assert changed.directory.path != second.directory.path
    assert changed.data.fingerprint != second.data.fingerprint
    read = [f"checkpoint={second.directory.path}", f"data.cache_dir={data_cache}", "max_tokens=400"]
    evaluated = command_here("scripts/evaluate.py", *read)
    assert f"loss {summary_of(second)['valid_loss_nats']:.4f}" in evaluated.stdout, evaluated.stderr


@pytest.fixture(scope="module")
def unbroken(small_of_module: Callable[..., list[str]]) -> Path:
    trainer = fitted(small_of_module(*LONG))
    return trainer.directory.path


@pytest.mark.parametrize(
    ("number", "reader_goes"), [(signal.SIGKILL, False), (signal.SIGTERM, False), (signal.SIGINT, True)]
)
def test_a_stopped_run_continues_bit_for_bit(number, reader_goes, small, unbroken, tmp_path):
    """Also if the reader of its output goes first, as of a `| tee` that the same Ctrl-C ends."""
    overrides, out = small(*LONG, "group=broken"), tmp_path / "log"
    if reader_goes:
        os.mkfifo(out)
        reader = os.open(out, os.O_RDONLY | os.O_NONBLOCK)
    process = start(run_script, "train.py", [*overrides, "logger.console_every_seconds=0"], out)
    if reader_goes:
        wait_for_step(tmp_path / "results/broken", 1)
        os.close(reader)
    directory = wait_for_step(tmp_path / "results/broken", 5)
    assert process.pid
    os.kill(process.pid, number)
    process.join(60)
    if number != signal.SIGKILL:
        assert process.exitcode == 128 + number
        summary = json.loads((directory / "summary.json").read_text())
        assert summary["status"] == "interrupted"
        assert found(directory / "checkpoints")[-1].name == f"step_{summary['steps']:08d}"
    assert max(curve(directory)) < STEPS, "the run was over before the signal came"
    summary = Trainer(load_config(overrides)).fit()
    assert summary["status"] == "finished"
    assert curve(directory) == curve(unbroken)
    *earlier, last = processes(directory)
    assert (last["to_step"], last["ended"] is not None) == (STEPS, True)
    for process, after in itertools.pairwise((*earlier, last)):
        assert process["to_step"] == after["from_step"], "every step has one origin"
        assert (process["ended"] is None) == (number == signal.SIGKILL)
    assert (earlier[0] if earlier else last)["from_step"] == 0
    old, new = (tensors_of(found(path / "checkpoints")[-1]) for path in (unbroken, directory))
    assert old == new
    reference = json.loads((unbroken / "summary.json").read_text())
    assert summary["train_loss_nats"] == reference["train_loss_nats"]
    assert summary["valid_loss_nats"] == reference["valid_loss_nats"]


def bytes_below(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_finished_run_called_again_says_what_can_be_done_and_keeps_every_byte(small, capsys, monkeypatch):
    first = Trainer(load_config(small("run_name=run")))
    summary = first.fit()
    before = bytes_below(first.directory.path)
    monkeypatch.setenv("LINRNN_COMMIT", "0" * 40)
    again = small("run_name=run", "logger.console_every_seconds=7", "data.verify=false")
    assert Trainer(load_config(again)).fit() == summary
    assert bytes_below(first.directory.path) == before
    output = capsys.readouterr().out
    assert f"{first.directory.path} is finished: 3 steps; nothing was run or written" in output
    for choice in ("trainer.resume=never", f"continue_from={first.directory.path}"):
        assert choice in output


def test_two_trainers_do_not_share_a_run_directory(small):
    holder = Trainer(load_config(small()))
    holder.directory.open()
    with pytest.raises(ConfigError, match="another process") as refused:
        Trainer(load_config(small())).fit()
    assert refused.value.exit_code == 2
    holder.directory.close()
    assert holder.fit()["status"] == "finished"


def test_a_refused_process_keeps_every_byte_too(small):
    run = small("run_name=run", "schedule.steps=5")
    trainer = fitted(run)
    before = bytes_below(trainer.directory.path)
    fewer = Trainer(load_config([*run, "trainer.max_steps=2"]))
    with pytest.raises(ConfigError, match=r"holds a run of 3 steps, and this command stops at 2"):
        fewer.fit()
    longer = Trainer(load_config([*run, "trainer.max_steps=5"]))
    longer.data = replace(longer.data, train=longer.data.valid)
    longer._build(None)  # on other data than the checkpoint's
    with pytest.raises(DataError, match="the checkpoint's data position"):
        longer.fit()
    assert bytes_below(trainer.directory.path) == before


def test_a_run_goes_on_with_other_operational_keys_and_says_which(small):
    first = fitted(small("schedule.steps=6"))
    keys = ("trainer.checkpoint_every=1", "trainer.valid_every=2", "trainer.warmup_measurement_steps=1")
    more = small("schedule.steps=6", "trainer.max_steps=6", *keys)
    second = Trainer(load_config(more))
    assert second.directory.path == first.directory.path
    second.fit()
    assert "resuming at step 3" in (second.directory.path / "train.log").read_text()
    before, after = processes(second.directory.path)
    assert [(p["from_step"], p["to_step"]) for p in (before, after)] == [(0, 3), (3, 6)]
    changed = {key for key in after["settings"] if after["settings"][key] != before["settings"][key]}
    assert changed == {"trainer.max_steps", *(key.split("=")[0] for key in keys)}


def test_never_moves_the_old_run_aside_and_must_needs_one(small, tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        Trainer(load_config(small("trainer.resume=must")))
    first = Trainer(load_config(small()))
    summary = first.fit()
    refused = Trainer(
        load_config(small("trainer.resume=never", "continue_from=nowhere", f"run_name={first.directory.path.name}"))
    )
    with pytest.raises(ConfigError, match="nowhere"):
        refused.fit()
    assert first.directory.read_summary() == summary, "a refused process moves nothing"
    again = Trainer(load_config(small("trainer.resume=never")))
    assert again.fit()["steps"] == 3
    aside = again.directory.path.with_name(again.directory.path.name + ".1")
    assert json.loads((aside / "summary.json").read_text())["status"] == "finished"


def damage(checkpoint: Path) -> None:
    """Flip the last bit of a checkpoint's tensors."""
    [tensors] = checkpoint.glob("*.safetensors")
    content = tensors.read_bytes()
    tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(small, capsys):
    plan = ("trainer.checkpoint_every=2", "schedule.steps=6", "trainer.keep_checkpoints=2")
    trainer = fitted(small(*plan, "trainer.max_steps=4"))
    damage(newest := found(trainer.directory.checkpoints)[-1])
    with pytest.raises(DataError, match="does not match its checksum"):
        Trainer(load_config(small(f"init_from={newest}", "group=other")))
    resumed = fitted(small(*plan, "trainer.checkpoint_every=3", "trainer.max_steps=6"))
    output = capsys.readouterr().out
    assert "does not match its checksum" in output
    assert "resuming at step 2" in output
    kept = [path.name for path in found(resumed.directory.checkpoints)]
    assert kept == ["step_00000003", "step_00000006"], "the damaged one of step 4 crowded out a good one"


def test_a_run_whose_checkpoints_are_all_damaged_says_so_and_begins_again(small, capsys):
    plan = ("trainer.checkpoint_every=2", "trainer.keep_checkpoints=1", "schedule.steps=6")
    directory = fitted(small(*plan, "trainer.max_steps=4")).directory
    damage(found(directory.checkpoints)[0])
    for key in ("init_from", "continue_from"):
        with pytest.raises(DataError, match=r"has only damaged checkpoints \(step_00000004\)"):
            fitted(small(f"{key}={directory.path}", "group=other"))
    again = Trainer(load_config(small(*plan, "trainer.max_steps=6")))
    kept: list[list[str]] = []
    save, names = again.checkpointer.save, lambda: [path.name[-1] for path in found(directory.checkpoints)]

    def watched(*arguments: Any) -> None:
        save(*arguments)
        again.checkpointer.wait()
        kept.append(names())

    again.checkpointer.save = watched  # type: ignore[method-assign]
    again.fit()
    output = capsys.readouterr().out
    assert "no checkpoint of this run is sound (step_00000004): starting again at step 0" in output
    assert kept == [["2"], ["4"], ["6"]], "a damaged one takes no place of a sound one"


def test_a_run_that_diverges_in_its_last_validation_has_a_summary(small):
    """The loss of the last step is that before its update. Only the validation sees the weights after it."""
    plan = ("trainer.max_steps=1", "optimizer.lr=1e39", "schedule=constant", "schedule.warmup_steps=0")
    trainer = Trainer(load_config(small(*plan)))
    with pytest.raises(DivergedError, match=r"validation after step 1: loss (nan|inf)"):
        trainer.fit()
    summary = summary_of(trainer)
    assert (summary["status"], summary["steps"]) == ("diverged", 1)
    assert summary["valid_loss_nats"] is summary["valid_perplexity"] is None
    assert "validation after step 1" in summary["reason"]


def test_a_perplexity_beyond_a_double_is_null_in_the_summary(small, monkeypatch):
    monkeypatch.setattr(trainer_module, "evaluate", lambda *_, **__: Evaluation(1e3, math.inf, None, n_tokens=9))
    summary = Trainer(load_config(small("trainer.max_steps=1"))).fit()
    assert (summary["status"], summary["valid_loss_nats"], summary["valid_perplexity"]) == ("finished", 1e3, None)
