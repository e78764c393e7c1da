"""Kernels read and write 8 or 16 bytes at a time, also where D is a multiple of 8 and not of 16."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

pytest.importorskip("triton")

from cases import Case
from cce_kernels.runtime.tiles import in_eights
from compiling import launch_all, pretend
from triton.runtime import jit

KERNELS = {"target_logits_kernel", "product_kernel", "scaled_rows_kernel", "hidden_kernel"}


def test_eights_are_sizes_of_which_triton_knows_nothing():
    assert in_eights(1000, 1024)
    assert not any(in_eights(*sizes) for sizes in ((1024, 64), (1000, 1001), (1001,)))


@pytest.mark.parametrize("rows", [256, 128], ids=["one chunk", "two chunks"])
@pytest.mark.parametrize("dim", [1000, 1024])
def test_no_kernel_moves_single_numbers_of_16_bits(dim, rows, monkeypatch):
    """At D = 1000 every gradient was read and written 2 bytes at a time, and its rounding error 1 byte at a time."""
    compile_kernel = jit.JITFunction.run
    with monkeypatch.context() as patch:
        launches = pretend(patch, 90)
        launch_all(Case("wide", shape=(200,), dim=dim, vocab=1024, dtype=torch.bfloat16), rows=rows)
        patch.setattr(jit.JITFunction, "run", compile_kernel)
        found = [launch for launch in launches if launch.name in KERNELS]
        narrow = {
            launch.name: seen
            for launch in found
            if (seen := Counter(re.findall(r"(?:ld|st)\.global\.b(?:8|16)\b", launch.compile().asm["ptx"])))
        }
    assert {launch.name for launch in found} >= {"product_kernel", "scaled_rows_kernel", "target_logits_kernel"}
    assert narrow == {}
