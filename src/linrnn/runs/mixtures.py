"""The origin of figures: the environment of their run. Tells whether two origins agree."""

from dataclasses import dataclass, field
from typing import Any

# Two runs, or two processes of one run, must share these for their figures to stand in one table.
SAME_ORIGIN = ("packages", "gpus", "cuda", "cuda_allocator", "gpu_driver", "cpu", "git")
# Keys of an entry of environment.json that describe the process and not its environment.
OF_A_PROCESS = ("command", "started", "ended", "from_step", "to_step", "settings", "continues")


@dataclass(frozen=True)
class Origin:
    """The environment of a run's processes.

    Attributes:
        environment: of the first process that trained steps of the run.
        mixture: the keys of SAME_ORIGIN in which the run's processes differ; empty for a run of one origin.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    mixture: tuple[str, ...] = ()


def read_origin(content: dict[str, Any]) -> Origin:
    """The origin from environment.json, `{"processes": [entry, …]}`, or from a committed report's one flat entry."""
    processes = content.get("processes", [content] if content else [])
    trained = [
        process for process in processes if "to_step" not in process or process["to_step"] != process["from_step"]
    ]
    first: dict[str, Any] = next(iter(trained or processes), {})
    differing = (key for key in SAME_ORIGIN if any(key in same_origin(first, other) for other in trained))
    return Origin({key: value for key, value in first.items() if key not in OF_A_PROCESS}, tuple(differing))


def same_origin(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The keys of SAME_ORIGIN in which two environments differ."""
    return [key for key in SAME_ORIGIN if a.get(key) != b.get(key)]
