"""scripts/bench_models.py on tiny models: losses agree, models stay as they were, rows become a page."""

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from linrnn.bench.loss import timing
from linrnn.bench.models import report, run
from linrnn.bench.models.rows import Row, read_rows
from linrnn.bench.records import append_rows
from linrnn.config import load_config
from linrnn.core.errors import ConfigError, DataError, UnsupportedError
from linrnn.losses.hugging_face import build_published, model_loss

SIZES = "hidden_size=32 intermediate_size=48 num_hidden_layers=1 num_attention_heads=2 num_key_value_heads=2"
LLAMA = f"llama batch=2 seq=16 {SIZES} vocab_size=96"
GEMMA2 = f"gemma2 batch=1 seq=12 {SIZES} head_dim=16 vocab_size=80 final_logit_softcapping=0.5 initializer_range=0.3"


def measured(folder: Path, *overrides: str, models: str = f'["{LLAMA}","{GEMMA2}"]') -> list[Row]:
    small = [f"models={models}", "rounds=3", "warmup=1", "dtype=fp32", "device=cpu", f"output_dir={folder}", *overrides]
    said: list[str] = []
    rows = run.run_benchmark(load_config(small, "bench_models"), "python scripts/bench_models.py", said.append)
    assert len(said) == len(rows) + len({row.problem for row in rows})
    return rows


def test_the_losses_agree_and_rows_become_a_page(tmp_path: Path) -> None:
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
            assert row.loss_err < 1e-5
            assert row.ratio_low <= row.ratio <= row.ratio_high
            assert row.step_ms_q25 <= row.step_ms <= row.step_ms_q75
            assert row.peak_gib is None
        assert standard.ratio == 1
        assert standard.tokens_per_second == pytest.approx(standard.batch * standard.seq / standard.step_ms * 1e3)
    assert rows[0].loss_nats == pytest.approx(math.log(96), rel=0.1)
    assert read_rows(tmp_path) == rows
    assert report.write_report(tmp_path) == [tmp_path / "models.md"], "a CPU has no memory to draw"
    text = (tmp_path / "models.md").read_text()
    assert text.count("\n## ") == 3
    assert "* `liger`: unsupported. " in text
    assert "1. `python scripts/bench_models.py`: commit" in text


def test_no_timed_step_holds_a_collection_of_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection takes some 0.2 s."""
    enabled: list[bool] = []
    time_ms = timing.time_ms

    def timed(action: Callable[[], object], device: torch.device) -> float:
        return time_ms(lambda: (enabled.append(gc.isenabled()), action()), device)

    monkeypatch.setattr(timing, "time_ms", timed)
    measured(tmp_path, "losses=[cce_kahan]", models=f'["{LLAMA}"]')
    assert enabled == [False] * 6, "three rounds of two losses"
    assert gc.isenabled()


def test_a_step_that_cannot_fit_on_a_cpu_is_refused_before_the_first_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linrnn.training.plan.available_memory", lambda: 3 * 2**20)
    big = LLAMA.replace("vocab_size=96", "vocab_size=9600")  # 10 MB of weights, gradients, moments and 2 MB of logits
    with pytest.raises(UnsupportedError, match="a step of llama with 32 tokens needs"):
        measured(tmp_path, models=f'["{LLAMA}","{big}"]')
    assert not list(tmp_path.iterdir())


def test_a_later_row_replaces_an_earlier_one(tmp_path: Path) -> None:
    row = Row("llama", 1, 2, 16, 32, 96, "bf16", True, "standard", "a", rounds=3, step_ms=2.0, ratio=1.0)
    append_rows(tmp_path, [row, replace(row, loss="cce_kahan")])
    append_rows(tmp_path, [replace(row, step_ms=1.0), replace(row, batch=4)])
    assert [(one.loss, one.batch, one.step_ms) for one in read_rows(tmp_path)] == [
        ("standard", 2, 1.0),
        ("cce_kahan", 2, 2.0),
        ("standard", 4, 2.0),
    ]
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="has a line that is no row"):
        read_rows(tmp_path)
    with pytest.raises(DataError, match="no rows under"):
        read_rows(tmp_path / "none")


def test_memory_is_drawn_where_it_was_measured(tmp_path: Path) -> None:
    row = Row("llama", 10**9, 2, 16, 32, 96, "bf16", True, "standard", "a", rounds=3, step_ms=2.0)
    for model in ("llama", "qwen3"):
        for loss, ratio, gib in (("standard", 1.0, 35.0), ("liger", 0.9, 11.0), ("cce_kahan", 0.8, 11.5)):
            band = {"ratio": ratio, "ratio_low": ratio - 0.01, "ratio_high": ratio + 0.01}
            append_rows(tmp_path, [replace(row, model=model, loss=loss, peak_gib=gib, **band)])
    assert report.write_report(tmp_path) == [tmp_path / "models.md", tmp_path / "models.png"]
    assert "![Time against memory](models.png)" in (tmp_path / "models.md").read_text()
    assert "| `cce_kahan` | 3 | 2.0 | 0.800 | 0.790-0.810 | 16,000 | 11.5 |" in (tmp_path / "models.md").read_text()
    figure = report.plot(read_rows(tmp_path))
    assert [panel.get_title() for panel in figure.axes] == ["llama\n2 x 16 tokens", "qwen3\n2 x 16 tokens"]


def test_a_loss_that_fails_leaves_the_model_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = run.Bench._compare

    def fails(bench: run.Bench, row: Row) -> None:
        if row.loss == "cce_kahan":
            raise torch.OutOfMemoryError("no memory\nfor this")
        compare(bench, row)

    monkeypatch.setattr(run.Bench, "_compare", fails)
    standard, ours = measured(tmp_path, "losses=[cce_kahan]", models=f'["{LLAMA}"]')
    assert standard.status == "ok"
    assert (ours.status, ours.reason, ours.rounds) == ("out_of_memory", "OutOfMemoryError: no memory", 0)


@pytest.mark.parametrize("breaks", ["standard", "cce_kahan"])
def test_a_loss_that_fails_in_a_round_costs_its_own_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    turn = run.Bench._turn

    def fails(bench: run.Bench, row: Row) -> None:
        if row.loss == breaks and row.rounds_ms:
            raise torch.OutOfMemoryError("no memory")
        turn(bench, row)

    monkeypatch.setattr(run.Bench, "_turn", fails)
    rows = measured(tmp_path, "losses=[cce_kahan]", models=f'["{LLAMA}"]')
    assert {row.loss: (row.status, row.rounds) for row in rows} == {
        loss: ("out_of_memory", 0) if loss == breaks else ("ok", 3) for loss in ("standard", "cce_kahan")
    }
    assert {row.ratio for row in rows if row.status == "ok"} == ({1.0} if breaks == "cce_kahan" else {None})


def test_each_loss_is_put_in_and_taken_out() -> None:
    name, overrides, _, _ = run.parse_model(LLAMA)
    model = build_published(name, overrides, torch.float32, torch.device("cpu"))
    kind, ids = type(model), torch.randint(96, (1, 8))
    want = model(ids, labels=ids).loss
    for text in ("cce_kahan accumulate=fp32", "cce_filter", "standard"):
        with model_loss(model, run.parse_loss(text), torch.device("cpu")):
            assert (type(model) is kind) == (text == "standard")
            assert model(ids, labels=ids).loss.item() == pytest.approx(want.item(), rel=1e-5)
        assert type(model) is kind
        assert "forward" not in vars(model)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ("[llama]", "must be NAME batch=… seq=…"),
        ("['llama batch=0 seq=2']", "must be NAME batch=… seq=…"),
        ("['llama batch=1 seq=2 tied']", "must be NAME batch=… seq=…"),
        ("['llama batch=1 seq=2 hiden_size=3']", "did you mean config.hidden_size"),
    ],
)
def test_a_wrong_model_is_refused(models: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        measured(tmp_path, models=models)


@pytest.mark.parametrize("loss", ["fla", "liger accumulate=fp32"])
def test_a_loss_without_a_form_for_models_is_refused(
    loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linrnn.losses.hugging_face.check_loss", lambda *_: None)
    if loss == "fla":
        assert measured(tmp_path, f"losses=['{loss}']", models=f'["{LLAMA}"]')[1].status == "unsupported"
    else:
        with pytest.raises(ConfigError, match="models cannot choose it"):
            measured(tmp_path, f"losses=['{loss}']", models=f'["{LLAMA}"]')


@pytest.mark.gpu
def test_all_three_losses_on_a_gpu(tmp_path: Path) -> None:
    rows: list[Any] = measured(tmp_path, "device=cuda", "dtype=bf16", "losses=[liger,cce_kahan]")
    assert [row.status for row in rows] == 6 * ["ok"]
    for own in (rows[:3], rows[3:]):
        for row in own:
            assert row.loss_nats == pytest.approx(own[0].loss_nats, rel=1e-2)
            assert row.loss_err < 1e-2
            assert row.peak_gib > 0
    assert report.write_report(tmp_path) == [tmp_path / "models.md", tmp_path / "models.png"]
