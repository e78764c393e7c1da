"""On every architecture the kernels compile with the table's tiles and fit into shared memory. No GPU is needed.

Hopper: test_compiles.py.
"""

import os
from collections.abc import Callable
from functools import cache, partial

import pytest
from cases import BF16, FP32, Case

pytest.importorskip("triton")

from cce_kernels.runtime.devices import SHARED_KIB
from cce_kernels.runtime.tiles import HOPPER, row_for, target
from compiling import LARGE, OF_THE_TABLE, PLAIN, SHORT_ROWS, Plan, check_resources, launch_all, launch_lists

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled there")

# Bytes of shared memory that one program may have (CUDA C++ Programming Guide, technical specifications by compute
# capability).
SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
# Triton writes the same PTX for 8.0, 8.6 and 8.9. So one compilation must fit the least memory of the three.
COMPILED = {80: min(SHARED_BYTES[c] for c in (80, 86, 89)), 100: SHARED_BYTES[100], 120: SHARED_BYTES[120]}

FULL_PRECISION = Case("fp32", dtype=FP32, bias=True, **PLAIN, options={"softcap": 9.0, "filter_eps": 2**-8})
# The others are the same everywhere: with pointers and with TMA is enough (Hopper: test_compiles.py).
EVERY_KERNEL: dict[str, Callable[[], None]] = OF_THE_TABLE | {
    "lists": partial(launch_lists, BF16, unbiased=True, mass=None),
    "fp32": partial(launch_all, FULL_PRECISION),
    "stored-rows": partial(launch_all, SHORT_ROWS, rows=256, return_lse=True),
}
CASES = {80: EVERY_KERNEL, 100: OF_THE_TABLE, 120: EVERY_KERNEL}


@cache
def plan(capability: int) -> Plan:
    return Plan(capability, CASES[capability], LARGE if capability == 100 else None)


@pytest.mark.parametrize(("capability", "case"), [(target, case) for target, cases in CASES.items() for case in cases])
def test_kernels_compile_and_fit(capability, case):
    for launch, kernel in plan(capability).compile(case):
        check_resources(launch, kernel, COMPILED[capability], row_for(target(capability)))
        if capability < 90:  # Triton turns descriptors into pointers
            assert "cp.async.bulk" not in kernel.asm["ptx"], launch.name


@pytest.mark.parametrize("capability", CASES)
def test_what_is_compiled_takes_every_path_that_is_launched(capability):
    candidates, chosen = plan(capability).candidates, plan(capability).chosen
    assert {path for launch in chosen for path in launch.paths()} == {
        p for launch in candidates for p in launch.paths()
    }
    assert {launch.name for launch in candidates} >= set(LARGE)
    assert 10 < len(chosen) < 0.6 * len(candidates)


def test_the_table_goes_by_the_shared_memory_that_devices_have():
    assert {capability: SHARED_KIB[capability] * 1024 for capability in SHARED_BYTES} == SHARED_BYTES


def test_a_device_of_a_known_kind_with_less_shared_memory_gets_smaller_tiles():
    large = target(100)
    assert row_for(large._replace(shared_memory=100_000)) == row_for(target(120))
    assert row_for(target(90)) is HOPPER
    assert row_for(large) != HOPPER
