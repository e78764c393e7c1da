"""Measure time, memory and errors of the loss layer alone: `python benchmarks/loss.py shapes=[mve]`.

A set (loss_sets.yaml) names shapes, backends and kinds of logits. Each shape with each kind of logits is a problem, and
benchmarks/loss_rounds.py measures all backends on it in one process. Rows go to rows.json.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.loss_page import table_of, write_report
from benchmarks.loss_rounds import Bench, Setting
from benchmarks.loss_rows import AGAIN, BASELINE, Row, read_rows, rows_for, rows_path, winners
from benchmarks.problems import KINDS, TRAINED, TrainedTensors, bytes_of_truth, parse_shape, read_trained
from linrnn.config import cli
from linrnn.config.compose import add_command
from linrnn.config.schema import LossConfig, ReadingConfig, option
from linrnn.core.errors import ConfigError
from linrnn.core.machine import GIB
from linrnn.core.output import say
from linrnn.costs import loss_memory
from linrnn.losses import LossBackend
from linrnn.runs.environment import command_line
from linrnn.training.plan import check_memory
from linrnn.training.runtime import resolve_device

__all__ = ["Row", "main", "read_rows", "report_set", "rows_for", "run_benchmark", "winners"]

# What a set leaves out.
_EVERY_SET = {"logits": ["flat", "peaked"], "gradients": ["same"], "batches": 1}
_FILE = Path(__file__).with_name("loss_sets.yaml")
SETS: dict[str, dict[str, Any]] = {
    name: _EVERY_SET | content for name, content in yaml.safe_load(_FILE.read_text(encoding="utf-8")).items()
}


@dataclass
class BenchConfig(common.Keys, ReadingConfig):
    """Keys of the command line."""

    data: list[str] = option([], "with checkpoint: the run's own; data.KEY=… changes it, data=… chooses another")
    set: str = option("shapes", f"a set of benchmarks/loss_sets.yaml: {', '.join(SETS)}", choices=tuple(SETS))
    shapes: list[str] | None = option(
        None, "null: the set's. Names, or tokens x hidden dimensions x vocabulary as in 4096x512x32000"
    )
    backends: list[str] | None = option(
        None,
        "null: the set's. Losses with their options ('name option=value …' as in 'liger accumulate=fp32'), and those "
        "of benchmarks/other_losses.py. torch.compile (`compiled`) always runs twice: ratios are to its first entry, "
        "and the second shows the noise. The floor (`three_products_cublas`: three cuBLAS products and no loss) is "
        "always timed, too. A backend that cannot run gets a row with the reason",
    )
    logits: list[str] | None = option(
        None,
        "null: the set's. flat (as in an untrained model) | peaked (as in a trained one) | half_ignored (peaked, and "
        "half of the labels ignored)",
    )
    gradients: list[str] | None = option(
        None, "null: the set's. same (in dtype) | fp32 (fp32 tensors and gradients, products in dtype)"
    )
    checkpoint: str | None = option(
        None,
        "in place of shapes: a trained model's hidden states, head and labels (logits: trained). A run's directory "
        "(its newest checkpoint) or one of its checkpoints. D and V are the model's; the vocabulary is in random order",
        path="read",
    )
    tokens: int = option(16384, "with checkpoint: N, the number of first labels of the validation split", minimum=1)
    batches: int | None = option(
        None, "null: the set's. Batches of N tokens over which dC is summed for one more error; 1: none", minimum=1
    )
    dtype: str = option("bf16", "bf16 | fp32: dtype of the products", choices=("bf16", "fp32"))
    rounds: int = option(30, "timed calls of every backend, in shuffled order", minimum=2)
    warmup: int = option(2, "calls before the timed ones, for compiling and tuning kernels", minimum=1)
    resume: bool = option(False, "true: skip problems that the same commit, versions and GPU have measured")
    seed: int = option(0, "of weights, data and order", minimum=0)


add_command("bench_loss", BenchConfig)


# --------------------------------------------------------------------------------------------- what is measured
def completed(config: BenchConfig) -> BenchConfig:
    """The configuration with the set's entries where the command line gave none.

    With a checkpoint the shape is the model's, so the list of shapes is empty.

    Raises:
        ConfigError: a kind of logits or dtype of gradients is unknown, or does not go with a checkpoint.
    """
    own = SETS[config.set]
    if config.checkpoint is not None:
        if config.shapes:
            raise ConfigError(
                "shapes do not go with a checkpoint: D and V are its model's, N is tokens=…",
                "leave shapes out; for synthetic tensors of that shape, run once more with shapes=[NxDxV] alone",
            )
        own = own | {"shapes": [], "logits": [TRAINED]}
    elif config.data or TRAINED in (config.logits or []):
        raise ConfigError(
            "data and logits=[trained] need a trained model, and none is named", "add checkpoint=results/default/RUN"
        )
    found = replace(config, **{key: value for key, value in own.items() if getattr(config, key) is None})
    kinds = KINDS if config.checkpoint is None else (TRAINED,)
    for key, known in (("logits", kinds), ("gradients", ("same", "fp32"))):
        if unknown := sorted(set(getattr(found, key)) - set(known)):
            raise ConfigError(f"{key}: {', '.join(unknown)} is not known", f"choose from {', '.join(known)}")
    return found


def settings_of(config: Any, trained: TrainedTensors | None) -> list[Setting]:
    """Every shape (or the trained model's) with every dtype of gradients, once each."""
    shapes = [parse_shape(shape) for shape in config.shapes] if trained is None else [trained.shape]
    dtypes = {"same": config.dtype, "fp32": "fp32"}
    settings = (Setting(shape, config.dtype, dtypes[name], trained) for shape in shapes for name in config.gradients)
    return list(dict.fromkeys(settings))


def losses_of(config: Any) -> dict[str, LossConfig]:
    """Every loss by its text. The baseline comes first and twice."""
    texts = [BASELINE, f"{BASELINE} {AGAIN}", *config.backends]
    return {text: common.parse_loss(text.removesuffix(f" {AGAIN}")) for text in texts}


# ------------------------------------------------------------------------------------------------------ measuring
def run_benchmark(config: BenchConfig, command: str, say: common.Say) -> list[Row]:
    """Measure every backend on every problem, and return the rows. They go to `results_directory`.

    Args:
        command: the command line, for the record.

    Raises:
        ConfigError: an unknown shape, kind of logits, backend or option, or a checkpoint that does not fit.
        UnsupportedError: the checkpoint's model cannot run here, or a shape does not fit on this CPU.
        DataError: the checkpoint or its data is damaged.
    """
    config, device = completed(config), resolve_device(config.device)
    directory, losses = common.results_directory(config, "bench_loss"), losses_of(config)
    trained = None
    if config.checkpoint is not None:
        assert config.batches is not None
        trained = read_trained(config.checkpoint, config.data, config.device, config.tokens, config.batches)
    settings = settings_of(config, trained)
    if device.type == "cpu":
        for setting in settings:
            _check_memory(setting, list(losses.values()))
    run = common.begin_run(directory, command, config)
    measured: list[Row] = []
    for number, setting in enumerate(settings, start=1):
        torch._dynamo.reset()  # compiled graphs for this setting alone, far from the recompile limit
        if device.type == "cuda":
            torch.cuda.empty_cache()
        built: dict[str, LossBackend] = {}
        for kind in config.logits or []:
            shape = setting.shape
            title = f"[{number}/{len(settings)}] {shape.name} ({shape.n} x {shape.d} x {shape.v}), {kind}, "
            title += f"{setting.dtype}, gradients {setting.gradients}, {device.type}"
            if config.resume and _is_measured(setting, kind, losses, directory, run):
                say(f"{title}: measured already by this commit and these versions")
                continue
            say(title if trained is None else f"{title}: {trained.origin}")
            bench = Bench(config, setting, kind, losses, built, device, directory, run["id"], say)
            measured += bench.measure()
            say(table_of(bench.rows))
    return measured


def _check_memory(setting: Setting, losses: list[LossConfig]) -> None:
    """Refuse on a CPU a shape that cannot be held: its tensors with their gradients, and what stands beside them.

    Beside them stand the fp64 truth, the floor's N x V, or what a loss holds, as far as formulas know it: whichever is
    the most.

    Raises:
        UnsupportedError: the figures, and smaller shapes.
    """
    shape, compute = setting.shape, 4 if setting.dtype == "fp32" else 2
    elements = (shape.n + shape.v) * shape.d
    held = [memory for loss in losses if (memory := loss_memory(loss, shape.n, shape.d, shape.v, compute))]
    beside = max([bytes_of_truth(shape), shape.n * shape.v * compute, *(max(memory) for memory in held)])
    needed = 2 * elements * (4 if setting.gradients == "fp32" else compute) + beside
    what = f"shape {shape.name} ({shape.n} x {shape.d} x {shape.v}) needs {needed / GIB:.1f} GiB or more"
    check_memory(needed, what, "smaller shapes, as in shapes=[1024x256x8192]")


def _is_measured(
    setting: Setting, kind: str, losses: dict[str, LossConfig], directory: Path, run: dict[str, Any]
) -> bool:
    """Whether every entry has a finished row that the same code, versions and GPU made."""
    runs = common.read_runs(directory)
    rows = rows_for(run["config"]["set"], read_rows(rows_path(directory)))
    for text, loss in losses.items():
        row = rows.get(setting.row(kind, text, loss=loss).key)
        if row is None or row.status == "started" or row.run not in runs:
            return False
        if runs[row.run]["environment"] != run["environment"] or (run["environment"]["git"] or {}).get("dirty"):
            return False
    return True


# ------------------------------------------------------------------------------------------------------ the page
def report_set(config: BenchConfig) -> list[Path]:
    """Write page and picture from all rows of the set in this device's directory; returns their paths.

    Shapes outside the set get a page of their own, `custom`. Trained models get `<set>_trained`.

    Raises:
        DataError: nothing of the set was measured, or a file is damaged.
    """
    name, shapes, directory = config.set, SETS[config.set]["shapes"], common.results_directory(config, "bench_loss")
    if config.checkpoint is not None:
        name, shapes = f"{name}_trained", None
    elif not set(config.shapes or []) <= set(shapes):
        name, shapes = "custom", config.shapes
    measured = [row for row in read_rows(rows_path(directory)) if row.set == config.set]
    if shapes is None:
        rows = [row for row in measured if row.trained]
    else:
        rows = sorted((row for row in measured if row.shape in shapes), key=lambda row: shapes.index(row.shape))
    return write_report(rows, directory, name)


def main(config: BenchConfig) -> None:
    if config.measure:
        run_benchmark(config, command_line(), say)
    say("wrote " + ", ".join(str(path) for path in report_set(config)))


if __name__ == "__main__":
    cli.run(main, "bench_loss", __doc__)
