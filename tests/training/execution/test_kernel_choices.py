"""A run records which configurations its kernels ran with. Compiling them ahead does not change what it computes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import fitted, losses
from rank_process import leave_kernels_untuned

from linrnn.config import load_config
from linrnn.models import tuning
from linrnn.runs.directory import ENVIRONMENT, LOG
from linrnn.training.execution import compilation
from linrnn.training.execution.compilation import compiles_ahead
from linrnn.training.trainer import Trainer


def recorded(trainer: Trainer) -> Any:
    return json.loads((trainer.directory.path / ENVIRONMENT).read_text())["processes"][-1]["kernel_choices"]


def test_choices_are_recorded_after_the_first_step_and_at_the_end(small, monkeypatch):
    seen: list[Any] = []
    steps = 0

    def train_step(trainer: Trainer) -> Any:
        nonlocal steps
        if steps:
            seen.append(recorded(trainer))
        steps += 1
        return one_step(trainer)

    one_step = Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", train_step)
    monkeypatch.setattr(tuning, "used", lambda: {"fingerprint": str(steps)} if steps else None)
    monkeypatch.setattr(tuning, "remark", lambda: f"{steps} choices" if steps else None)
    monkeypatch.setattr(tuning, "store", lambda: pytest.fail("nothing was tuned"))
    trainer = fitted(small())
    assert seen == [{"fingerprint": "1"}] * 2
    assert recorded(trainer) == {"fingerprint": "3"}, "the last steps and the validation may need more kernels"
    log = (trainer.directory.path / LOG).read_text()
    [(took, since)] = re.findall(r"step 1 took ([\d.]+) s, ([\d.]+) s after the start; 1 choices\n", log)
    assert 0 <= float(took) < float(since), "this process has imported torch before"


@pytest.mark.parametrize(
    ("overrides", "device", "expected"),
    [
        ([], "cuda", True),
        (["model=fla", "model.config=rwkv7"], "cuda", True),
        (["model=fla", "model.config=nsa"], "cuda", True),  # reads the blocks that a kernel has chosen: zeros
        (["model=fla", "model.config=delta_net", "parallel=fsdp"], "cuda", True),
        (["model=fla", "model.config=rwkv7", "parallel=fsdp"], "cuda", False),
        (["trainer.compile=blocks"], "cuda", False),
        ([], "cpu", False),
    ],
)
def test_which_runs_are_rehearsed(overrides, device, expected):
    assert compiles_ahead(load_config(overrides), torch.device(device)) is expected


@pytest.mark.parametrize(("loss", "ahead"), [("cce_kahan", True), ("cce_filter", True), ("standard", False)])
@pytest.mark.parametrize("reset", ["false", "true"])
def test_a_loss_that_compiles_its_kernels_is_called_before_the_first_step_as_in_it(
    loss, ahead, reset, small, monkeypatch
):
    calls: list[Any] = []

    def noted(self: Any, *tensors: torch.Tensor) -> Any:
        calls.append([(x.shape, x.stride(), x.dtype, x.requires_grad) for x in tensors])
        return compute(self, *tensors)

    monkeypatch.setattr(compilation, "compiles_ahead", lambda *_: True)
    run = Trainer(load_config(small(f"loss={loss}", f"data.reset_at_document={reset}", "trainer.precision=bf16")))
    compute = type(run.loss).compute
    monkeypatch.setattr(type(run.loss), "compute", noted)
    run._compile_kernels()
    assert len(calls) == ahead
    run.train_step()
    assert len(calls) == ahead + 1
    assert calls[0] == calls[-1]


def test_a_rehearsal_changes_nothing(small, monkeypatch):
    """Data, weights and random numbers stay where they were. (On a GPU its kernels write nothing either.)"""
    overrides = small("data.reset_at_document=true", "trainer.accumulation_steps=2")
    plain = losses(fitted([*overrides, "group=plain"]))
    monkeypatch.setattr(compilation, "compiles_ahead", lambda *_: True)
    assert losses(fitted([*overrides, "group=rehearsed"])) == plain


@pytest.mark.gpu
@pytest.mark.parametrize(
    "model",
    [*("gla", "kda", "transformer"), *(f"fla model.config={name}" for name in ("rwkv7", "gated_deltaproduct", "gsa"))],
)
@pytest.mark.parametrize("reset", [False, True])
def test_kernels_compiled_ahead_compute_the_same(model, reset, small, monkeypatch):
    leave_kernels_untuned(monkeypatch.setattr)
    run = (*f"model={model}".split(), "loss=standard", "trainer.seq_len=128", "device=cuda")
    overrides = small(*run, f"data.reset_at_document={str(reset).lower()}")
    compiled_ahead = fitted([*overrides, "group=ahead"])
    assert recorded(compiled_ahead)["choices"]
    assert "compiling ahead failed" not in (compiled_ahead.directory.path / LOG).read_text()
    ahead = losses(compiled_ahead)
    monkeypatch.setattr(Trainer, "_compile_kernels", lambda run: None)
    one_by_one = losses(fitted([*overrides, "group=one_by_one"]))
    assert ahead[0] == one_by_one[0]
    assert ahead == pytest.approx(one_by_one, rel=1e-5)


@pytest.mark.parametrize(
    ("table", "said"),
    [("a_gpu.json", "stored the tuned kernels' choices in a_gpu.json"), (None, "choices are not stored: [Errno 2]")],
)
def test_a_run_that_tunes_all_kernels_stores_their_choices_if_it_can(table, said, small, monkeypatch):
    monkeypatch.setattr(tuning, "store", lambda: table or Path("/proc/nowhere/table").write_text("x"))
    run = fitted(small("trainer.kernel_choices=tune"))
    assert said in (run.directory.path / LOG).read_text()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "loss",
    [
        ["loss=cce_kahan", "loss.workspace_mib=4"],
        ["loss=cce_filter", "loss.filter_if_faster=false", "trainer.precision=bf16_autocast"],
    ],
    ids=lambda loss: loss[0],
)
def test_on_a_gpu_a_rehearsal_of_many_chunks_changes_no_loss(loss, small, monkeypatch):
    """The second and the third rehearsal find the loss's kernels compiled."""
    leave_kernels_untuned(monkeypatch.setattr)
    overrides = small(*loss, "trainer.batch_size=100", "device=cuda")
    compile_once = Trainer._compile_kernels

    def compile_three_times(run: Any) -> None:
        for _ in range(3):
            compile_once(run)
            torch.cuda.synchronize()

    monkeypatch.setattr(Trainer, "_compile_kernels", compile_three_times)
    rehearsed = losses(fitted([*overrides, "group=rehearsed"]))
    monkeypatch.setattr(Trainer, "_compile_kernels", lambda run: None)
    assert rehearsed == losses(fitted([*overrides, "group=plain"]))
