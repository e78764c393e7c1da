"""If one of several ranks makes a wrong call, every rank raises the same error in bounded time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the ranks decide for themselves")

RANKS = 2
PATIENCE = 150  # s until a rank that hangs is given up

PROGRAM = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from cce_kernels import vocabulary_parallel_linear_cross_entropy

rank, device = int(sys.argv[1]), sys.argv[3]
if device == "cuda":
    torch.cuda.set_device(rank)
dist.init_process_group(
    "nccl" if device == "cuda" else "gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2,
    timeout=timedelta(seconds=100),
)
group = dist.new_group([0, 1])


def report(name, e=None, rows="own", scale=1.0, group=group, buffer=None, **options):
    torch.manual_seed(0)
    e = torch.randn(6, 8, device=device) if e is None else e.to(device)
    e.requires_grad_()
    c = torch.randn(5, 8, device=device, requires_grad=True)
    targets = torch.arange(len(e), device=device) + 3
    try:
        loss = vocabulary_parallel_linear_cross_entropy(
            e, c, targets, **{"shards": [5, 5], "rows": rows, "group": group} | options
        )
        (loss * scale).sum().backward()
        print(name, "ok", flush=True)
    except Exception as error:
        left = (e.grad, c.grad, None if options.get("main_grad_c") is None else options["main_grad_c"].any().item())
        print(name, type(error).__name__, str(error), left in ((None, None, None), (None, None, False)), flush=True)


first = rank == 0
report("right")
report("empty", e=torch.randn(6 if first else 0, 8))
report("other rows", e=torch.randn(6 if first else 4, 8))
report("other options", softcap=20.0 if first else 30.0)
report("shards", shards=[5, 5] if first else [4, 6])
report("unknown option", **({} if first else {"preset": "nothing"}))
report("different gradients, same rows", rows="same", scale=1.0 + rank)
report("different gradients, same rows, buffer", rows="same", scale=1.0 + rank,
       main_grad_c=torch.zeros(5, 8, device=device))
report("right after all that")
dist.destroy_process_group()
try:
    from cce_kernels.parallel.sharding import process_group
    process_group("no such group")
except ValueError as error:
    print("gone", type(error).__name__, str(error))
"""
DIFFER = "all ranks of the group must call with the same shapes, dtypes and options; rank 0 has e (6, 8), "
GRADIENTS = "vocabulary_parallel_linear_cross_entropy: the gradients of the ranks' losses differ"
EXPECTED = {
    "right": "ok",
    "empty": "ValueError targets: must not be empty; give at least one row, whose target may be ignore_index "
    "(on rank 1 of 2)",
    "other rows": f"ValueError {DIFFER}",
    "other options": f"ValueError {DIFFER}",
    "shards": "ValueError c: has 5 rows, shards says 6 for rank 1 (on rank 1 of 2)",
    "unknown option": "ValueError preset: must be one of ",
    "different gradients, same rows": f"RuntimeError {GRADIENTS}",
    "different gradients, same rows, buffer": f"RuntimeError {GRADIENTS}",
    "right after all that": "ok",
    "gone": "ValueError group: there is no process group 'no such group' in this process",
}


def run(folder: Path, device: str) -> list[list[str]]:
    """The lines that every rank prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(folder / "store"), device],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        printed = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), "\n".join(printed)[-5000:]
    return [[line for line in text.splitlines() if line.startswith(tuple(EXPECTED))] for text in printed]


def check(printed: list[list[str]]) -> None:
    assert printed[0] == printed[1]
    assert len(printed[0]) == len(EXPECTED)
    for line, (name, message) in zip(printed[0], EXPECTED.items(), strict=True):
        assert line.startswith(f"{name} {message}"), line
        assert "Error" not in message or name == "gone" or line.endswith("True"), f"{name}: a gradient was written"


def test_every_rank_raises_the_same_error(tmp_path):
    check(run(tmp_path, "cpu"))


@pytest.mark.gpu
def test_every_rank_raises_the_same_error_on_gpus(tmp_path):
    if torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} GPUs")
    check(run(tmp_path, "cuda"))
