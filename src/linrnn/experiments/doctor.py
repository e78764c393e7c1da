"""The report of `scripts/doctor.py`: what can run on this machine, and for the rest the cause and the remedy."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from linrnn.config import load_config
from linrnn.config.schema import Config
from linrnn.core.errors import LinrnnError
from linrnn.core.machine import GIB, free_disk
from linrnn.core.requirements import c_compiler, cxx_compiler, has_python_headers
from linrnn.losses import apple_variants, check_loss, loss_names
from linrnn.models import check_supported
from linrnn.models.architecture import MODELS
from linrnn.models.language_model import compute_dtype
from linrnn.runs.environment import describe_environment
from linrnn.runs.loggers import has_wandb_key
from linrnn.training.runtime import resolve_device, resolve_precision

ABSENT = {
    "quack-kernels": "not installed (benchmarks/loss.py alone uses it)",
    "nvidia-cutlass-dsl": "not installed (benchmarks/loss.py alone uses it)",
    "torchao": "not installed (trainer.float8 needs it: pip install 'linrnn[float8]')",
}
Finding = tuple[str, str]  # what was checked; "ok", a fact, or "no" with the cause and, below it, the remedy


def diagnose(config: Config) -> str:
    """The whole report for the device and precision that `config` chooses, as aligned text.

    Raises:
        UnsupportedError: `device=cuda` without a GPU.
    """
    device = resolve_device(config.device)
    precision = resolve_precision(config.trainer.precision, device)
    where = f"on {device.type} with {precision}"
    sections = {
        "Machine": machine(config),
        f"Losses {where} (loss=…)": losses(device, compute_dtype(precision)),
        f"Models {where} (model=…)": models(device),
    }
    return "\n\n".join(f"{title}\n{table(findings)}" for title, findings in sections.items())


def machine(config: Config) -> list[Finding]:
    """Versions, hardware, compilers, whether there is a wandb key (never the key), and free disk space."""
    facts = describe_environment()
    notes = {
        "torch": f" (CUDA {facts['cuda']})" if facts["cuda"] else " (CPU build)",
        "cut-cross-entropy": f" (variants: {', '.join(_variants()) or 'none'})",
    }
    gpus = [
        f"{gpu['name']} ({gpu['memory_bytes'] / GIB:.0f} GiB, compute capability {gpu['compute_capability']}, "
        f"driver {facts['gpu_driver']})"
        for gpu in facts["gpus"]
    ]
    places = {"results_dir": config.results_dir, "data.cache_dir": config.data.cache_dir}
    return [
        ("python", f"{facts['python']} ({facts['os']}, {sys.prefix})"),
        *(
            (name, f"{v}{notes.get(name, '')}" if v else ABSENT.get(name, "not installed"))
            for name, v in facts["packages"].items()
        ),
        *(("GPU", gpu) for gpu in gpus or ["none that PyTorch sees"]),
        ("CPU", f"{facts['cpu'] or 'unknown'} ({facts['cpu_cores']} cores)"),
        ("C compiler", c_compiler() or "none"),
        ("C++ compiler", cxx_compiler() or "none"),
        ("Python.h", "found" if has_python_headers() else "not found"),
        ("wandb API key", "present" if has_wandb_key() else "absent (runs are logged offline)"),
        *((f"disk at {key}", f"{free_disk(Path(at)) / GIB:.1f} GiB free ({at})") for key, at in places.items()),
    ]


def losses(device: torch.device, dtype: torch.dtype) -> list[Finding]:
    """Every loss backend with its default options."""
    return [attempt(name, check_loss, load_config([f"loss={name}"]).loss, device, dtype) for name in loss_names()]


def models(device: torch.device) -> list[Finding]:
    """Every architecture with its default options."""
    return [attempt(name, check_supported, load_config([f"model={name}"]).model, device) for name in MODELS]


def attempt(name: str, check: Callable[..., object], *arguments: object) -> Finding:
    """The result of a check that raises a LinrnnError if something cannot run."""
    try:
        check(*arguments)
    except LinrnnError as error:
        return name, f"no  {error.cause}\n    -> {error.remedy}"
    return name, "ok"


def table(findings: Sequence[Finding]) -> str:
    """Aligned text in two columns, with the remedy below the cause."""
    width = max(len(name) for name, _ in findings)
    below = "\n" + " " * (width + 4)
    return "\n".join(f"  {name:<{width}}  {told.replace(chr(10), below)}" for name, told in findings)


def _variants() -> Sequence[str]:
    try:
        return apple_variants()
    except LinrnnError:
        return ()
