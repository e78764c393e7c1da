"""If one of several ranks makes a wrong call, every rank raises the same error in bounded time."""

import os
from typing import Any

import pytest
import torch
from cce_kernels import vocabulary_parallel_linear_cross_entropy
from cce_kernels.parallel.sharding import process_group
from everywhere import joined, run_ranks
from torch import Tensor
from torch import distributed as dist

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the ranks decide for themselves")

RANKS = 2
DIFFER = "ValueError all ranks of the group must call with the same shapes, dtypes and options; rank 0 has e (6, 8), "
GRADIENTS = "RuntimeError vocabulary_parallel_linear_cross_entropy: the gradients of the ranks' losses differ"
EMPTY = "ValueError targets: must not be empty; give at least one row, whose target may be ignore_index (on rank 1"
WEIGHTS = "ValueError token_weights: must be bfloat16, float16 or float32, got torch.int64 (on rank 1 of 2)"
ONES, SAME, AGREED = torch.ones(6), {"rows": "same"}, {"agreed": True}
# The options of rank 0, those in which rank 1 differs, and how the line begins that both print. Options of the loss,
# and n: rows of e. scale: what the loss is multiplied by.
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "right": ({}, {}, "ok"),
    "empty": ({}, {"n": 0}, EMPTY),
    "no tensor": ({}, {"e": [1.0]}, "ValueError e: must be a tensor, got list (on rank 1 of 2)"),
    "other rows": ({}, {"n": 4}, DIFFER),
    "other options": ({"softcap": 20.0}, {"softcap": 30.0}, DIFFER),
    "weights on one rank": ({"token_weights": ONES}, {"token_weights": None}, DIFFER),
    "weights of another type": ({"token_weights": ONES}, {"token_weights": ONES.long()}, WEIGHTS),
    "shards": ({}, {"shards": [4, 6]}, "ValueError c: has 5 rows, shards says 6 for rank 1 (on rank 1 of 2)"),
    "unknown preset": ({}, {"preset": "nothing"}, "ValueError preset: must be one of "),
    "unknown option": ({}, {"softcp": 3}, "ValueError softcp: is no option; the options are softcap, "),
    "different gradients, same rows": (SAME, {"scale": 2.0}, GRADIENTS),
    "different gradients, buffer": (SAME | {"main_grad_c": torch.zeros(5, 8)}, {"scale": 2.0}, GRADIENTS),
    "right after all that": ({}, {}, "ok"),
    "agreed": (AGREED, {}, "ok"),
    "agreed, different gradients": (AGREED | SAME, {"scale": 2.0}, "ok, NaN"),
}
GONE = "gone: ValueError group: there is no process group 'no such group' in this process"


def rank_of_group(rank: int, store: str, device: str, printed: str) -> None:
    """What one rank does; each line that it prints tells what became of a call."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)

    def outcome(n: int = 6, e: Any = None, scale: float = 1.0, **options: Any) -> str:
        torch.manual_seed(0)
        leaf, c = (torch.randn(size, 8, device=device, requires_grad=True) for size in (n, 5))
        options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
        try:
            loss = vocabulary_parallel_linear_cross_entropy(
                e or leaf, c, torch.arange(n, device=device) + 3,
                **{"shards": [5, 5], "rows": "own", "group": group} | options,
            )  # fmt: skip
            (loss * scale).sum().backward()
            return "ok, NaN" if leaf.grad.isnan().all() and c.grad.isnan().all() else "ok"
        except Exception as error:
            buffer = options.get("main_grad_c")
            written = leaf.grad is not None or c.grad is not None or (buffer is not None and buffer.any())
            return f"{type(error).__name__} {error}{' A gradient was written!' if written else ''}"

    with (
        open(printed, "w") as file, pytest.MonkeyPatch.context() as patch,
        joined(rank, RANKS, store, device, seconds=100),
    ):  # fmt: skip
        group = dist.new_group([0, 1])
        for name, (first, second, _) in CALLS.items():
            if name == "agreed":
                patch.setattr(dist, "all_gather_object", None)  # calling it is an error
            if name == "agreed, different gradients":
                patch.setattr(Tensor, "item", None)  # so is waiting for a number
            print(f"{name}: {outcome(**first | (second if rank else {}))}", file=file, flush=True)
        try:
            process_group("no such group")
        except ValueError as error:
            print(f"gone: ValueError {error}", file=file)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_rank_raises_the_same_error(device, tmp_path):
    paths = [tmp_path / f"printed.{rank}" for rank in range(RANKS)]
    arguments = [(rank, str(tmp_path / "store"), device, str(path)) for rank, path in enumerate(paths)]
    codes = run_ranks(rank_of_group, arguments, device)
    printed = [path.read_text() if path.exists() else "" for path in paths]
    assert codes == [0] * RANKS, printed
    assert printed[0] == printed[1]
    lines = printed[0].splitlines()
    for line, begin in zip(lines, [*(f"{name}: {begin}" for name, (*_, begin) in CALLS.items()), GONE], strict=True):
        assert line == begin if ": ok" in begin else line.startswith(begin), line
        assert not line.endswith("written!")
