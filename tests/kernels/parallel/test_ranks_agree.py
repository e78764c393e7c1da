"""If one of several ranks makes a wrong call, every rank raises the same error in bounded time."""

import os
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from cce_kernels import vocabulary_parallel_linear_cross_entropy
from cce_kernels.parallel.sharding import process_group
from forked import spawn, start
from torch import Tensor
from torch import distributed as dist

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the ranks decide for themselves")

RANKS = 2
PATIENCE = 150  # s until a rank that hangs is given up
DIFFER = "all ranks of the group must call with the same shapes, dtypes and options; rank 0 has e (6, 8), "
GRADIENTS = "vocabulary_parallel_linear_cross_entropy: the gradients of the ranks' losses differ"
EXPECTED = {
    "right": "ok",
    "empty": "ValueError targets: must not be empty; give at least one row, whose target may be ignore_index "
    "(on rank 1 of 2)",
    "no tensor": "ValueError e: must be a tensor, got list (on rank 1 of 2)",
    "other rows": f"ValueError {DIFFER}",
    "other options": f"ValueError {DIFFER}",
    "weights on one rank": f"ValueError {DIFFER}",
    "weights of another type": "ValueError token_weights: must be bfloat16, float16 or float32, got torch.int64 "
    "(on rank 1 of 2)",
    "shards": "ValueError c: has 5 rows, shards says 6 for rank 1 (on rank 1 of 2)",
    "unknown preset": "ValueError preset: must be one of ",
    "unknown option": "ValueError softcp: is no option; the options are softcap, ",
    "different gradients, same rows": f"RuntimeError {GRADIENTS}",
    "different gradients, same rows, buffer": f"RuntimeError {GRADIENTS}",
    "right after all that": "ok",
    "agreed": "ok",
    "agreed, different gradients": "ok, NaN",
    "gone": "ValueError group: there is no process group 'no such group' in this process",
}


def rank_of_group(rank: int, store: str, device: str, printed: str) -> None:
    """What one rank does; each line that it prints tells what became of a call."""
    with open(printed, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS,
        timeout=timedelta(seconds=100),
    )  # fmt: skip
    group = dist.new_group([0, 1])

    def report(name, e=None, rows="own", scale=1.0, given=None, **options):
        torch.manual_seed(0)
        e = torch.randn(6, 8, device=device) if e is None else e.to(device)
        e.requires_grad_()
        c = torch.randn(5, 8, device=device, requires_grad=True)
        targets = torch.arange(len(e), device=device) + 3
        try:
            loss = vocabulary_parallel_linear_cross_entropy(
                given or e, c, targets, **{"shards": [5, 5], "rows": rows, "group": group} | options
            )
            (loss * scale).sum().backward()
            print(name, "ok, NaN" if e.grad.isnan().all() and c.grad.isnan().all() else "ok", flush=True)
        except Exception as error:
            left = (e.grad, c.grad, None if options.get("main_grad_c") is None else options["main_grad_c"].any().item())
            print(name, type(error).__name__, str(error), left in ((None, None, None), (None, None, False)), flush=True)

    first = rank == 0
    report("right")
    report("empty", e=torch.randn(6 if first else 0, 8))
    report("no tensor", given=None if first else [1.0])
    report("other rows", e=torch.randn(6 if first else 4, 8))
    report("other options", softcap=20.0 if first else 30.0)
    weights = torch.ones(6, device=device)
    report("weights on one rank", **({"token_weights": weights} if first else {}))
    report("weights of another type", token_weights=weights if first else weights.long())
    report("shards", shards=[5, 5] if first else [4, 6])
    report("unknown preset", **({} if first else {"preset": "nothing"}))
    report("unknown option", **({} if first else {"softcp": 3}))
    report("different gradients, same rows", rows="same", scale=1.0 + rank)
    buffer = torch.zeros(5, 8, device=device)
    report("different gradients, same rows, buffer", rows="same", scale=1.0 + rank, main_grad_c=buffer)
    report("right after all that")
    with patch.object(dist, "all_gather_object", None):  # calling it is an error
        report("agreed", agreed=True)
        with patch.object(Tensor, "item", None):  # so is waiting for a number
            report("agreed, different gradients", rows="same", scale=1.0 + rank, agreed=True)
    dist.destroy_process_group()
    try:
        process_group("no such group")
    except ValueError as error:
        print("gone", type(error).__name__, str(error), flush=True)


def run(folder: Path, device: str) -> list[list[str]]:
    """The lines that every rank prints."""
    begin = start if device == "cpu" else spawn
    paths = [folder / f"printed.{rank}" for rank in range(RANKS)]
    ranks = [begin(rank_of_group, rank, str(folder / "store"), device, str(paths[rank])) for rank in range(RANKS)]
    until = time.monotonic() + PATIENCE
    for process in ranks:
        process.join(max(until - time.monotonic(), 0))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    printed = [path.read_text() if path.exists() else "" for path in paths]
    assert codes == [0] * RANKS, "\n".join(printed)[-5000:]
    return [[line for line in text.splitlines() if line.startswith(tuple(EXPECTED))] for text in printed]


def check(printed: list[list[str]]) -> None:
    assert printed[0] == printed[1]
    assert len(printed[0]) == len(EXPECTED)
    for line, (name, message) in zip(printed[0], EXPECTED.items(), strict=True):
        assert line.startswith(f"{name} {message}"), line
        assert not message.startswith("ok") or line == f"{name} {message}"
        assert "Error" not in message or name == "gone" or line.endswith("True"), f"{name}: a gradient was written"


def test_every_rank_raises_the_same_error(tmp_path):
    check(run(tmp_path, "cpu"))


@pytest.mark.gpu
def test_every_rank_raises_the_same_error_on_gpus(tmp_path):
    if torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} GPUs")
    check(run(tmp_path, "cuda"))
