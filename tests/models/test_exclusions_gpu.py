"""On a GPU: what the excluded configurations of FLA's gradient kernel compute, and that all others agree.

Each configuration runs in a process of its own, because an illegal memory access ends a process's use of the GPU.
`pytest -m gpu -s tests/models/test_exclusions_gpu.py` prints every result, as results/log/2026-11-28 holds them.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from linrnn.core.errors import first_line
from linrnn.models.fla_import import import_fla
from linrnn.models.tuning.exclusions import GRADIENTS_OF_QK, without_excluded

BATCH, LENGTH, HEADS, LAUNCHES = 8, 2048, 3, 200
WIDEST_TILE = 128  # columns, on Hopper
ROUNDING = 2e-2
AT_ONCE = 8  # processes
triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(Version(triton.__version__) < Version("3.7.1"), reason="FLA refuses this kernel before 3.7.1"),
]


class Case(NamedTuple):
    """Dimensions of a head's keys and values, tokens of a chunk, the configuration, and whether states decay."""

    keys: int
    values: int
    chunk: int
    warps: int
    stages: int
    decays: bool = True


SHAPES = [
    *((16, 32, 64), (32, 32, 64), (32, 64, 64), (32, 128, 64), (32, 64, 32)),
    *((64, 32, 64), (64, 64, 64), (64, 128, 64), (128, 256, 64)),
]
CASES = [
    *(Case(*shape, warps, stages) for shape, warps, stages in product(SHAPES, (2, 4), (2, 3, 4))),
    *(Case(32, 64, 64, 4, stages, decays=False) for stages in (2, 3, 4)),
]


def distance(case: Case) -> float:
    """The largest relative error of a gradient against that of two warps and two stages, after many launches."""
    module = import_fla("fla.ops.common.chunk_o")
    kernel = module.chunk_bwd_kernel_dqkwg.fn
    torch.manual_seed(0)
    rows, state = (BATCH, LENGTH, HEADS), (BATCH, LENGTH // case.chunk, HEADS, case.values, case.keys)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    q, k = normal(*rows, case.keys), normal(*rows, case.keys) / case.keys**0.5
    v, of_output, of_values = (normal(*rows, case.values) for _ in range(3))
    w = normal(*rows, case.keys)
    h, of_h = normal(*state), normal(*state)
    decay = -torch.rand(rows, device="cuda").cumsum(1) % 3 if case.decays else None

    def gradients(warps: int, stages: int) -> list[Tensor]:
        kernel.configs = [triton.Config({}, num_warps=warps, num_stages=stages)]
        found = module.chunk_bwd_dqkwg(
            q, k, v, of_output, h, of_h, w=w, g=decay, dv=of_values, scale=case.keys**-0.5, state_v_first=True,
            chunk_size=case.chunk,
        )  # fmt: skip
        return [gradient.float() for gradient in found if gradient is not None]

    expected = gradients(2, 2)
    for _ in range(LAUNCHES):
        found = gradients(case.warps, case.stages)
    torch.cuda.synchronize()
    pairs = zip(found, expected, strict=True)
    return max(((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in pairs)


def test_all_but_the_excluded_configurations_agree():
    wrong, context = [], multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(AT_ONCE, mp_context=context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(distance, case) for case in CASES]
        for case, future in zip(CASES, futures, strict=True):
            problem = future.exception()
            if problem is not None and "out of resource" in str(problem):
                continue  # never chosen: it does not fit into the GPU's shared memory
            error = float("nan") if problem else future.result()
            config = SimpleNamespace(num_warps=case.warps)
            used = bool(without_excluded(GRADIENTS_OF_QK, {"BK": min(case.keys, WIDEST_TILE)}, [config]))
            print(f"{case}: {first_line(problem) if problem else f'{error:.2e}'}; {'used' if used else 'excluded'}")
            if used and not error < ROUNDING:
                wrong.append(case)
    assert wrong == []
