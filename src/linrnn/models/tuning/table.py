"""The autotune cache of one kind of GPU and one version of Triton: a JSON file that people can read and compare.

    {"gpu": "NVIDIA H100 80GB HBM3", "compute_capability": "9.0", "triton": "3.6.0", "flash-linear-attention": "0.6.0",
     "kernels": {"fla.modules.norm.layernorm:layer_norm_fwd_kernel":
         {"D=1024 NB=8 HAS_RESIDUAL=True … bfloat16 float32": "BT=32 num_warps=4 num_stages=3"}}}

A kernel is named by its module and function, because FLA has several kernels of one name. The words of a key are the
arguments that Triton tunes for, then the dtypes of all tensors. GPUs of one compute capability can run the same
configurations.
"""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from linrnn.core.files import read_object
from linrnn.core.machine import slug

TABLES = Path(__file__).with_name("tables")
# Arguments that grow with the batch or the sequence. A choice for another value is as valid, and nearly as fast.
SIZES = ("B", "NB", "T", "T_BUCKET")
Table = dict[str, Any]


def table_path(gpu: str, triton: str, folder: Path = TABLES) -> Path:
    """The file for a GPU of this name and this version of Triton. 3.6.0 and 3.6.1 share one."""
    return folder / f"{slug(gpu)}-triton_{_minor(triton)}.json"


def read_table(path: Path) -> Table:
    """The table of a file.

    Raises:
        DataError: the file is damaged.
    """
    return read_object(path, ("gpu", "compute_capability", "triton", "flash-linear-attention", "kernels"))


def read_tables(gpu: str, capability: str, triton: str, folder: Path = TABLES) -> list[Table]:
    """The stored tables that a GPU can use: its own first, then those of other GPUs of its compute capability.

    Of the tables of one GPU, that of this version of Triton comes first.

    Raises:
        DataError: a file is damaged.
    """
    found = [read_table(path) for path in sorted(folder.glob("*-triton_*.json"), reverse=True)]
    usable = [one for one in found if gpu == one["gpu"] or capability == one["compute_capability"]]
    return sorted(usable, key=lambda one: (one["gpu"] != gpu, one["gpu"], _minor(one["triton"]) != _minor(triton)))


def nearest(key: str, stored: Collection[str]) -> str | None:
    """The stored key that fits best; None if there is none.

    That is the same key, or else the one that differs in `SIZES` alone and is nearest in their logarithms.
    """
    if key in stored:
        return key
    fixed, sizes = _split(key)
    alike = {other: _split(other)[1] for other in stored if _split(other)[0] == fixed}

    def distance(other: str) -> float:
        return sum(abs(math.log(one / another)) for one, another in zip(sizes, alike[other], strict=True))

    return min(sorted(alike), key=distance, default=None)


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
