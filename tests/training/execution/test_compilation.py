"""What compiling kernels does to a process: signals must still stop it, and Inductor keeps to Triton's cache."""

import os
import signal

import torch
import triton
import triton.language as tl
from forked import spawn, start
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from linrnn.config import load_config
from linrnn.core.interrupts import SIGNALS, StopRequest
from linrnn.training.runtime import prepare_process


@triton.jit
def double(x, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


def _signalled_after_compilations(cache: str) -> None:
    """Triton compiles for a GPU also on a machine without one. Its cache on disk must not hold the kernel."""
    os.environ["TRITON_CACHE_DIR"] = cache
    for number in sorted(SIGNALS, key=lambda number: number != signal.SIGUSR1):
        with StopRequest() as stop:
            source = ASTSource(double, {"x": "*fp32", "n": "i32", "B": "constexpr"}, constexprs={"B": 128})
            triton.compile(source, target=GPUTarget("cuda", 90, 32))
            stop.renew()
            signal.raise_signal(number)
        assert stop.signal_number == number


def test_a_signal_after_a_compilation_stops_the_run(tmp_path):
    """Without `renew` LLVM swallows SIGUSR1, which Slurm sends."""
    begin = spawn if torch.cuda.is_available() else start  # CUDA does not survive a fork
    process = begin(_signalled_after_compilations, str(tmp_path))
    process.join(120)
    assert process.exitcode == 0


def test_inductor_is_held_to_tritons_cache_or_to_the_user_s(monkeypatch, tmp_path):
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    for own in (None, str(tmp_path)):
        monkeypatch.setenv("TRITON_CACHE_DIR", own or "")  # so that what the test sets is taken back
        if own is None:
            monkeypatch.delenv("TRITON_CACHE_DIR")
            own = knobs.cache.dir
            assert triton_cache_dir(0) != own
        prepare_process(load_config([]), torch.device("cuda"))
        assert knobs.cache.dir == triton_cache_dir(0) == own
