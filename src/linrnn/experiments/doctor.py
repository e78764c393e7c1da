"""The report of `scripts/doctor.py`: what can run on this machine, and for the rest the cause and the remedy."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from linrnn.config import load_config
from linrnn.config.schema import Config
from linrnn.core.errors import LinrnnError
from linrnn.core.machine import GIB, free_disk
from linrnn.losses import apple_variants, check_loss, loss_names
from linrnn.losses.requirements import c_compiler, cxx_compiler, has_python_headers
from linrnn.models import check_supported
from linrnn.models.architecture import MODELS
from linrnn.models.language_model import compute_dtype
from linrnn.runs.environment import describe_environment
from linrnn.runs.loggers import has_wandb_key
from linrnn.training.runtime import resolve_device, resolve_precision


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was checked.
        verdict: "ok", "no", or for plain facts the fact itself.
        cause: why not; empty unless the verdict is "no".
        remedy: what to do about it; empty unless the verdict is "no".
    """

    name: str
    verdict: str
    cause: str = ""
    remedy: str = ""


def diagnose(config: Config) -> str:
    """The whole report for the device and precision that `config` chooses, as aligned text.

    Raises:
        UnsupportedError: `device=cuda` without a GPU.
    """
    device = resolve_device(config.device)
    precision = resolve_precision(config.trainer.precision, device)
    dtype = compute_dtype(precision)
    where = f"on {device.type} with {precision}"
    sections = {
        "Machine": machine(config),
        f"Losses {where} (loss=…)": losses(device, dtype),
        f"Models {where} (model=…)": models(device),
    }
    return "\n\n".join(f"{title}\n{table(findings)}" for title, findings in sections.items())


def machine(config: Config) -> list[Finding]:
    """Versions, hardware, compilers, whether there is a wandb key (never the key), and free disk space."""
    facts = describe_environment()
    cuda = f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU build"
    findings = [Finding("python", f"{facts['python']} ({facts['os']}, {sys.prefix})")]
    for package, version in facts["packages"].items():
        notes = {"torch": f" ({cuda})", "cut-cross-entropy": f" (variants: {_variants()})"}
        findings.append(Finding(package, f"{version}{notes.get(package, '')}" if version else "not installed"))
    for gpu in facts["gpus"]:
        details = f"{gpu['memory_bytes'] / GIB:.0f} GiB, compute capability {gpu['compute_capability']}"
        findings.append(Finding("GPU", f"{gpu['name']} ({details}, driver {facts['gpu_driver']})"))
    if not facts["gpus"]:
        findings.append(Finding("GPU", "none that PyTorch sees"))
    findings += [
        Finding("CPU", f"{facts['cpu'] or 'unknown'} ({facts['cpu_cores']} cores)"),
        Finding("C compiler", c_compiler() or "none"),
        Finding("C++ compiler", cxx_compiler() or "none"),
        Finding("Python.h", "found" if has_python_headers() else "not found"),
        Finding("wandb API key", "present" if has_wandb_key() else "absent (runs are logged offline)"),
    ]
    for key, directory in (("results_dir", config.results_dir), ("data.cache_dir", config.data.cache_dir)):
        findings.append(Finding(f"disk at {key}", f"{free_disk(Path(directory)) / GIB:.1f} GiB free ({directory})"))
    return findings


def losses(device: torch.device, dtype: torch.dtype) -> list[Finding]:
    """Every loss backend with its default options; Apple's with every installed variant."""
    findings = []
    for name in loss_names():
        variants = _installed_variants() if name == "cce_apple" else ()
        for options in [[f"loss.variant={variant}"] for variant in variants] or [[]]:
            loss = load_config([f"loss={name}", *options]).loss
            findings.append(attempt(" ".join([name, *options]), check_loss, loss, device, dtype))
    return findings


def models(device: torch.device) -> list[Finding]:
    """Every architecture with its default options."""
    return [attempt(name, check_supported, load_config([f"model={name}"]).model, device) for name in MODELS]


def attempt(name: str, check: Callable[..., object], *arguments: object) -> Finding:
    """The result of a check that raises a LinrnnError if something cannot run."""
    try:
        check(*arguments)
    except LinrnnError as error:
        return Finding(name, "no", error.cause, error.remedy)
    return Finding(name, "ok")


def table(findings: Iterable[Finding]) -> str:
    """Aligned text in two columns, with the remedy below the cause."""
    findings = list(findings)
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"  {finding.name:<{width}}  {finding.verdict}  {finding.cause}".rstrip())
        if finding.remedy:
            lines.append(f"  {'':<{width}}      -> {finding.remedy}")
    return "\n".join(lines)


def _installed_variants() -> tuple[str, ...]:
    try:
        return apple_variants()
    except LinrnnError:
        return ()


def _variants() -> str:
    return ", ".join(_installed_variants()) or "none"
