"""Programmatic dependent launch: a kernel may begin before the previous one ends. Not every Triton version has it."""

from __future__ import annotations

import triton

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    AVAILABLE = True
except ImportError:  # launches then run one after another: slower, with the same results
    AVAILABLE = False

    @triton.jit
    def gdc_launch_dependents():
        pass

    @triton.jit
    def gdc_wait():
        pass
