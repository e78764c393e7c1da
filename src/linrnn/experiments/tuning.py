"""Tune FLA's kernels for models and sizes, and store the choices in the table of this machine's GPU."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path

import torch

from linrnn.config import load_config
from linrnn.config.schema import Config, TuneConfig
from linrnn.core.errors import ConfigError, LinrnnError, UnsupportedError, first_line
from linrnn.core.interrupts import worker_processes
from linrnn.core.machine import cores
from linrnn.core.output import say as print_line
from linrnn.data import Batch
from linrnn.models import build_model, tuning
from linrnn.models.architecture import resolve
from linrnn.models.language_model import loss_inputs, parameter_dtype
from linrnn.models.tuning.choices import chosen, gpu_capability, gpu_name
from linrnn.models.tuning.table import TABLES, Table, read_table
from linrnn.training.execution.compilation import rehearse
from linrnn.training.plan import make_plan

LAYERS = 2  # the first has no residual to add; all later ones are alike
VOCAB_SIZE = 1024  # no kernel of the blocks depends on it
MILLISECONDS = {"warmup": 10, "rep": 40}  # of each configuration's measurement, instead of 25 and 100
THREADS_OF_A_PROCESS = 4  # threads of one process share Python's lock, so several processes compile


@dataclass(frozen=True)
class Target:
    """One model, size and batch whose kernels are tuned."""

    name: str
    overrides: list[str]


def tune(config: TuneConfig, overrides: Sequence[str], say: Callable[[str], None]) -> Path:
    """Tune the kernels of all targets. The table is written after each. Returns its path.

    Raises:
        UnsupportedError: there is no GPU.
        ConfigError: the table was made with other versions, or some targets failed. Those of the others are stored.
    """
    if (gpu := gpu_name()) is None:
        raise UnsupportedError("kernels are tuned on a GPU, and PyTorch sees none", "run this on a machine with a GPU")
    folder = Path(config.output_dir) if config.output_dir else TABLES
    table = _table_to_extend(gpu, folder, again=config.again)
    todo = targets(config, overrides)
    began, mode = time.monotonic(), "tune" if config.again else "exact"
    compile_all(todo, mode, table, say)
    failures = []
    with tuning.show_progress(say):
        for number, target in enumerate(todo, start=1):
            try:
                tuning.use(mode, table, **MILLISECONDS)
                with tuning.during(f"{target.name} ({number} of {len(todo)})"):
                    call_kernels(load_config(target.overrides))
            except (LinrnnError, RuntimeError) as error:
                failures.append(target.name)
                say(f"{target.name} failed: {first_line(error)}")
            table = table.with_choices(chosen())
            path = table.write(folder)
            say(f"{number} of {len(todo)}, {target.name}: {tuning.remark()}")
    n_choices = sum(map(len, table.kernels.values()))
    say(f"wrote {path}: {n_choices} choices of {len(table.kernels)} kernels, {time.monotonic() - began:.0f} s")
    if failures:
        raise ConfigError(
            f"{len(failures)} of {len(todo)} failed: {', '.join(failures)}",
            "the lines above say why, and the choices of all others are stored; leave these out, or mend them and call "
            "the script for these alone",
        )
    return path


def targets(config: TuneConfig, overrides: Sequence[str]) -> list[Target]:
    """All combinations of models, sizes and batches. Their models have few layers.

    An override of the run's model, size or batch takes the place of the list.

    Raises:
        ConfigError: there is none.
    """
    given = dict(override.split("=", 1) for override in overrides if "=" in override)
    models = [given["model"]] if "model" in given else config.models
    sizes = [given["size"]] if "size" in given else config.sizes
    key = "trainer.batch_size"
    batches = [given[key]] if key in given else [str(number) for number in config.batch_sizes]
    found = [
        Target(
            f"{model} {size}, B = {batch}",
            [
                *(f"model={model}", f"size={size}", f"{key}={batch}"),
                *(() if model == "fla" else (f"size.num_layers={LAYERS}",)),
                *("device=cuda", *overrides),
            ],
        )
        for model, size, batch in product(models, sizes, batches)
    ]
    if not found:
        raise ConfigError("no model, size or batch is given", "give models, sizes and batch_sizes at least one value")
    return found


def compile_all(todo: Sequence[Target], mode: str, table: Table, say: Callable[[str], None]) -> None:
    """Compile the kernels of the targets on all cores, into Triton's cache on disk: all configurations to be measured.

    What does not compile here fails again when it is tuned.

    Args:
        mode, table: as for :func:`linrnn.models.tuning.use`. A kernel whose choice is stored is compiled in that
            configuration alone.
    """
    processes = min(len(todo), max(1, cores() // THREADS_OF_A_PROCESS))
    say(f"compiling for {len(todo)} models, sizes and batches in {processes} processes")
    began = time.monotonic()
    with worker_processes(processes) as pool:
        futures = [pool.submit(compile_target, target, mode, table, max(1, cores() // processes)) for target in todo]
        for target, future in zip(todo, futures, strict=True):
            if (error := future.exception()) is not None:
                say(f"{target.name}: not compiled ahead: {first_line(error)}")
    say(f"compiled in {time.monotonic() - began:.0f} s; measuring")


def compile_target(target: Target, mode: str, table: Table, threads: int) -> None:
    """In a process of its own: compile the target's kernels."""
    tuning.use(mode, table)
    with tuning.show_progress(print_line), tuning.during(target.name), tuning.compile_ahead(threads):
        call_kernels(load_config(target.overrides))


def call_kernels(config: Config) -> None:
    """One training step's forward and backward pass of the blocks, and one validation's forward pass."""
    plan = make_plan(config)
    architecture = resolve(config.model, config.size, VOCAB_SIZE)
    dtype = parameter_dtype(plan.precision)
    model = build_model(architecture, device=plan.device, dtype=dtype, seed=config.seed)
    model.set_activation_checkpointing(config.trainer.activation_checkpointing)
    inputs = (model, batch_of(config), plan.precision, plan.device)
    rehearse(*inputs)
    with torch.no_grad():
        loss_inputs(*inputs)


def batch_of(config: Config) -> Batch:
    """Random tokens of the shape of a step's. Documents, if state is reset at them, are half a row long."""
    rows, tokens = config.trainer.batch_size, config.trainer.seq_len
    generator = torch.Generator().manual_seed(config.seed)
    ids = torch.randint(VOCAB_SIZE, (rows, tokens), generator=generator)
    if not config.data.reset_at_document:
        return Batch(ids, ids, None, ids.numel())
    ends = {*range(0, ids.numel() + 1, tokens), *range(tokens // 2, ids.numel(), tokens)}
    return Batch(ids.view(1, -1), ids.view(1, -1), torch.tensor(sorted(ends), dtype=torch.int32), ids.numel())


def _table_to_extend(gpu: str, folder: Path, *, again: bool) -> Table:
    """The stored table of this GPU and this Triton, or an empty one.

    Raises:
        ConfigError: it was made with other versions.
    """
    versions = {name: version(name) for name in ("triton", "flash-linear-attention")}
    table = read_table(gpu, versions["triton"], folder)
    if table is None or (again and table.versions != versions):
        return Table(gpu, versions, capability=gpu_capability())
    if table.versions != versions:
        there = ", ".join(f"{name} {number}" for name, number in table.versions.items())
        raise ConfigError(
            f"the autotune cache of {gpu} was made with {there}",
            "install these versions, or use again=true to make all choices anew",
        )
    return table
