"""Checks that all ranks of a group make the same call, and raises one error on all ranks if they do not.

A rank that refuses its arguments, or has different ones, would leave the other ranks waiting for it. So every rank
first sends a line of text: its arguments, or the reason why it refuses them.

Cost: `all_gather_object`, for which the host waits. On a GPU it runs on a stream of its own, so that it waits for no
computation. It does wait for earlier collectives of the group. A training loop therefore exchanges lines in its first
step only (`agreed`). Nothing is exchanged while a CUDA graph is captured, or under torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T", bound=tuple[Any, ...])
_REFUSED = "refused: "


def agree(check: Callable[[], T], describe: Callable[..., str], group: dist.ProcessGroup, device: torch.device) -> T:
    """Run `check()` on every rank and return its result. All ranks call this together.

    Args:
        check: raises an error if this rank's arguments are wrong.
        describe: returns, from check's result, one line with everything that must be the same on all ranks.

    Raises:
        ValueError: on every rank, with the same message: a rank's check failed, or two ranks' lines differ.
    """
    refusal = found = None
    try:
        found = check()
        line = describe(*found)
    except (TypeError, ValueError) as error:
        refusal, line = error, f"{_REFUSED}{error}"
    lines = [""] * dist.get_world_size(group)
    with torch.cuda.stream(_stream(device)) if device.type == "cuda" else nullcontext():
        dist.all_gather_object(lines, line, group)
    refused = {rank: text.removeprefix(_REFUSED) for rank, text in enumerate(lines) if text.startswith(_REFUSED)}
    if refused:
        first = min(refused)
        same = [str(rank) for rank, text in refused.items() if text == refused[first]]
        where = "" if len(same) == len(lines) else f" (on rank {', '.join(same)} of {len(lines)})"
        raise ValueError(refused[first] + where) from refusal
    for rank, text in enumerate(lines):
        if text != lines[0]:
            raise ValueError(
                "all ranks of the group must call with the same shapes, dtypes and options; rank 0 has "
                f"{lines[0]}; rank {rank} has {text}"
            )
    assert found is not None
    return found


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
