"""The origin of figures: which code, on which device. Tells whether two origins agree.

The commit does not count, nor what stands in the working tree beside the two packages: only the source that computes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

COMPUTING = ("torch", "triton", "flash-linear-attention")  # packages whose versions belong to an origin
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


def identity(environment: Mapping[str, Any]) -> dict[str, Any]:
    """What two environments must share for their figures to stand in one table, by what it is called in a warning.

    The source of both packages, by its hash; where none was recorded, the commit stands for it. The versions of
    COMPUTING, the GPUs' names (without one, the CPU's), and the CUDA allocator, which decides what fits.
    """
    gpus, packages = environment.get("gpus") or [], environment.get("packages") or {}
    code = {f"code of {package}": digest for package, digest in (environment.get("code") or {}).items()}
    return {
        **(code or {"commit": (environment.get("git") or {}).get("commit")}),
        **{package: packages.get(package) for package in COMPUTING},
        "device": sorted({gpu["name"] for gpu in gpus}) or environment.get("cpu"),
        "cuda_allocator": environment.get("cuda_allocator"),
    }


def differing(environments: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys of :func:`identity` in which not all environments agree, and CHOICES if two contradict each other."""
    every = list(environments)
    own = [identity(environment) for environment in every]
    keys = dict.fromkeys(key for one in own for key in one)
    found = [key for key in keys if any(one.get(key) != own[0].get(key) for one in own)]
    return found + ([CHOICES] if contradicting_kernels(every) else [])


def same_origin(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The keys in which two environments differ, as :func:`differing` gives them."""
    return differing([a, b])


def contradicting_kernels(environments: Iterable[Mapping[str, Any]]) -> list[str]:
    """The kernels, with their keys, that ran with different configurations."""
    chosen: dict[str, set[str]] = {}
    for environment in environments:
        for kernel, config in ((environment.get(CHOICES) or {}).get("choices") or {}).items():
            chosen.setdefault(kernel, set()).add(config)
    return sorted(kernel for kernel, configs in chosen.items() if len(configs) > 1)
