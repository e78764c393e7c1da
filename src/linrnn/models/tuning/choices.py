"""The configuration that each autotuned kernel runs with: a stored one, the first or a tuned one; and a record of all.

Triton's Autotuner keeps its choices in a dictionary, `cache`, and tunes when a key is missing. :func:`adopt` gives each
of FLA's autotuners a :class:`Choices` instead, which looks a missing key up in the stored table of the GPU's kind. It
also takes two of the settings that `triton.autotune` has: what measures a configuration, and which are left out.
FLA's `FLA_CONFIG_DIR` names a kernel by its function, although several of FLA's kernels share a name.
"""

import contextlib
import functools
import hashlib
import importlib.util
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from linrnn.core.files import write_json
from linrnn.models.tuning.exclusions import without_excluded
from linrnn.models.tuning.progress import during
from linrnn.models.tuning.table import TABLES, Table, nearest, read_table, read_tables, table_path

STORED, NEAR, FIRST, TUNED = "stored", "near", "first", "tuned"


@dataclass
class _Process:
    """The choices of this process's run."""

    mode: str = "stored"
    used: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)  # kernel → key → (configuration, source)
    rehearsed: "list[tuple[Choices, Any]] | None" = None  # what a rehearsal has chosen; None: there is no rehearsal


_process = _Process()
_all: "weakref.WeakSet[Choices]" = weakref.WeakSet()


def adopt() -> None:
    """Give the autotuners of FLA's modules that are imported by now their :class:`Choices`."""
    fla = [module for name, module in [*sys.modules.items()] if name.startswith("fla.")]
    if not fla or importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import Autotuner, KernelInterface

    for kernel in [value for module in fla for value in [*vars(module).values()] if isinstance(value, KernelInterface)]:
        while kernel is not None and not isinstance(kernel, Autotuner):  # it may lie within other decorators
            kernel = getattr(kernel, "fn", None)
        if kernel is not None and not isinstance(kernel.cache, Choices):
            Choices(kernel)


class Choices(dict[tuple[Any, ...], Any]):
    """The choices of one autotuner, by tuning key. A key that it lacks is looked up in the stored table."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, tuner: Any) -> None:
        """Become the choices of a tuner."""
        super().__init__()
        self.tuner, self._left_out_by_fla = tuner, tuner.early_config_prune
        self.kernel = f"{tuner.base_fn.__module__}:{tuner.base_fn.__qualname__}"
        self._candidates = 0  # configurations that the current tuning compares
        tuner.cache, tuner.early_config_prune, tuner.do_bench = self, self._usable, self._measure
        _all.add(self)

    def _usable(self, configs: list[Any], nargs: dict[str, Any], **kwargs: Any) -> list[Any]:
        """For Autotuner.early_config_prune: the configurations that are tried."""
        usable = self._left_out_by_fla(configs, nargs, **kwargs) if self._left_out_by_fla else configs
        usable = without_excluded(self.kernel, {**nargs, **kwargs}, usable)
        usable = usable[:1] if _process.mode == "first" else usable
        self._candidates = len(usable)
        return usable

    def _measure(self, call: Callable[[], None], quantiles: Sequence[float]) -> Sequence[float]:
        """For Autotuner.do_bench: the milliseconds of a configuration, its median first."""
        if _process.rehearsed is not None:
            call()
        if _process.rehearsed is not None or self._candidates == 1:
            return [0.0] * len(quantiles)  # there is nothing to compare
        from triton.testing import do_bench

        with during(f"tuning {self.kernel.rpartition(':')[2]} with {self._candidates} configurations"):
            return do_bench(call, warmup=10, rep=40, quantiles=quantiles)  # type: ignore[return-value]

    def __contains__(self, key: object) -> bool:
        # at every launch: super() would take twice as long
        return dict.__contains__(self, key) or self._take_stored(key)

    def __setitem__(self, key: tuple[Any, ...], config: Any) -> None:
        if _process.rehearsed is None:
            self._take(key, config, FIRST if _process.mode == "first" else TUNED)
        else:
            super().__setitem__(key, config)
            _process.rehearsed.append((self, key))

    def _take(self, key: Any, config: Any, source: str) -> None:
        super().__setitem__(key, config)
        _process.used.setdefault(self.kernel, {})[key_text(self.tuner, key)] = (config_text(config), source)

    def _take_stored(self, key: Any) -> bool:
        """Use the stored configuration for a key; False if there is none that this kernel still has."""
        if _process.mode == "tune":
            return False
        text = key_text(self.tuner, key)
        usable = without_excluded(self.kernel, named_sizes(self.tuner, key), self.tuner.configs)
        by_text = {config_text(config): config for config in usable}
        for table in stored_tables():  # the first that has a choice counts
            stored = table["kernels"].get(self.kernel, {})
            found = nearest(text, stored)
            if found is not None and stored[found] in by_text:
                self._take(key, by_text[stored[found]], STORED if found == text else NEAR)
                return True
        return False


@contextlib.contextmanager
def rehearsing() -> Iterator[None]:
    """Within the context, nothing is measured or recorded: a kernel without a choice is called in each configuration.

    Triton then keeps no timings on disk, nor does it read them.
    """
    adopt()
    keeping = [choices.tuner for choices in _all if choices.tuner.cache_results]
    chosen_meanwhile: list[tuple[Choices, Any]] = []
    _process.rehearsed = chosen_meanwhile
    try:
        for tuner in keeping:
            tuner.cache_results = False
        yield
    finally:
        _process.rehearsed = None
        for tuner in keeping:
            tuner.cache_results = True
        for choices, key in chosen_meanwhile:
            choices.pop(key, None)


def use(mode: str) -> None:
    """Begin a run: forget earlier choices, and take the next ones by `mode`.

    Args:
        mode: `stored`: from the table; kernels without a stored choice are tuned. `first`: from the table; kernels
            without a stored choice run in their first configuration. `tune`: all are tuned.
    """
    adopt()
    _process.mode, _process.used = mode, {}
    for choices in _all:
        choices.clear()


def used() -> dict[str, Any] | None:
    """The choices of this run so far, for environment.json; None if no kernel had any.

    `fingerprint` is the same for two processes if and only if they used the same kernels, keys and configurations.
    """
    if not _process.used:
        return None
    flat = {f"{kernel} {key}": choice for kernel, keys in _process.used.items() for key, choice in keys.items()}
    choices = {name: config for name, (config, _) in sorted(flat.items())}
    lines = "\n".join(f"{name}: {config}" for name, config in choices.items())
    sources = Counter(source for _, source in flat.values())
    return {
        "fingerprint": hashlib.sha256(lines.encode()).hexdigest()[:16],
        **{source: sources[source] for source in (STORED, NEAR, FIRST, TUNED)},
        "choices": choices,
    }


def remark() -> str | None:
    """A line on the choices of this run so far; None if there are none."""
    if (now := used()) is None:
        return None
    words = {STORED: "stored", NEAR: "stored for another batch", FIRST: "in their first configuration"}
    words[TUNED] = "tuned here (kernel_choices=tune stores them)"
    counts = [f"{now[source]} {where}" for source, where in words.items() if now[source]]
    return f"autotune cache {now['fingerprint']}: {', '.join(counts)}"


def store(folder: Path = TABLES) -> Path | None:
    """Add this run's choices to the table of this machine's GPU, and return its path; None without choices.

    A table of other versions of FLA is begun anew: its choices may not be the fastest any more.
    """
    gpu, versions = gpu_name(), {name: version(name) for name in ("triton", "flash-linear-attention")}
    if gpu is None or not _process.used:
        return None
    path = table_path(gpu, versions["triton"], folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):  # of another run that stores its choices
        stored = read_table(path) if path.exists() else {}
        kernels = stored["kernels"] if stored.items() >= versions.items() else {}
        for name, keys in _process.used.items():
            chosen = {**kernels.get(name, {}), **{key: config for key, (config, _) in keys.items()}}
            kernels[name] = dict(sorted(chosen.items()))
        head = {"gpu": gpu, "compute_capability": gpu_capability(), **versions}
        write_json(path, {**head, "kernels": dict(sorted(kernels.items()))})
    return path


def stored_tables() -> Sequence[Table]:
    """The stored tables that this machine's GPU can use, best first (:func:`read_tables`); none without a GPU."""
    return () if (name := gpu_name()) is None else _read(name, gpu_capability(), version("triton"))


_read = functools.cache(read_tables)


def gpu_capability() -> str:
    """The compute capability of the current GPU, such as "9.0"."""
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}"


def gpu_name() -> str | None:
    """The name of the current GPU; None without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


# ------------------------------------------------------------------------------------------------------ as texts
def key_text(tuner: Any, key: tuple[Any, ...]) -> str:
    """A tuning key as words: `D=1024 NB=8 bfloat16 float32`."""
    sizes = named_sizes(tuner, key)
    dtypes = [str(value).removeprefix("torch.") for value in key[len(sizes) :]]
    return " ".join([*(f"{name}={value}" for name, value in sizes.items()), *dtypes])


def named_sizes(tuner: Any, key: tuple[Any, ...]) -> dict[str, Any]:
    """A tuning key without its dtypes, which come last: argument → value."""
    values = [value for value in key if not str(value).startswith("torch.")]
    names = [name for name in tuner.keys if name in tuner.arg_names]
    if len(names) != len(values):  # a call left out an argument that has a default
        names = [f"key{number}" for number in range(len(values))]
    return dict(zip(names, values, strict=True))


def config_text(config: Any) -> str:
    """A configuration as words: `BT=32 num_warps=4 num_stages=3`. FLA sets nothing else."""
    words = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
    return " ".join(f"{name}={value}" for name, value in words.items())
