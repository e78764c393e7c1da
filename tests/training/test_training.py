"""Other promises of the trainer: accumulation, options, evaluation, initial weights, wandb, traces."""

import gzip
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from data_helpers import sentences, write_jsonl
from fitting import fitted, records, summary_of

from linrnn.config import data_for, read_config
from linrnn.core.errors import ConfigError
from linrnn.data import PreparedData
from linrnn.inference.load import directory_of_tokenizer, open_data
from linrnn.training.checkpoint import required

ROOT = Path(__file__).resolve().parents[2]
Small = Callable[..., list[str]]


def test_accumulation_gives_the_loss_and_gradients_of_the_large_batch(small):
    """With document resets micro-steps have different numbers of labels, so a mean of means would differ."""
    common = ["data.reset_at_document=true", "loss=standard"]
    large = fitted(small(*common, "trainer.batch_size=4"))
    split = fitted(small(*common, "trainer.batch_size=1", "trainer.accumulation_steps=4"))
    for a, b in zip(records(large), records(split), strict=True):
        for name in ("train/loss_nats", "train/grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=2e-5), (a["step"], name)


@pytest.fixture(scope="module")
def plain(small_of_module: Small) -> dict[int, float]:
    """Losses by step of a run without options."""
    return {record["step"]: record["train/loss_nats"] for record in records(fitted(small_of_module()))}


@pytest.mark.parametrize(
    "options", ["trainer.activation_checkpointing=full", "trainer.deterministic=true trainer.log_every=2"]
)
def test_options_that_must_not_change_the_losses(small, plain, options):
    for record in records(fitted(small(*options.split()))):
        assert record["train/loss_nats"] == pytest.approx(plain[record["step"]], rel=1e-6)


def test_options_that_may_change_them_train(small, on_text, tmp_path):
    bf16 = fitted(small("trainer.precision=bf16", "schedule=wsd", "optimizer.max_grad_norm=null"))
    path = write_jsonl(tmp_path / "text.jsonl", sentences(400))
    text = fitted(on_text(f"data.path={path}", "trainer.precision=bf16_autocast"))
    for trainer in (bf16, text):
        losses = [record["train/loss_nats"] for record in records(trainer)]
        assert losses[-1] < losses[0]
    assert 1 < summary_of(text)["valid_bits_per_byte"] < 8


def test_a_run_that_was_moved_is_evaluated_on_data_that_lie_elsewhere(small, command, command_here, tmp_path):
    gone, moved, here = tmp_path / "gone", tmp_path / "moved", tmp_path / "here"
    first = fitted(small(f"data.cache_dir={gone}", "data.data_seed=5"))
    summary = summary_of(first)
    shutil.move(first.directory.path, moved)
    shutil.rmtree(gone)
    here.mkdir()
    evaluate = [str(ROOT / "scripts/evaluate.py"), f"checkpoint={moved}", "max_tokens=400"]
    other = [f"data.cache_dir={here}/other"]
    for run, overrides, cache in ((command, [], here / "data_cache"), (command_here, other, here / "other")):
        done = run(*evaluate, *overrides, cwd=here)
        assert done.returncode == 0, done.stderr
        assert f"loss {summary['valid_loss_nats']:.4f}" in done.stdout
        assert [path for path in cache.iterdir() if path.is_dir()]
    done = command_here(*evaluate, "data.data_seed=6", cwd=here)  # of another chain
    assert done.returncode == 0, done.stderr
    assert f"loss {summary['valid_loss_nats']:.4f}" not in done.stdout
    assert not gone.exists()


def test_fine_tuning_with_a_filter_logs_what_it_drops_and_stays_near_the_exact_loss(small):
    first = fitted(small("trainer.max_steps=8")).directory.path
    here = ("experiment=finetune_filter", f"init_from={first}", "size=smoke", "data=markov", "trainer.max_steps=4")
    exact = records(fitted(small(*here, "loss=cce_kahan")))
    filter_ = (*here, "loss=cce_filter", "loss.filter_eps=0.002")  # of 512 entries
    filtered = records(fitted(small(*filter_, "loss.filter_if_faster=false")))
    assert filtered[0]["train/loss_nats"] == pytest.approx(exact[0]["train/loss_nats"], abs=1e-5)
    assert abs(filtered[3]["train/loss_nats"] - exact[3]["train/loss_nats"]) < 0.01
    for record in filtered[:4]:
        mean, p99, largest = (record[f"loss/dropped_mass_{x}"] for x in ("mean", "p99", "max"))
        assert 0 < mean <= p99 <= largest < 1
        assert 0 < record["loss/entries_kept"] < 1
    assert "loss/dropped_mass_mean" not in exact[0]
    run = fitted(small(*filter_))  # a filter is never faster on a CPU
    assert [record["train/loss_nats"] for record in records(run)[:4]] == [x["train/loss_nats"] for x in exact[:4]]
    assert {record["loss/exact"] for record in records(run)[:4]} == {1}


def test_a_run_reads_other_text_in_its_own_tokens_alone(on_text, tmp_path, data_cache):
    of_run = write_jsonl(tmp_path / "own.jsonl", sentences(200))
    run = fitted(on_text(f"data.path={of_run}", "size.vocab_size=320")).directory.path
    text = write_jsonl(tmp_path / "text.jsonl", [f"a line of other text, number {i}" for i in range(400)])
    directory = required("checkpoint", str(run))
    own = read_config(directory / "config.yaml").data

    def opened(*data: str) -> PreparedData:
        other = ("data=text", f"data.path={text}", f"data.cache_dir={data_cache}", *data)
        return open_data(directory, own, data_for(own, other, directory_of_tokenizer(directory)))

    with pytest.raises(ConfigError, match="another tokenizer"):
        opened("data.tokenizer_vocab_size=290")
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        required("checkpoint", str(tmp_path))
    found = opened()
    assert found.tokenizer.json == (run / "tokenizer.json").read_text()
    assert found.vocab_size == 300
    assert opened(f"data.tokenizer={run / 'tokenizer.json'}").fingerprint == found.fingerprint


def test_wandb_records_offline_without_a_key_and_the_page_lists_files_that_a_run_has(small, monkeypatch):
    import wandb  # takes a second, which only the worker that runs this file shall pay

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")
    overrides = [o for o in small() if not o.startswith("logger.")]
    trainer = fitted(overrides)
    wandb.teardown()  # as at the process's end: its own process writes the last records after finish()
    recorded = list(trainer.directory.path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(recorded) == 1, (trainer.directory.path / "train.log").read_text()
    assert b"train/loss_nats" in recorded[0].read_bytes()
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    listed = re.findall(
        r"^\| (`[^|]+`) \|", page.partition("## The run directory")[2].partition("\n## ")[0], re.MULTILINE
    )
    names = {name.rstrip("/") for cell in listed for name in re.findall(r"`([^`]+)`", cell)}
    written = {path.name for path in trainer.directory.path.iterdir()}
    assert names
    assert names <= written


def test_a_trace_names_the_loss_layers_passes(small):
    trainer = fitted(small("trainer.max_steps=4", "trainer.warmup_measurement_steps=1", "trainer.profile_steps=1"))
    with gzip.open(trainer.directory.path / "trace.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"loss forward", "loss backward"} <= names
    assert summary_of(trainer)["measured_steps"] == 2, "neither the warm-up nor the traced step"
