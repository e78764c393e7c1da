"""benchmarks/trl_step.py: both heads run in one SFTTrainer and give the same loss; rows become a page."""

import importlib
from typing import Any

import pytest

from benchmarks import trl_step
from linrnn.config import load_config

SIZES = "hidden_size=32 intermediate_size=48 num_hidden_layers=1 num_attention_heads=2 num_key_value_heads=2"
LLAMA = f"llama batch=2 seq=16 {SIZES} vocab_size=96"


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_both_heads_give_the_same_loss_and_trls_own_is_put_back(tmp_path, loss_type, monkeypatch):
    utils: Any = importlib.import_module("trl.trainer.utils")
    own, calls = utils._ChunkedLogProbFunction, []
    apply = trl_step.cce_kernels.huggingface.trl.FusedHead.apply
    monkeypatch.setattr(
        trl_step.cce_kernels.huggingface.trl.FusedHead, "apply", lambda *a, **k: calls.append(1) or apply(*a, **k)
    )
    small = [f"models=['{LLAMA}']", "rounds=2", "warmup=1", "dtype=fp32", "device=cpu", f"loss_type={loss_type}"]
    config = load_config([*small, f"output_dir={tmp_path}"], "bench_trl")
    theirs, ours = trl_step.run_benchmark(config)
    assert utils._ChunkedLogProbFunction is own
    assert len(calls) == 3, "one call in each step of ours, none in TRL's"
    assert (theirs.label, ours.label, theirs.rounds, theirs.ratio) == ("trl", "cce_kahan", 2, 1.0)
    assert ours.nats == pytest.approx(theirs.nats, rel=1e-5)
    assert min(theirs.step_ms, ours.step_ms) > 0
    assert ours.ratio_low <= ours.ratio <= ours.ratio_high
    assert ours.peak_gib is None
    [page] = trl_step.write_report(tmp_path)
    assert "`cce_kahan`" in page.read_text()
