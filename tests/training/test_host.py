"""What the host does around a step: it waits for no rank, reads results late, and collects garbage at known points."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fitting import summary_of

from linrnn.config import load_config
from linrnn.core.errors import DivergedError, InterruptedRun
from linrnn.distributed import DistributedRanks, Launch, Ranks
from linrnn.distributed.ranks import ReplicatedRanks
from linrnn.training.checkpoint import found
from linrnn.training.run_log import StepRecord
from linrnn.training.trainer import Trainer

Patch = pytest.MonkeyPatch


@pytest.fixture
def one_of_one(group_of_one: None) -> DistributedRanks:
    """The rank of a group that this process joins alone: it calls all collectives and needs no second process."""
    given: Any = dist.HashStore(), SimpleNamespace(), load_config(["parallel=ddp"]).parallel
    return ReplicatedRanks(Launch(0, 0, 1, True), *given)


def before(patch: Patch, owner: Any, name: str, happen: Callable[..., object]) -> None:
    """Call `happen` before every call of a function, with its arguments."""
    original = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        happen(*arguments, **options)
        return original(*arguments, **options)

    patch.setattr(owner, name, call)


def test_between_steps_no_rank_waits_for_the_answer_of_another(small, one_of_one, monkeypatch):
    """A step's question is answered while the next step runs. Only the loss is summed at once, where the device is."""
    events: list[str] = []
    ask = DistributedRanks.max_on_host_async

    def max_on_host_async(self: DistributedRanks, find: Any) -> Any:
        answer = ask(self, find)
        events.append("asked")
        return lambda: (events.append("answered"), answer())[1]

    monkeypatch.setattr(DistributedRanks, "max_on_host_async", max_on_host_async)
    before(monkeypatch, DistributedRanks, "sum_on_host", lambda *_: events.append("sum_on_host"))
    before(monkeypatch, Trainer, "train_step", lambda self: events.append("step"))
    before(monkeypatch, dist, "all_reduce", lambda tensor, *_, async_op=False, **__: async_op or events.append("sum"))
    options = ("trainer.max_steps=6", "trainer.warmup_measurement_steps=9", "trainer.checkpoint_every=0")
    Trainer(load_config(small(*options, "data.reset_at_document=true", "loss=standard")), one_of_one).fit()
    training = events[: max(place for place, event in enumerate(events) if event == "step") + 2]
    assert training == ["asked", *["step", "sum", "answered", "asked"] * 5, "step", "sum"]


@pytest.mark.parametrize(("several", "end"), [(False, 3), (True, 4)])
def test_a_signal_ends_one_process_after_its_step_and_several_one_step_later(
    several, end, small, one_of_one, monkeypatch
):
    trainer = Trainer(load_config(small("trainer.max_steps=9")), one_of_one if several else Ranks())
    signalled = SimpleNamespace(signal_number=15)
    before(monkeypatch, trainer, "train_step", lambda: trainer.step == 2 and vars(trainer.stop).update(vars(signalled)))
    with pytest.raises(InterruptedRun, match=f"interrupted at step {end} of 9"):
        trainer.fit()
    assert found(trainer.directory.checkpoints)[-1].name == f"step_{end:08d}"


def test_several_ranks_save_once_when_the_clock_asks(small, one_of_one, monkeypatch):
    """A checkpoint is asked for after step 2 and written after step 3. Nobody asks again in between."""
    trainer = Trainer(load_config(small("trainer.max_steps=8", "trainer.keep_checkpoints=9")), one_of_one)
    own = trainer.checkpointer
    monkeypatch.setattr(own, "is_due", lambda _: trainer.step - (own.saved_step or 0) >= 2)
    trainer.fit()
    assert [path.name for path in found(trainer.directory.checkpoints)] == [f"step_{n:08d}" for n in (3, 6, 8)]


def test_a_steps_results_are_read_once_the_next_step_is_under_way(small, monkeypatch):
    events: list[tuple[str, int]] = []
    before(monkeypatch, Trainer, "train_step", lambda self: events.append(("step", self.step + 1)))
    before(monkeypatch, StepRecord, "read", lambda self: events.append(("read", self.step)))
    Trainer(load_config(small("trainer.max_steps=4"))).fit()
    expected = [("step", 1), ("step", 2), ("read", 1), ("step", 3), ("read", 2), ("step", 4), ("read", 3), ("read", 4)]
    assert events == expected


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_no_checkpoint_holds_weights_of_a_step_that_is_not_finite(last, several, small, one_of_one, monkeypatch):
    """The error names the step, although it may come one step later."""
    bad = 5 if last else 3
    options = ("trainer.max_steps=5", "trainer.checkpoint_every=1", "trainer.keep_checkpoints=9")
    trainer = Trainer(load_config(small(*options)), one_of_one if several else Ranks())
    forward_backward = trainer._forward_backward

    def faulty(*arguments: Any) -> Any:
        nats, stats = forward_backward(*arguments)
        return (nats * float("nan") if trainer.step == bad - 1 else nats), stats

    monkeypatch.setattr(trainer, "_forward_backward", faulty)
    with pytest.raises(DivergedError, match=f"step {bad}: loss nan") as error:
        trainer.fit()
    assert (error.value.exit_code, summary_of(trainer)["status"]) == (6, "diverged")
    assert [path.name for path in found(trainer.directory.checkpoints)] == [f"step_{n:08d}" for n in range(1, bad)]


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_collected_between_steps_and_by_itself_after_the_run(fails, small, monkeypatch):
    garbage: list[weakref.ref[Cycle]] = []
    trainer = Trainer(load_config(small()))

    def in_step() -> None:
        assert not gc.isenabled()
        assert [cycle() for cycle in garbage] == [None] * trainer.step
        garbage.append(weakref.ref(Cycle()))
        if fails and trainer.step == 2:
            raise ZeroDivisionError

    before(monkeypatch, trainer, "train_step", in_step)
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        trainer.fit()
    assert len(garbage) == 3
    assert gc.isenabled()


@pytest.mark.gpu
@pytest.mark.parametrize("loss", ["standard", "cce_kahan"])
@pytest.mark.parametrize("model", ["gla", "transformer"])
def test_on_a_gpu_a_step_never_makes_the_host_wait(model, loss, small, monkeypatch):
    """After the warm-up every call that makes the host wait for the device is an error inside a step."""
    step = Trainer.train_step

    def train_step(self: Trainer) -> StepRecord:
        if self.step < 4:
            return step(self)
        torch.cuda.set_sync_debug_mode("error")
        try:
            record = step(self)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert record._values.is_pinned()
        assert all(parameter.grad is None for parameter in self.model.parameters())
        assert all(group["fused"] for group in self.optimizer.param_groups)
        return record

    monkeypatch.setattr(Trainer, "train_step", train_step)
    run = ("trainer.max_steps=8", "trainer.accumulation_steps=2", "device=cuda", f"model={model}", f"loss={loss}")
    Trainer(load_config(small(*run))).fit()
