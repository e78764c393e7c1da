"""What environment.json says: which process trained which steps of a run, with which code, on which device.

    {"processes": [{…}, …]}    each entry as `linrnn.runs.environment.describe_process` begins it

`from_step` and `to_step` count optimizer steps done. `ended` and `to_step` are null while a process runs, and stay null
if it is killed. The next process begins at a checkpoint; steps that an earlier process trained after it are lost.
:func:`settled` removes them from the record. The entries then cover the run's steps once, in order.

Figures of two origins do not belong into one comparison. The commit does not count, nor what stands in the working tree
beside the two packages: only the source that computes.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from linrnn.core.files import read_object

Process = dict[str, Any]
COMPUTING = ("torch", "triton", "flash-linear-attention")  # packages whose versions belong to an origin
# Its choices of kernels must not contradict each other: another model or batch may need further ones.
CHOICES = "kernel_choices"
# Keys of an entry of environment.json that describe the process and not its environment.
OF_A_PROCESS = ("command", "started", "ended", "from_step", "to_step", "settings", "continues", "seconds_to")


# --------------------------------------------------------------------------------------------------------- processes
def settled(processes: list[Process], step: int) -> list[Process]:
    """The entries of earlier processes when a new one begins at `step`: each with the steps that remain, if any."""
    kept = []
    for process in processes:
        to_step = step if process["to_step"] is None else min(process["to_step"], step)
        if process["from_step"] < to_step:
            kept.append({**process, "to_step": to_step})
    return kept


def read_processes(path: Path) -> list[Process]:
    """The entries of an environment.json; none if there is no file.

    Raises:
        DataError: the file is damaged.
    """
    remedy = "it is damaged: move the run's directory away"
    return list(read_object(path, ("processes",), remedy)["processes"]) if path.exists() else []


# ----------------------------------------------------------------------------------------------------------- origins
def origins_of(processes: list[Process]) -> list[dict[str, Any]]:
    """The environments of the processes that trained steps of a run, one for each origin; else of the first."""
    found: list[dict[str, Any]] = []
    for process in [one for one in processes if one["to_step"] != one["from_step"]] or processes[:1]:
        environment = {key: value for key, value in process.items() if key not in OF_A_PROCESS}
        if all(differing([one, environment]) for one in found):
            found.append(environment)
    return found


def origin_of(environment: Mapping[str, Any]) -> dict[str, Any]:
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
    """The keys of :func:`origin_of` in which not all environments agree.

    CHOICES is one of them if a kernel ran with two configurations.
    """
    every = list(environments)
    own = [origin_of(environment) for environment in every]
    chosen: dict[str, set[str]] = {}
    for environment in every:
        for kernel, config in ((environment.get(CHOICES) or {}).get("choices") or {}).items():
            chosen.setdefault(kernel, set()).add(config)
    contradicting = any(len(configs) > 1 for configs in chosen.values())
    keys = dict.fromkeys(key for one in own for key in one)
    found = [key for key in keys if any(one.get(key) != own[0].get(key) for one in own)]
    return found + [CHOICES] * contradicting


def commit_in_words(git: Mapping[str, Any] | None, digits: int | None = None) -> str:
    """The commit of an environment, and what is known of changes to its files.

    Args:
        git: `git` of :func:`describe_environment`.
        digits: of the commit; None: all.
    """
    if git is None or git["commit"] is None:
        return "unknown"
    known = {True: " with uncommitted changes", False: "", None: " (uncommitted changes: unknown)"}
    changes = known[git.get("dirty")]
    return f"{git['commit'][:digits]}{changes}"
