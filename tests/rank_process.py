"""One rank of `train.py` or another script, as a launcher starts it; and faults for it.

On CPUs it is forked from a process that has imported everything. With GPUs the process is new: FLA asks for the GPU's
name when it is imported, and CUDA does not survive a fork.
"""

import errno
import json
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import ROOT, ended, print_into, spawn, start

from linrnn.config import last_of_each
from linrnn.distributed.watch import Watch
from linrnn.runs.metrics import read_jsonl
from linrnn.training.execution import compilation
from linrnn.training.trainer import Trainer

# Relative difference of losses and gradient norms over some steps of AdamW, summed in another order. Processors differ:
# 2.4e-5 was seen. One label too many among the 320 of a step changes them by 3e-3.
ROUNDING = 1e-4


def start_ranks(
    overrides: list[str], world_size: int, log: Path, fault: str = "", script: str = "train.py"
) -> list[BaseProcess]:
    """Start a script in `world_size` processes. Rank r prints into `<log>.<r>`."""
    begin = spawn if "device=cuda" in overrides else start
    return [begin(_rank, *arguments) for arguments in _of_ranks(overrides, world_size, log, fault, script)]


def _of_ranks(overrides: list[str], world_size: int, log: Path, fault: str, script: str) -> list[tuple]:
    """The arguments of `_rank` for every rank."""
    port = free_port()
    untuned = ["trainer.kernel_choices=first"] if "device=cuda" in overrides else []
    given = last_of_each([*untuned, *overrides])
    return [(rank, world_size, port, script, given, f"{log}.{rank}", fault) for rank in range(world_size)]


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _rank(rank: int, world_size: int, port: int, script: str, overrides: list[str], log: str, fault: str) -> None:
    print_into(log)
    set_launch(rank, world_size, port)
    torch.set_num_threads(1)
    if fault == "signalled_at_once":
        _signalled_at_once()
    elif fault == "not_rehearsed":
        _not_rehearsed(rank)
    elif fault in FAULTS:
        Watch.GRACE_SECONDS = 2.0
        _at_third_step(rank, FAULTS[fault])
    sys.argv = [script, *overrides]
    runpy.run_path(str(ROOT / script), run_name="__main__")


def set_launch(rank: int, world_size: int, port: int) -> None:
    """Set what torchrun sets in the environment of a rank."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def as_rank(set_variable: Callable[[str, str], None], rank: int, world_size: int) -> None:
    """Let this process look like a rank that torchrun started. There is no group."""
    for name, value in {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        set_variable(name, str(value))


def leave_kernels_untuned(set_attribute: Callable[[object, str, Any], None] = setattr) -> None:
    """Use the first configuration of each of FLA's kernels, instead of tuning them for minutes at sizes of tests only.

    Records of tuning are not affected: they depend on the configurations tried.
    """
    from triton.runtime.autotuner import Autotuner

    candidates = Autotuner.prune_configs
    set_attribute(Autotuner, "prune_configs", lambda tuner, arguments: candidates(tuner, arguments)[:1])


def curve(directory: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step. A step that was written twice is an error."""
    records = [r for r in read_jsonl(directory / "metrics.jsonl") if "train/loss_nats" in r]
    steps = {r["step"]: (r["train/loss_nats"], r["train/grad_norm"]) for r in records}
    assert len(steps) == len(records)
    return steps


def assert_same_curve(directory: Path, other: Path, rounding: float = ROUNDING) -> None:
    """Two runs have the same steps, with losses and gradient norms that differ by rounding alone."""
    expected = curve(other)
    assert curve(directory).keys() == expected.keys()
    for step, figures in curve(directory).items():
        assert figures == pytest.approx(expected[step], rel=rounding), step


def wait_for_step(group: Path, step: int, seconds: float = 100) -> Path:
    """The only run of a group, after it has written that step."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for metrics in group.glob("*/metrics.jsonl"):
            if metrics.read_text().count("train/loss_nats") >= step:
                return metrics.parent
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached")


def summary_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "summary.json").read_text())


def output(log: Path, world_size: int) -> str:
    return "".join(Path(f"{log}.{rank}").read_text() for rank in range(world_size))


def trained_in(overrides: list[str], world_size: int, tmp_path: Path) -> Path:
    """The directory of a finished run with this many ranks."""
    log, seconds = tmp_path / "ranks", 240 if "device=cuda" in overrides else 60  # on GPUs kernels are compiled
    assert ended(start_ranks(overrides, world_size, log), seconds) == [0] * world_size, output(log, world_size)
    [group] = [override.removeprefix("group=") for override in overrides if override.startswith("group=")]
    return next((tmp_path / "results" / group).iterdir())


def _signalled_at_once() -> None:
    """A signal arrives while the ranks are being set up."""
    original = Trainer.__init__

    def signalled(self: Trainer, *arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        original(self, *arguments)

    Trainer.__init__ = signalled  # type: ignore[method-assign]


def _not_rehearsed(rank: int) -> None:
    """Every rank rehearses its first step, as on a GPU. The last one cannot."""
    original = compilation.rehearse

    def rehearse(*arguments: Any) -> None:
        if rank == dist.get_world_size() - 1:
            raise ValueError("no rehearsal")
        original(*arguments)

    compilation.rehearse, compilation.compiles_ahead = rehearse, lambda config, device: True


def _at_third_step(rank: int, happen: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
    """Make something happen to this rank's loss in the third step."""
    original = Trainer._forward_backward

    def faulty(self: Trainer, *arguments: Any) -> Any:
        nats, stats = original(self, *arguments)
        return (happen(rank, nats) if self.step == 2 else nats), stats

    Trainer._forward_backward = faulty  # type: ignore[method-assign]


def _of_rank_1(
    happen: Callable[[torch.Tensor], Any], wait: bool = False
) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """Something happens to rank 1's loss. If they `wait`, all others do so as GPUs: no exception reaches them."""

    def faulty(rank: int, nats: torch.Tensor) -> torch.Tensor:
        result = happen(nats) if rank == 1 else None
        if wait:
            time.sleep(1000)
        return nats if result is None else result

    return faulty


def _killed(_: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stopped(_: torch.Tensor) -> None:
    """All threads stand still, as on a machine that hangs."""
    os.kill(os.getpid(), signal.SIGSTOP)


def _out_of_memory(_: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("tried to allocate 1 EiB")


def _full_disk(_: torch.Tensor) -> None:
    """From now on the disk is full."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    os.fsync = full


FAULTS = {
    "full_disk": _of_rank_1(_full_disk),
    "nan": _of_rank_1(lambda nats: nats * float("nan")),
    "killed": _of_rank_1(_killed),
    "killed_and_waited_for": _of_rank_1(_killed, wait=True),
    "out_of_memory": _of_rank_1(_out_of_memory),
    "out_of_memory_and_waited_for": _of_rank_1(_out_of_memory, wait=True),
    "stopped": _of_rank_1(_stopped),
    "stuck": _of_rank_1(lambda _: time.sleep(1000)),
}
