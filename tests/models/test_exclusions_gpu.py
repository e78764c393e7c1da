"""On a GPU: what the excluded configurations of FLA's gradient kernel compute, and that all others agree.

Each configuration runs in a process of its own, because an illegal memory access ends a process's use of the GPU.
`pytest -m gpu -s tests/models/test_exclusions_gpu.py` prints every result.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import NamedTuple

import pytest
import torch

from linrnn.core.errors import first_line
from linrnn.models import tuning
from linrnn.models.fla_import import import_fla
from linrnn.models.tuning.exclusions import GRADIENTS_OF_QK, without_excluded

BATCH, LENGTH, HEADS, LAUNCHES = 8, 2048, 3, 200
ROUNDING = 2e-2
pytestmark = pytest.mark.gpu


class Case(NamedTuple):
    """A head's dimensions of keys and values, the tokens of a chunk, and the configuration."""

    keys: int
    values: int
    chunk: int
    warps: int
    stages: int


SHAPES = [(16, 32, 64), (32, 32, 64), (32, 64, 32), (32, 64, 64), (32, 128, 64), (64, 128, 64), (128, 256, 64)]
CASES = [Case(*shape, warps, stages) for shape, warps, stages in product(SHAPES, (2, 4), (2, 3))]


def distance(case: Case) -> float:
    """The largest relative error of a gradient against that of two warps, after many launches."""
    import triton

    module = import_fla("fla.ops.common.chunk_o")
    kernel = module.chunk_bwd_kernel_dqkwg.fn
    tuning.use("tune")
    rows = (BATCH, LENGTH, HEADS)
    state = (BATCH, LENGTH // case.chunk, HEADS, case.values, case.keys)
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, k, w = (normal(*rows, case.keys) for _ in range(3))
    v, of_output, of_values = (normal(*rows, case.values) for _ in range(3))
    h, of_h = normal(*state), normal(*state)
    decay = -torch.rand(rows, generator=generator, device="cuda") / case.chunk

    def gradients(warps: int, stages: int) -> list[torch.Tensor]:
        kernel.configs = [triton.Config({}, num_warps=warps, num_stages=stages)]
        found = module.chunk_bwd_dqkwg(
            q, k, v, of_output, h, of_h, w=w, g=decay.view(BATCH, -1, case.chunk, HEADS).cumsum(2).view(rows),
            dv=of_values, scale=case.keys**-0.5, state_v_first=True, chunk_size=case.chunk,
        )  # fmt: skip
        return [gradient.double() for gradient in found]

    expected = gradients(2, 2)
    for _ in range(LAUNCHES):
        found = gradients(case.warps, case.stages)
    torch.cuda.synchronize()
    pairs = zip(found, expected, strict=True)
    return max(((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in pairs)


def test_all_but_the_excluded_configurations_agree() -> None:
    context = multiprocessing.get_context("spawn")
    wrong = []
    for case in CASES:
        with ProcessPoolExecutor(1, mp_context=context) as process:
            future = process.submit(distance, case)
            error, problem = (None, future.exception()) if future.exception() else (future.result(), None)
        if problem is not None and "out of resource" in str(problem):
            continue  # never chosen: it does not fit into the GPU's shared memory
        right = error is not None and error < ROUNDING
        sizes = {"BK": min(case.keys, 128)}
        config = type("Config", (), {"num_warps": case.warps})
        used = bool(without_excluded(GRADIENTS_OF_QK, sizes, [config]))
        print(f"{case}: {first_line(problem) if problem else f'{error:.1e}'}; {'used' if used else 'excluded'}")
        if used and not right:
            wrong.append(case)
    assert wrong == []
