"""What compiling kernels does to a process: signals must still stop it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from linrnn.core.interrupts import heeded

# Triton compiles for a GPU also on a machine without one. Its cache on disk must not hold the kernel.
COMPILES = """
import signal, sys
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from linrnn.core.interrupts import StopRequest, keep_from_llvm
from linrnn.training.runtime import resolve_device

@triton.jit
def double(x, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)

def compile():
    source = ASTSource(double, {"x": "*fp32", "n": "i32", "B": "constexpr"}, constexprs={"B": 128})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""
WAITS = """
remedy, *numbers = sys.argv[1:]
with StopRequest() as stop:
    if remedy == "keep":
        keep_from_llvm()
    compile()
    signal.raise_signal(int(numbers[0]))
print("stopped by", stop.signal_number)
for number in numbers[1:]:
    with StopRequest() as stop:
        signal.raise_signal(int(number))
    print("stopped by", stop.signal_number)
"""
HAS_NO_HANDLER = """
torch.cuda.is_available, torch.cuda.current_device = lambda: True, lambda: 0
resolve_device("cuda")
compile()
print("compiled", flush=True)
signal.raise_signal(int(sys.argv[1]))
"""


def compiling(tmp_path: Path, then: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    script = tmp_path / "compiles.py"
    script.write_text(COMPILES + then)
    own = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=120)


def stopped_by(tmp_path: Path, remedy: str, *numbers: signal.Signals) -> list[str]:
    done = compiling(tmp_path, WAITS, remedy, *map(int, numbers))
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("stopped by")]


def test_a_signal_after_a_compilation_stops_the_run(tmp_path):
    numbers = sorted(heeded(), key=lambda number: number != signal.SIGUSR1)
    assert stopped_by(tmp_path, "keep", *numbers) == [f"stopped by {int(number)}" for number in numbers]


def test_a_signal_after_a_compilation_ends_a_command_that_has_no_handler(tmp_path):
    """A benchmark, for example. It asks for its device, as every command that compiles does."""
    done = compiling(tmp_path, HAS_NO_HANDLER, int(signal.SIGUSR1))
    assert (done.stdout, done.returncode) == ("compiled\n", -signal.SIGUSR1), done.stderr


def test_without_the_remedy_llvm_swallows_sigusr1(tmp_path):
    """Once this fails, Triton leaves signals alone, and `keep_from_llvm` can go."""
    assert stopped_by(tmp_path, "never", signal.SIGUSR1) == ["stopped by None"]
