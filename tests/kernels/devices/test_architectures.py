"""On every architecture the kernels compile with the table's tiles and fit into shared memory. No GPU is needed."""

import os

import pytest
import torch
from cases import BF16, FP32, Case

pytest.importorskip("triton")

from cce_kernels.runtime import tiles
from cce_kernels.runtime.devices import SHARED_KIB
from cce_kernels.runtime.tile_table import HOPPER, row_for
from cce_kernels.runtime.tiles import target
from compiling import EVERYTHING, PLAIN, compile_only, launch_all, launch_lists

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled there")

# Bytes of shared memory that one program may have (CUDA C++ Programming Guide, technical specifications by compute
# capability). A multiprocessor has 1 KiB more, and every program on it takes that much.
SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
RESERVED = 1024
# Triton writes the same PTX for 8.0, 8.6 and 8.9. So one compilation must fit the least memory of the three.
COMPILED = {80: min(SHARED_BYTES[c] for c in (80, 86, 89))} | {c: SHARED_BYTES[c] for c in (90, 100, 120)}

# dC's products have upright tiles at D = 1152, deep ones with 1024 rows, and shallow ones otherwise.
EVERY_OPTION = Case("every_option", dtype=BF16, bias=True, **PLAIN | {"dim": 1152}, options=EVERYTHING)
SOFTCAP = Case("softcap", dtype=BF16, **PLAIN | {"dim": 2048, "shape": (1024,)}, options={"softcap": 20.0})
SHORT = Case("short", dtype=BF16, **PLAIN)
FILTERED = Case("filtered", dtype=BF16, bias=True, **PLAIN, options={"filter_eps": 2**-8, "filter_c": False})
FULL_PRECISION = Case("fp32", dtype=FP32, bias=True, **PLAIN, options={"softcap": 9.0, "filter_eps": 2**-8})
LARGE = ("exponentials_kernel", "gradient_kernel", "product_kernel")  # those that the table is for
LAUNCHES = {
    "recomputed": lambda: launch_all(EVERY_OPTION, with_metrics=True),
    "filtered": lambda: launch_all(FILTERED),
    "stored": lambda: launch_all(SOFTCAP, rows=1024, with_metrics=True),
    "stored-short": lambda: launch_all(SHORT, rows=128, with_metrics=True),
}
# The others are the same everywhere: with pointers and with TMA is enough (Hopper: test_compiles.py).
EVERY_KERNEL = {
    "lists": lambda: launch_lists(BF16, unbiased=True, mass=None),
    "fp32": lambda: launch_all(FULL_PRECISION),
    "recomputed": LAUNCHES["recomputed"],
    "stored": lambda: launch_all(SHORT, rows=256, with_lse=True),
}


def check(compiled, capability: int, resident: int = 1) -> None:
    assert compiled
    room = (COMPILED[capability] + RESERVED) // resident - RESERVED
    for name, kernel in compiled:
        assert kernel.asm["cubin"], name
        assert kernel.metadata.shared <= (room if name == "exponentials_kernel" else COMPILED[capability]), name
        if capability < 90:  # Triton turns descriptors into pointers
            assert "cp.async.bulk" not in kernel.asm["ptx"], name


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("capability", COMPILED)
def test_large_kernels_compile_and_fit(monkeypatch, capability, launch):
    compiled = compile_only(monkeypatch, capability, LARGE)
    LAUNCHES[launch]()
    check(compiled, capability, row_for(target(capability)).short_logits.resident if launch == "stored-short" else 1)


@pytest.mark.parametrize("launch", EVERY_KERNEL)
@pytest.mark.parametrize("capability", [80, 120])
def test_every_kernel_compiles_and_fits(monkeypatch, capability, launch):
    compiled = compile_only(monkeypatch, capability)
    EVERY_KERNEL[launch]()
    assert len({name for name, _ in compiled}) >= (6 if launch == "stored" else 9)
    check(compiled, capability)


@pytest.mark.parametrize(
    ("dim", "shallow", "deep"),
    [
        (256, (128, 256), (128, 256)),
        (640, (256, 128), (256, 128)),
        (1000, (128, 128), (128, 256)),
        (2880, (256, 128), (256, 128)),
        (4096, (128, 128), (128, 256)),
    ],
)
def test_the_tiles_of_dc_follow_from_its_width_and_depth(monkeypatch, dim, shallow, deep):
    x = torch.empty(1, 1, dtype=BF16)
    monkeypatch.setattr(tiles, "device_of", lambda _: target(90))
    found = {depth: tiles.transposed_tiles(x, dim, depth) for depth in (512, 4096)}
    assert {depth: (t.rows, t.cols) for depth, t in found.items()} == {512: shallow, 4096: deep}


def test_the_table_goes_by_the_shared_memory_that_devices_have():
    assert {capability: SHARED_KIB[capability] * 1024 for capability in SHARED_BYTES} == SHARED_BYTES


def test_a_device_of_a_known_kind_with_less_shared_memory_gets_smaller_tiles():
    large = target(100)
    assert row_for(large._replace(shared_memory=100_000)) == row_for(target(120))
    assert row_for(target(90)) is HOPPER
    assert row_for(large) != HOPPER
