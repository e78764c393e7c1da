"""What scripts/bench_loss.py measures: shapes, dtypes, kinds of logits and backends of a set, and its directory."""

from dataclasses import dataclass, replace

import torch

from linrnn.bench.loss.problems import KINDS, Problem, Shape, make_problem, parse_shape
from linrnn.bench.loss.rows import AGAIN, Row
from linrnn.bench.loss.trained import TRAINED, TrainedTensors
from linrnn.config import load_config, nearest
from linrnn.config.schema import BenchLossConfig, BenchLossSet, LossConfig
from linrnn.core.errors import ConfigError
from linrnn.losses import loss_names
from linrnn.losses.rivals import rival_names

BASELINE, EAGER = "compiled", "standard"
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Setting:
    """All problems that share shape and dtypes, and therefore the compiled graphs."""

    shape: Shape
    dtype: str
    gradients: str
    trained: TrainedTensors | None = None  # where logits are a trained model's

    def problem(self, kind: str, device: torch.device, seed: int, batch: int = 0) -> Problem:
        dtype, gradients = _DTYPES[self.dtype], _DTYPES[self.gradients]
        if self.trained is not None:
            return self.trained.problem(dtype, device, seed, gradients, batch)
        return make_problem(self.shape, kind, dtype, device, seed, gradients, batch)

    def row(self, kind: str, backend: str, run: str = "", loss: LossConfig | None = None, of_set: str = "") -> Row:
        shape = self.shape
        return Row(
            shape.name, shape.n, shape.d, shape.v, self.dtype, self.gradients, kind, *row_backend(backend, loss),
            trained="" if self.trained is None else self.trained.origin, run=run, set=of_set,
        )  # fmt: skip


def row_backend(text: str, loss: LossConfig | None) -> tuple[str, float | None]:
    """A row's `backend` and `workspace_mib`, from a backend's text."""
    backend = " ".join(word for word in text.split() if not word.startswith("workspace_mib="))
    return backend, getattr(loss, "workspace_mib", None)


def chosen_set(config: BenchLossConfig) -> BenchLossSet:
    """Shapes, backends, kinds of logits and batches: the set's own, or the ones of the command line.

    With a checkpoint the shape is the model's, so the list of shapes is empty.

    Raises:
        ConfigError: the set, kind of logits or dtype of gradients is unknown, or does not go with a checkpoint.
    """
    if config.set not in config.sets:
        raise ConfigError(f"set={config.set}: there is no such set", f"choose from {', '.join(config.sets)}")
    base = config.sets[config.set]
    if config.checkpoint is not None:
        _check_trained(config)
        base = replace(base, shapes=[], logits=[TRAINED])
    elif config.data or TRAINED in (config.logits or []):
        raise ConfigError(
            "data and logits=[trained] need a trained model, and none is named", "add checkpoint=results/default/RUN"
        )
    chosen = BenchLossSet(
        shapes=base.shapes if config.shapes is None else config.shapes,
        backends=base.backends if config.backends is None else config.backends,
        logits=base.logits if config.logits is None else config.logits,
        gradients=base.gradients if config.gradients is None else config.gradients,
        batches=base.batches if config.batches is None else config.batches,
    )
    kinds = KINDS if config.checkpoint is None else (TRAINED,)
    for key, given, known in (("logits", chosen.logits, kinds), ("gradients", chosen.gradients, ("same", "fp32"))):
        if unknown := sorted(set(given) - set(known)):
            raise ConfigError(f"{key}: {', '.join(unknown)} is not known", f"choose from {', '.join(known)}")
    return chosen


def _check_trained(config: BenchLossConfig) -> None:
    if config.shapes is not None:
        raise ConfigError(
            "shapes do not go with a checkpoint: D and V are its model's, N is tokens=…",
            "leave shapes out; for synthetic tensors of that shape, run once more with shapes=[NxDxV] alone",
        )


def reported_set(config: BenchLossConfig) -> tuple[str, BenchLossSet]:
    """Name and content of the report: the set's own entries, then the ones of the command line.

    Shapes outside the set get a report of their own, `custom`. Trained models get `<set>_trained`.
    """
    chosen, base = chosen_set(config), config.sets[config.set]
    own = set(chosen.shapes) <= set(base.shapes)
    name = config.set if own else "custom"
    if config.checkpoint is not None:
        name, base = f"{config.set}_trained", replace(base, shapes=[], logits=[])
    return name, BenchLossSet(
        shapes=base.shapes if own else chosen.shapes,
        backends=list(dict.fromkeys(base.backends + chosen.backends)),
        logits=list(dict.fromkeys(base.logits + chosen.logits)),
        gradients=list(dict.fromkeys(base.gradients + chosen.gradients)),
        batches=chosen.batches,
    )


def parse_loss(text: str) -> LossConfig:
    """`name [option=value …]`, as in `liger accumulate=fp32`.

    Raises:
        ConfigError: an unknown name or option. The message offers the nearest ones.
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


def settings_of(config: BenchLossConfig, chosen: BenchLossSet, trained: TrainedTensors | None = None) -> list[Setting]:
    """Every shape (or the trained model's) with every dtype of gradients."""
    shapes = [parse_shape(shape) for shape in chosen.shapes] if trained is None else [trained.shape]
    settings = [
        Setting(shape, config.dtype, config.dtype if gradients == "same" else gradients, trained)
        for shape in shapes
        for gradients in chosen.gradients
    ]
    return list(dict.fromkeys(settings))


def entries_of(chosen: BenchLossSet) -> dict[str, LossConfig]:
    """Every loss by its text. The baseline comes first and twice."""
    texts = [BASELINE, f"{BASELINE} {AGAIN}", *chosen.backends]
    return {text: parse_loss(text.removesuffix(f" {AGAIN}")) for text in texts}
