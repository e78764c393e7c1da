"""The autotune cache of one kind of GPU and one version of Triton: a JSON file that people can read and compare.

    {"gpu": "NVIDIA H100 80GB HBM3", "compute_capability": "9.0", "triton": "3.6.0", "flash-linear-attention": "0.6.0",
     "kernels": {"fla.modules.norm.layernorm:layer_norm_fwd_kernel":
         {"D=1024 NB=8 HAS_RESIDUAL=True … bfloat16 float32": "BT=32 num_warps=4 num_stages=3"}}}

A kernel is named by its module and function, because FLA has several kernels of one name. The words of a key are the
arguments that Triton tunes for, then the dtypes of all tensors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from linrnn.core.files import read_object, write_json
from linrnn.core.machine import slug

TABLES = Path(__file__).with_name("tables")
# Arguments that grow with the batch or the sequence. A choice for another value is as valid, and nearly as fast.
SIZES = ("B", "NB", "T", "T_BUCKET")
CAPABILITY = "compute_capability"
Kernels = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Table:
    """Kernel → key → configuration, for one kind of GPU.

    Attributes:
        gpu: its name, as torch gives it.
        versions: of `triton` and `flash-linear-attention`, with which the choices were measured.
        capability: of the GPU, such as "9.0". GPUs that share it can run the same configurations; None: not known.
    """

    gpu: str
    versions: Mapping[str, str]
    kernels: Kernels = field(default_factory=dict)
    capability: str | None = None

    def find(self, kernel: str, key: str) -> tuple[str, str] | None:
        """The stored key that fits best, and its configuration; None if there is none.

        That is the same key, or else the one that differs in `SIZES` alone and is nearest in their logarithms.
        """
        entries = self.kernels.get(kernel, {})
        if key in entries:
            return key, entries[key]
        fixed, sizes = _split(key)
        alike = {other: _split(other)[1] for other in entries if _split(other)[0] == fixed}
        found = min(alike, key=lambda other: (_distance(sizes, alike[other]), other), default=None)
        return None if found is None else (found, entries[found])

    def with_choices(self, kernels: Kernels) -> "Table":
        """This table with more choices. They replace those for the same keys."""
        names = sorted({*self.kernels, *kernels})
        merged = {name: {**self.kernels.get(name, {}), **kernels.get(name, {})} for name in names}
        return replace(self, kernels={name: dict(sorted(entries.items())) for name, entries in merged.items()})

    def write(self, folder: Path = TABLES) -> Path:
        """Write the table's file and return its path."""
        path = table_path(self.gpu, self.versions["triton"], folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"gpu": self.gpu, CAPABILITY: self.capability, **self.versions, "kernels": self.kernels}
        write_json(path, content)
        return path


def table_path(gpu: str, triton: str, folder: Path = TABLES) -> Path:
    """The file for a GPU of this name and this version of Triton. 3.6.0 and 3.6.1 share one."""
    return folder / f"{slug(gpu)}-triton_{_minor(triton)}.json"


def read_table(gpu: str, triton: str, folder: Path = TABLES) -> Table | None:
    """The stored table for a GPU of this name and this version of Triton; None if there is none.

    Raises:
        DataError: the file is damaged.
    """
    path = table_path(gpu, triton, folder)
    return read_file(path) if path.exists() else None


def read_tables(gpu: str, capability: str, triton: str, folder: Path = TABLES) -> list[Table]:
    """The stored tables that a GPU can use: its own first, then those of other GPUs of its compute capability.

    Of the tables of one GPU, that of this version of Triton comes first.

    Raises:
        DataError: a file is damaged.
    """
    found = [read_file(path) for path in sorted(folder.glob("*-triton_*.json"), reverse=True)]
    usable = [table for table in found if gpu == table.gpu or capability == table.capability]
    return sorted(usable, key=lambda one: (one.gpu != gpu, one.gpu, _minor(one.versions["triton"]) != _minor(triton)))


def read_file(path: Path) -> Table:
    """The table of a file.

    Raises:
        DataError: the file is damaged.
    """
    content: dict[str, Any] = read_object(path, ("gpu", "triton", "flash-linear-attention", "kernels"))
    versions = {name: content[name] for name in ("triton", "flash-linear-attention")}
    return Table(content["gpu"], versions, content["kernels"], content.get(CAPABILITY))


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _split(key: str) -> tuple[list[str], list[int]]:
    """The words of a key with its sizes left blank, and the sizes."""
    fixed, sizes = [], []
    for word in key.split(" "):
        name, _, value = word.partition("=")
        if name in SIZES and value.isdecimal() and int(value) > 0:
            sizes.append(int(value))
            word = name
        fixed.append(word)
    return fixed, sizes


def _distance(a: Sequence[int], b: Sequence[int]) -> float:
    """How far apart the sizes of two keys are."""
    return sum(abs(math.log(one / other)) for one, other in zip(a, b, strict=True))
