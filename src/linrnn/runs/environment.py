"""The software, hardware and commit of a run, for environment.json.

:func:`describe_environment` identifies no person or place: it has no host or user names, paths or keys, and no
environment variables except the CUDA allocator's and LINRNN_COMMIT. The command and the settings of a start hold
paths as they were given, apart from those that :func:`command_line` shortens.
"""

import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from linrnn.config import CONFIG_DIR, operational_settings
from linrnn.config.schema import Config
from linrnn.core.dates import utc_now
from linrnn.core.machine import cores
from linrnn.core.output import is_program
from linrnn.losses import KERNELS
from linrnn.models import tuning
from linrnn.runs.origins import Process

ROOT = CONFIG_DIR.parent
PACKAGES = (
    *("linrnn", "torch", "triton", "flash-linear-attention", "liger-kernel", "cut-cross-entropy", "quack-kernels"),
    *("nvidia-cutlass-dsl", "torchao", "transformers", "tokenizers", "datasets", "numpy", "hydra-core", "omegaconf"),
    "wandb",
)
GPU_STATE = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "watts": "power.draw", "celsius": "temperature.gpu"}
CSV = "--format=csv,noheader,nounits"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
CODE = ("src", "kernels", "configs", "scripts", "train.py", "pyproject.toml")


def command_line() -> str:
    """The command of this process, or of torchrun if torchrun started this process, as runs and reports record it.

    Reports are committed, and a path of one machine helps nobody elsewhere. Paths inside the repository are therefore
    relative to it, and a results directory outside is called `results`.
    """
    script = Path(sys.argv[0]).resolve()
    here = script.relative_to(ROOT).as_posix() if script.is_relative_to(ROOT) and not is_program() else sys.argv[0]
    starter = [] if is_program() else ["python"]
    if processes := os.environ.get("LOCAL_WORLD_SIZE"):
        machines = os.environ.get("GROUP_WORLD_SIZE", "1")
        nodes = [f"--nnodes={machines}"] if machines != "1" else []
        starter = ["torchrun", *nodes, f"--nproc-per-node={processes}", *["-m"] * is_program()]
    return shlex.join([*starter, *(here.split() if is_program() else [here]), *without_machine_paths(sys.argv[1:])])


def without_machine_paths(arguments: Sequence[str]) -> list[str]:
    """`key=value` arguments with paths changed as :func:`command_line` describes."""
    pairs = [argument.partition("=") for argument in arguments]
    results = next((value for key, _, value in pairs if key == "results_dir"), "results")

    def relative(value: str) -> str:
        path = Path(value)
        for folder, name in ((ROOT, Path()), (Path(results), Path("results"))):
            if path.is_absolute() and path.is_relative_to(folder):
                return (name / path.relative_to(folder)).as_posix()
        return value

    return [f"{key}{equals}{relative(value)}" for key, equals, value in pairs]


def describe_process(config: Config, from_step: int, continues: dict[str, Any] | None) -> Process:
    """The entry of environment.json for this process, which trains a run from `from_step` on.

    It has the keys of :func:`describe_environment` and: `command`; `settings`, the operational keys; `continues`;
    `started` and `ended`, dates; `from_step` and `to_step`, optimizer steps done. `ended` and `to_step` are null while
    the process runs, or if it was killed.

    Args:
        continues: the run, step and tokens whose weights and optimizer state this run began with (`continue_from`).
    """
    return {
        **describe_environment(),
        "command": command_line(),
        "started": utc_now(),
        "ended": None,
        "from_step": from_step,
        "to_step": None,
        "settings": operational_settings(config),
        "continues": continues,
    }


def describe_environment() -> dict[str, Any]:
    """A JSON-ready description. Values that cannot be found are null. Takes a few tens of milliseconds.

    `kernel_choices` are those of the autotuned kernels that this process has called so far (`linrnn.models.tuning`).
    """
    return {
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        # It affects which batch fits.
        "cuda_allocator": next((os.environ[name] for name in ALLOCATOR if os.environ.get(name)), None),
        "gpus": _gpus(),
        "gpu_driver": (_answer("nvidia-smi", "--query-gpu=driver_version", CSV) or "").partition("\n")[0] or None,
        "cpu": _cpu_model(),
        "cpu_cores": cores(),
        "torch_threads": torch.get_num_threads(),
        "code": code_hashes(),
        "git": _git_state(Path(__file__)),
        "kernel_choices": tuning.used(),
    }


@functools.cache
def code_hashes() -> dict[str, str]:
    """Twelve digits of a hash of the source text of each package that computes a run, where it is imported from.

    Two runs of one hash ran the same code, whatever the commit or the rest of the working tree.
    """
    specs = {package: importlib.util.find_spec(package) for package in ("linrnn", KERNELS)}
    return {name: hash_of_source(Path(spec.origin).parent) for name, spec in specs.items() if spec and spec.origin}


def hash_of_source(folder: Path) -> str:
    """Of every Python file below `folder`: their paths and texts."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def gpu_state(device: torch.device) -> dict[str, Any] | None:
    """A GPU's current clocks, power and temperature, and the number of other processes on it; None on a CPU.

    Values that nvidia-smi does not report are None. Takes a few tens of milliseconds.
    """
    if device.type != "cuda":
        return None
    gpu = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    values = (_answer("nvidia-smi", gpu, f"--query-gpu={','.join(GPU_STATE.values())}", CSV) or "").split(",")
    users = _answer("nvidia-smi", gpu, "--query-compute-apps=pid", CSV)
    return {
        **dict.fromkeys(GPU_STATE),
        **dict(zip(GPU_STATE, map(_number, values), strict=False)),
        "other_processes": None if users is None else max(len(users.split()) - 1, 0),
    }


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:  # [N/A]
        return None


@functools.cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, Any]]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [
        {
            "name": gpu.name,
            "memory_bytes": gpu.total_memory,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "multiprocessors": gpu.multi_processor_count,
        }
        for gpu in map(torch.cuda.get_device_properties, range(count))
    ]


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def _git_state(file: Path) -> dict[str, Any] | None:
    """The commit, and whether code or configurations differ from it (`dirty`); None if git does not track `file`.

    A copy of the tree without its history takes the commit from the variable LINRNN_COMMIT. `dirty` is then null,
    which means unknown: nothing here can compare the copy with the commit.
    """
    if commit := os.environ.get("LINRNN_COMMIT"):
        return {"commit": commit, "dirty": None}
    folder = str(file.parent)
    if _answer("git", "-C", folder, "ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = _answer("git", "-C", folder, "rev-parse", "HEAD")
    from_root = [f":/{path}" for path in CODE]
    changes = _answer("git", "-C", folder, "status", "--porcelain", "--", *from_root)
    return {"commit": commit, "dirty": None if changes is None else changes != ""}


def _answer(program: str, *arguments: str) -> str | None:
    """The stripped output of a program; None if it is missing, fails or takes longer than ten seconds."""
    if shutil.which(program) is None:
        return None
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
