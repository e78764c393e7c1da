"""What compiling kernels does to a run's process: signals must still stop the run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from linrnn.core.interrupts import heeded

# Triton compiles for a GPU also on a machine without one. Its cache on disk must not hold the kernel.
COMPILES_AND_WAITS = """
import signal, sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from linrnn.core.interrupts import StopRequest
from linrnn.training.execution.compilation import let_llvm_install_its_handlers

@triton.jit
def double(x, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)

source = ASTSource(double, {"x": "*fp32", "n": "i32", "B": "constexpr"}, constexprs={"B": 128})
order, *numbers = sys.argv[1:]
if order == "first":
    let_llvm_install_its_handlers()
with StopRequest() as stop:
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    signal.raise_signal(int(numbers[0]))
print("stopped by", stop.signal_number)
for number in numbers[1:]:
    with StopRequest() as stop:
        signal.raise_signal(int(number))
    print("stopped by", stop.signal_number)
"""


def stopped_by(tmp_path: Path, order: str, *numbers: signal.Signals) -> list[str]:
    script = tmp_path / "compiles.py"
    script.write_text(COMPILES_AND_WAITS)
    own = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(script), order, *(str(int(number)) for number in numbers)]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("stopped by")]


def test_a_signal_after_a_compilation_stops_the_run(tmp_path: Path) -> None:
    numbers = sorted(heeded(), key=lambda number: number != signal.SIGUSR1)
    assert stopped_by(tmp_path, "first", *numbers) == [f"stopped by {int(number)}" for number in numbers]


def test_without_the_remedy_llvm_swallows_sigusr1(tmp_path: Path) -> None:
    """Once this fails, Triton leaves signals alone, and `let_llvm_install_its_handlers` can go."""
    assert stopped_by(tmp_path, "late", signal.SIGUSR1) == ["stopped by None"]
