"""Programmatic dependent launch, where this Triton has it; launches follow one another where not."""

from __future__ import annotations

import triton

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    AVAILABLE = True
except ImportError:  # another version has it elsewhere: nothing but time is lost
    AVAILABLE = False

    @triton.jit
    def gdc_launch_dependents():
        pass

    @triton.jit
    def gdc_wait():
        pass
