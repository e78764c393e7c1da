"""TRL's SFT, DPO and GRPO trainers with this package: TRL's own losses, gradients and metrics."""

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cce_kernels
import pytest
import torch
from cce_kernels.huggingface import trl
from cce_kernels.huggingface.trl import FusedHead
from everywhere import load_example

OPTIONAL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
OUTPUTS = [("log_probs", *names) for count in range(5) for names in itertools.combinations(OPTIONAL, count)]
METRICS = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "logits/chosen", "logps/rejected", "reward_std")


@pytest.fixture(autouse=True)
def utils(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL's module with the function that is replaced; it gets it back after the test."""
    utils = pytest.importorskip("trl.trainer.utils")
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", utils._ChunkedLogProbFunction)
    return utils


@pytest.mark.parametrize(("softcap", "bias"), [(None, True), (3.0, False)])
@pytest.mark.parametrize("outputs", OUTPUTS, ids="-".join)
def test_the_head_gives_what_trls_own_gives(outputs, softcap, bias, utils):
    results = []
    for function in (utils._ChunkedLogProbFunction, FusedHead):
        torch.manual_seed(0)
        inputs = [torch.randn(*shape, requires_grad=True) for shape in ((30, 16), (50, 16), (50,))]
        found = function.apply(
            *inputs[:2], inputs[2] if bias else None, torch.randint(50, (30,)), 0.7, 16, softcap, 1.3, outputs
        )
        differentiable = [x for x in found if x is not None and x.requires_grad]
        torch.stack([(x * torch.linspace(-1, 2, 30)).sum() for x in differentiable]).sum().backward()
        results.append([*found, *(x.grad for x in inputs)])
    for got, want in zip(results[1], results[0], strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            assert (got.dtype, got.requires_grad) == (want.dtype, want.requires_grad)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)  # gradients up to 50


def test_no_scored_token(utils):
    hidden, weight = torch.zeros(0, 8, requires_grad=True), torch.ones(9, 8, requires_grad=True)
    log_probs, *_ = FusedHead.apply(hidden, weight, None, torch.zeros(0).long(), 1.0, 16)
    log_probs.sum().backward()
    assert not weight.grad.any()


def sft(folder: str) -> None:
    """TRL's own trainer on the model and the data of the example, as far as it goes."""
    example = load_example("trl_sft")
    own = example.SFTTrainer

    class Stop(Exception):
        pass

    def made(*arguments: Any, **options: Any) -> Any:
        own(*arguments, **options).train()
        raise Stop

    example.OurLoss = made
    with pytest.raises(Stop):
        example.main(folder, "cpu")


RUNS: dict[str, Callable[[str], Any]] = {
    "sft": sft,
    "dpo": lambda folder: load_example("trl_dpo").main(folder, "cpu"),
    "grpo": lambda folder: load_example("trl_grpo").main(folder, "cpu"),
}


def logged(run: Callable[[str], Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """What a run logs in each step."""
    found: list[dict[str, float]] = []
    trainer = importlib.import_module("transformers.trainer").Trainer
    log = trainer.log

    def watched(self: Any, logs: dict[str, float], *arguments: Any) -> None:
        if "loss" in logs:
            found.append({name: float(logs[name]) for name in METRICS if name in logs})
        log(self, logs, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "log", watched)
        run(str(folder))
    assert len(found) == 5
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_trls_own(name, tmp_path, monkeypatch, utils):
    with monkeypatch.context() as patch:
        patch.setattr(cce_kernels, "register_in_trl", lambda: None)
        want = logged(RUNS[name], tmp_path, monkeypatch)
    assert utils._ChunkedLogProbFunction is not FusedHead
    cce_kernels.register_in_trl()
    calls, own_loss = [], trl.cross_entropy
    monkeypatch.setattr(trl, "cross_entropy", lambda *args: calls.append(1) or own_loss(*args))
    got = logged(RUNS[name], tmp_path, monkeypatch)
    for ours, own in zip(got, want, strict=True):
        assert ours == pytest.approx(own, rel=1e-3, abs=1e-5)
        assert own["grad_norm"] > 0
    expected = {"sft": METRICS[:4], "dpo": METRICS[:6], "grpo": ("loss", "grad_norm", "entropy", "reward_std")}[name]
    assert set(want[0]) == set(expected)
    assert len(calls) >= 5
    if name == "sft":
        assert load_example("trl_sft").main(str(tmp_path), "cpu") == pytest.approx([x["loss"] for x in want], rel=1e-3)
    if name == "grpo":
        assert all(entry["reward_std"] > 0 for entry in want)


def test_another_trl_is_refused(monkeypatch, utils):
    monkeypatch.delattr(utils, "_ChunkedLogProbFunction")
    with pytest.raises(ValueError, match=r"trl: its trainer.utils has no _Chunked.*knows TRL 1.16"):
        cce_kernels.register_in_trl()
