"""What scripts/bench_loss.py measures: a set's shapes, dtypes, kinds of logits and backends, and where its rows lie."""

from dataclasses import dataclass
from pathlib import Path

import torch

from linrnn.config import load_config, nearest
from linrnn.config.schema import BenchLossConfig, BenchLossSet, LossConfig
from linrnn.errors import ConfigError
from linrnn.loss_problems import KINDS, Problem, Shape, make_problem, parse_shape
from linrnn.loss_rows import AGAIN, Row, slug
from linrnn.losses import loss_names, rival_names
from linrnn.runtime import resolve_device

BASELINE = "compiled"
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Setting:
    """All problems that share shape and dtypes: the same compiled graphs serve them."""

    shape: Shape
    dtype: str
    gradients: str

    def problem(self, kind: str, device: torch.device, seed: int) -> Problem:
        return make_problem(self.shape, kind, _DTYPES[self.dtype], device, seed, _DTYPES[self.gradients])

    def row(self, kind: str, backend: str, run: str, loss: LossConfig | None = None) -> Row:
        shape = self.shape
        backend = " ".join(word for word in backend.split() if not word.startswith("workspace_mib="))
        workspace = getattr(loss, "workspace_mib", None)
        return Row(shape.name, shape.n, shape.d, shape.v, self.dtype, self.gradients, kind, backend, workspace, run=run)


def chosen_set(config: BenchLossConfig) -> BenchLossSet:
    """Shapes, backends and kinds of logits: the set's, or those named on their own.

    Raises:
        ConfigError: there is no such set, kind of logits or dtype of gradients.
    """
    if config.set not in config.sets:
        raise ConfigError(f"set={config.set}: there is no such set", f"choose from {', '.join(config.sets)}")
    base = config.sets[config.set]
    chosen = BenchLossSet(
        shapes=base.shapes if config.shapes is None else config.shapes,
        backends=base.backends if config.backends is None else config.backends,
        logits=base.logits if config.logits is None else config.logits,
        gradients=base.gradients if config.gradients is None else config.gradients,
    )
    for key, given, known in (("logits", chosen.logits, KINDS), ("gradients", chosen.gradients, ("same", "fp32"))):
        if unknown := sorted(set(given) - set(known)):
            raise ConfigError(f"{key}: {', '.join(unknown)} is not known", f"choose from {', '.join(known)}")
    return chosen


def reported_set(config: BenchLossConfig) -> tuple[str, BenchLossSet]:
    """Name and content of the report: the set's own with what is named on the command line added to it.

    Shapes that are not the set's have a report of their own, `custom`.
    """
    chosen, base = chosen_set(config), config.sets[config.set]
    own = set(chosen.shapes) <= set(base.shapes)
    return config.set if own else "custom", BenchLossSet(
        shapes=base.shapes if own else chosen.shapes,
        backends=list(dict.fromkeys(base.backends + chosen.backends)),
        logits=list(dict.fromkeys(base.logits + chosen.logits)),
        gradients=list(dict.fromkeys(base.gradients + chosen.gradients)),
    )


def results_directory(config: BenchLossConfig) -> Path:
    """Where this device's rows lie: results/bench_loss/<gpu>, or what `output_dir` names."""
    if config.output_dir is not None:
        return Path(config.output_dir)
    device = resolve_device(config.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Path(config.results_dir) / "bench_loss" / slug(name)


def parse_loss(text: str) -> LossConfig:
    """`name [option=value …]`, as in `liger accumulate=fp32`.

    Raises:
        ConfigError: an unknown name or option; the nearest are offered.
    """
    name, *options = text.split()
    names = [*loss_names(), *rival_names()]
    if name not in names:
        raise ConfigError(
            f"{name}: there is no such loss", f"nearest: {', '.join(nearest(name, names))}; all: {', '.join(names)}"
        )
    if name in rival_names() and options:
        raise ConfigError(f"{text}: {name} has no options", f"write {name}")
    if name in rival_names():
        return LossConfig(name)
    return load_config([f"loss={name}", *(f"loss.{option}" for option in options)]).loss


def settings_of(config: BenchLossConfig, chosen: BenchLossSet) -> list[Setting]:
    """Every shape with every dtype of gradients."""
    settings = [
        Setting(parse_shape(shape), config.dtype, config.dtype if gradients == "same" else gradients)
        for shape in chosen.shapes
        for gradients in chosen.gradients
    ]
    return list(dict.fromkeys(settings))


def entries_of(chosen: BenchLossSet) -> dict[str, LossConfig]:
    """Every loss by its text, the baseline first and twice."""
    texts = [BASELINE, f"{BASELINE} {AGAIN}", *chosen.backends]
    return {text: parse_loss(text.removesuffix(f" {AGAIN}")) for text in texts}
