"""Which configuration every autotuned Triton kernel runs with: stored tables, a record, progress lines, compilation.

FLA's kernels are written for many tile sizes and numbers of warps. Triton measures all of them when a kernel is first
called with new dimensions, which takes minutes, and the fastest one differs from machine to machine. Here the fastest
ones stand in a committed table for each kind of GPU (`tables/`, made by trainer.kernel_choices=tune).
"""

from linrnn.models.tuning.choices import adopt, remark, store, use, used
from linrnn.models.tuning.compilation import compile_ahead
from linrnn.models.tuning.progress import during, show_progress

__all__ = ["adopt", "compile_ahead", "during", "remark", "show_progress", "store", "use", "used"]
