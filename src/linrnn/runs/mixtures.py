"""The origin of figures: the environment of their run. Tells whether two origins agree."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# Two runs, or two processes of one run, must share these for their figures to stand in one table.
SAME_ORIGIN = ("packages", "gpus", "cuda", "cuda_allocator", "gpu_driver", "cpu", "git")
# Its choices of kernels must not contradict each other: another model or batch may need further ones.
CHOICES = "kernel_choices"
# Keys of an entry of environment.json that describe the process and not its environment.
OF_A_PROCESS = ("command", "started", "ended", "from_step", "to_step", "settings", "continues", "seconds_to")


@dataclass(frozen=True)
class Origin:
    """The environment of a run's processes.

    Attributes:
        environment: of the first process that trained steps of the run.
        mixture: the keys in which the run's processes differ (:func:`differing`); empty for a run of one origin.
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
    kept = {key: value for key, value in first.items() if key not in OF_A_PROCESS}
    return Origin(kept, tuple(differing(trained)))


def same_origin(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The keys in which two environments differ, as :func:`differing` gives them."""
    return differing([a, b])


def differing(environments: Iterable[dict[str, Any]]) -> list[str]:
    """The keys of SAME_ORIGIN in which not all environments agree, and CHOICES if two choices contradict each other."""
    every = list(environments)
    found = [key for key in SAME_ORIGIN if any(one.get(key) != every[0].get(key) for one in every)]
    return found + ([CHOICES] if contradicting_kernels(every) else [])


def contradicting_kernels(environments: Iterable[dict[str, Any]]) -> list[str]:
    """The kernels, with their keys, that ran with different configurations."""
    chosen: dict[str, set[str]] = {}
    for environment in environments:
        for kernel, config in ((environment.get(CHOICES) or {}).get("choices") or {}).items():
            chosen.setdefault(kernel, set()).add(config)
    return sorted(kernel for kernel, configs in chosen.items() if len(configs) > 1)
