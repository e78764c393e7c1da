"""benchmarks/models.py on tiny models: losses agree, models stay as they were, rows become a page."""

import gc
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import models, problems
from benchmarks.models import Row, read_rows, write_report
from linrnn.config import load_config
from linrnn.core.errors import ConfigError

SIZES = "hidden_size=32 intermediate_size=48 num_hidden_layers=1 num_attention_heads=2 num_key_value_heads=2"
LLAMA = f"llama batch=2 seq=16 {SIZES} vocab_size=96"
GEMMA2 = f"gemma2 batch=1 seq=12 {SIZES} head_dim=16 vocab_size=80 final_logit_softcapping=0.5 initializer_range=0.3"


def measured(folder: Path, *overrides: str, names: str = f'["{LLAMA}","{GEMMA2}"]') -> list[Row]:
    small = [f"models={names}", "rounds=3", "warmup=1", "dtype=fp32", "device=cpu", f"output_dir={folder}", *overrides]
    return models.run_benchmark(load_config(small, "bench_models"))


def test_the_losses_agree_and_rows_become_a_page(tmp_path):
    rows = measured(tmp_path, "losses=[liger,cce_kahan,'cce_kahan workspace_mib=4']")
    assert [row.loss for row in rows[:4]] == ["standard", "liger", "cce_kahan", "cce_kahan workspace_mib=4"]
    assert [row.model.split()[0] for row in rows] == 4 * ["llama"] + 4 * ["gemma2"]
    for own in (rows[:4], rows[4:]):
        standard, liger, *ours = own
        assert liger.status == "unsupported"
        assert "NVIDIA GPU" in liger.reason
        for row in (standard, *ours):
            assert (row.status, row.rounds) == ("ok", 3)
            assert row.loss_nats == pytest.approx(standard.loss_nats, rel=1e-5)
            assert row.gradient_norm == pytest.approx(standard.gradient_norm, rel=1e-4)
            assert row.ratio_low <= row.ratio <= row.ratio_high
            assert row.peak_gib is None
        assert standard.ratio == 1
        assert standard.tokens_per_second == pytest.approx(standard.batch * standard.seq / standard.step_ms * 1e3)
    assert rows[0].loss_nats == pytest.approx(math.log(96), rel=0.1)
    assert read_rows(tmp_path) == rows
    assert write_report(tmp_path) == [tmp_path / "models.md", tmp_path / "models.png"]
    text = (tmp_path / "models.md").read_text()
    assert text.count("\n## ") == 3
    assert "* `liger`: unsupported. " in text
    assert "`: commit " in text


def test_the_head_of_trls_trainer_and_ours_give_the_same_loss_and_trls_is_put_back(tmp_path, monkeypatch):
    utils: Any = importlib.import_module("trl.trainer.utils")
    head: Any = importlib.import_module("cce_kernels.huggingface.trl").FusedHead
    own, apply, calls = utils._ChunkedLogProbFunction, head.apply, list[int]()
    monkeypatch.setattr(head, "apply", lambda *a, **k: calls.append(1) or apply(*a, **k))
    losses = "losses=[cce_kahan,liger]"
    theirs, ours, liger = measured(tmp_path, losses, "trainer=trl", "rounds=2", names=f'["{LLAMA}"]')
    assert utils._ChunkedLogProbFunction is own
    assert len(calls) == 4, "the first values, the warm-up and two rounds of ours"
    assert (theirs.loss, theirs.ratio, ours.rounds, liger.status) == ("trl", 1, 2, "unsupported")
    assert ours.loss_nats == pytest.approx(theirs.loss_nats, rel=1e-5)
    assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-4)
    write_report(tmp_path)
    assert "| `cce_kahan` | 2 |" in (tmp_path / "models.md").read_text()


def test_no_timed_step_holds_a_collection_of_garbage(tmp_path, monkeypatch):
    """A full collection takes some 0.2 s."""
    enabled: list[bool] = []
    time_ms = problems.time_ms

    def timed(action: Callable[[], object], device: torch.device) -> float:
        return time_ms(lambda: (enabled.append(gc.isenabled()), action()), device)

    monkeypatch.setattr(problems, "time_ms", timed)
    measured(tmp_path, "losses=[cce_kahan]", names=f'["{LLAMA}"]')
    assert enabled == [False] * 6, "three rounds of two losses"
    assert gc.isenabled()


@pytest.mark.parametrize("breaks", ["standard", "cce_kahan"])
def test_a_loss_that_fails_in_a_round_costs_its_own_row_alone(tmp_path, monkeypatch, breaks):
    turn = models.Bench._turn

    def fails(bench: models.Bench, row: Row) -> None:
        if row.loss == breaks and row.rounds_ms:
            raise torch.OutOfMemoryError("no memory")
        turn(bench, row)

    monkeypatch.setattr(models.Bench, "_turn", fails)
    rows = measured(tmp_path, "losses=[cce_kahan]", names=f'["{LLAMA}"]')
    assert {row.loss: (row.status, row.rounds) for row in rows} == {
        loss: ("out_of_memory", 0) if loss == breaks else ("ok", 3) for loss in ("standard", "cce_kahan")
    }
    assert {row.ratio for row in rows if row.status == "ok"} == ({1.0} if breaks == "cce_kahan" else {None})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("[llama]", "must be NAME batch=… seq=…"),
        ("['llama batch=0 seq=2']", "must be NAME batch=… seq=…"),
        ("['llama batch=1 seq=2 tied']", "must be NAME batch=… seq=…"),
        ("['llama batch=1 seq=2 hiden_size=3']", "did you mean config.hidden_size"),
    ],
)
def test_a_wrong_model_is_refused(names, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        measured(tmp_path, names=names)


@pytest.mark.gpu
def test_all_three_losses_on_a_gpu(tmp_path):
    rows: list[Any] = measured(tmp_path, "device=cuda", "dtype=bf16", "losses=[liger,cce_kahan]")
    assert [row.status for row in rows] == 6 * ["ok"]
    for own in (rows[:3], rows[3:]):
        for row in own:
            assert row.loss_nats == pytest.approx(own[0].loss_nats, rel=1e-2)
            assert row.peak_gib > 0
    assert write_report(tmp_path) == [tmp_path / "models.md", tmp_path / "models.png"]
