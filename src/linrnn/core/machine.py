"""This machine: its free memory, its free disk, its cores, its devices' names; and how long this process has run.

None means that the figure cannot be known.
"""

import contextlib
import os
import re
import shutil
import time
from pathlib import Path

GIB = 2**30
BEGAN = time.monotonic()  # every command imports this module at its start
SHARED_GPU = "LINRNN_SHARED_GPU"  # environment variable: 1 if other runs compute on this process's GPU at the same time


def size_in_words(n_bytes: float) -> str:
    """A size in the unit that reads best: 10.3 MiB, 1.85 GiB."""
    unit, name = next(((u, n) for u, n in ((GIB, "GiB"), (2**20, "MiB")) if n_bytes >= u), (2**10, "KiB"))
    number = n_bytes / unit
    return f"{number:,.{0 if number >= 100 else 1 if number >= 10 else 2}f} {name}"


def slug(device: str) -> str:
    """A device's name as part of a file's name: NVIDIA H200 -> nvidia_h200."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def gpu_is_shared() -> bool:
    """Whether this process was told that other runs compute on its GPU (`share_gpus=true` of scripts/sweep.py).

    The times of its steps are then no measurements, and other runs may fill the GPU's memory.
    """
    return os.environ.get(SHARED_GPU) == "1"


def seconds_since_start() -> float:
    """Seconds since this command imported its command line. Python had started less than a second before."""
    return time.monotonic() - BEGAN


# ----------------------------------------------------------------------------------------------------------- cores
def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def ranks_here() -> int:
    """Processes of this run on this machine, as torchrun says; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _seconds_of_others() -> float:
    """CPU time that other processes took on this process's cores since the machine started; 0 where none is known."""
    with contextlib.suppress(OSError):  # no /proc, as on macOS
        lines = [line.split() for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()]
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        # user, nice, system, idle, iowait, irq, softirq, steal
        busy = sum(sum(map(int, times[:3] + times[5:8])) for name, *times in lines if name in ours)
        return busy / os.sysconf("SC_CLK_TCK") - sum(os.times()[:2])
    return 0.0


OTHERS_BEFORE = _seconds_of_others()  # at BEGAN


def wait_asleep_if_busy() -> None:
    """Before torch is imported: if other processes take half a core, OpenMP's waiting threads shall sleep, not spin.

    On a busy machine spinning threads hold each other up: a step takes about four times as long. On an idle one they
    are up to twice as fast, so there they stay.
    """
    taken = (_seconds_of_others() - OTHERS_BEFORE) / seconds_since_start()
    if taken >= 0.5 and os.environ.get("OMP_NUM_THREADS") != "1":
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def busy_with_others(threads: int) -> str | None:
    """A line if other processes take this machine's cores from the `threads` of this one, by the load of a minute."""
    load, there = os.getloadavg()[0], os.cpu_count() or 1
    if load < 1.2 * there or load < threads + 0.7:
        return None
    waiting = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE" or threads == 1
    remedy = "" if waiting else "; OMP_WAIT_POLICY=PASSIVE may be several times faster here (docs/troubleshooting.md)"
    return f"busy machine: a load of {load:.0f} on {there} cores makes steps slow and uneven{remedy}"


# -------------------------------------------------------------------------------------------------- memory and disk
def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process and its children can still take without swapping.

    It is the smaller of two figures: the kernel's estimate (`MemAvailable`, which counts caches that can be dropped),
    and what the limits of this process's cgroups (version 2) leave. A container has less than its machine.

    Args:
        root: where /proc and /sys are mounted.
    """
    if (available := _number(root / "proc/meminfo", r"^MemAvailable:\s+(\d+) kB")) is None:
        return None
    left = [available * 1024]
    group = Path(_text(root / "proc/self/cgroup").rpartition("::/")[2].strip())
    for directory in (root / "sys/fs/cgroup" / part for part in (group, *group.parents)):
        most, taken = (_number(directory / f"memory.{name}") for name in ("max", "current"))
        if most is not None and taken is not None:  # "max" says that there is no limit
            files = _number(directory / "memory.stat", r"^inactive_file (\d+)$")  # not read lately: can be dropped
            left.append(max(0, most - taken + (files or 0)))
    return min(left)


def free_disk(path: Path) -> int:
    """Bytes that this user can still write under `path`. The path need not exist yet."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def _number(file: Path, pattern: str = r"(\d+)") -> int | None:
    """The first number in a file that matches; None if there is none."""
    found = re.search(pattern, _text(file), re.MULTILINE)
    return int(found[1]) if found else None
