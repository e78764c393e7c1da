"""What compiling kernels does to a process: signals must still stop it."""

import os
import subprocess
import sys

# Triton compiles for a GPU also on a machine without one. Its cache on disk must not hold the kernel.
COMPILES = """
import signal, sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from linrnn.core.interrupts import SIGNALS, StopRequest

@triton.jit
def double(x, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)

stops = []
for number in sorted(SIGNALS, key=lambda number: number != signal.SIGUSR1):
    with StopRequest() as stop:
        source = ASTSource(double, {"x": "*fp32", "n": "i32", "B": "constexpr"}, constexprs={"B": 128})
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
        stop.renew()
        signal.raise_signal(number)
    stops.append(stop.signal_number)
print(stops == sorted(SIGNALS, key=lambda number: number != signal.SIGUSR1))
"""


def test_a_signal_after_a_compilation_stops_the_run(tmp_path):
    """Without `renew` LLVM swallows SIGUSR1, which Slurm sends."""
    script = tmp_path / "compiles.py"
    script.write_text(COMPILES)
    own = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, str(script)], env=os.environ | own, capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("True\n"), done.stderr
