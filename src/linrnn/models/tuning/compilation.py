"""Compile all kernels of a step on all cores, before the step needs the first of them.

Triton compiles a kernel when it is called, so one after the other, and each takes about a second. Which kernels a step
calls, and for which arguments, is known only from calling them. So the step is rehearsed: Triton's hook for a kernel
that is not compiled yet notes it, and the kernel is not run. Then threads compile all of them. Triton's compiler
releases Python's lock most of the time. Kernels that are compiled already run.
"""

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from linrnn.core.machine import cores
from linrnn.models.tuning.choices import rehearsing
from linrnn.models.tuning.progress import during

# Torch's operations whose result nothing has written. FLA, and every other caller of Triton, allocates with them.
ALLOCATING = {
    *(torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.empty_permuted),
    *(torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided),
}


class Zeroed(TorchDispatchMode):
    """Within the context, new memory holds zeros, in backward passes too: what no kernel has written is a valid index.

    A model may index tensors by what a kernel has written, as sparse attention does. Zero is an index of every tensor
    that is not empty. Memory that nothing has written may hold any other, and a GPU then reports an illegal access.
    """

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        return result.zero_() if operation.overloadpacket in ALLOCATING else result


@contextlib.contextmanager
def compile_ahead(threads: int | None = None) -> Iterator[None]:
    """Within the context, kernels of Triton's that are not compiled yet are noted and not run. At its end they are
    compiled.

    A kernel that does not compile fails again when it is called in earnest. Functions of FLA's under `torch.compile`
    run as they are, so that `Zeroed` sees what they allocate. The step compiles them.

    Args:
        threads: that compile; None: one for each core that this process may use.
    """
    from triton import knobs

    noted: dict[Any, tuple[Any, str]] = {}

    def note(*, key: Any, fn: Any, compile: Any, **_: Any) -> bool:
        noted[id(fn.jit_function), key] = fn.jit_function, compile["specialization_data"]
        return True  # leave it uncompiled, and do not run it

    usual = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        with rehearsing(), torch.compiler.set_stance("force_eager"), Zeroed():
            yield
    finally:
        knobs.runtime.jit_cache_hook = usual
    _compile(list(noted.values()), threads or cores())


def _compile(noted: list[tuple[Any, str]], threads: int) -> None:
    """Compile kernels, each as Triton has described it, and load them to the GPU."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    compilations: list[Future[None]] = []

    def compile_one(kernel: Any, description: str) -> None:
        with contextlib.suppress(Exception), contextlib.nullcontext() if device is None else torch.cuda.device(device):
            kernel.preload(description).run  # noqa: B018  Triton 3.6 also compiles a launcher in C

    def progress() -> str:
        done = sum(future.done() for future in compilations)
        return f"compiled {done} of {len(noted)} kernels on {threads} threads"

    with during(progress), ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
        compilations += [pool.submit(compile_one, *kernel) for kernel in noted]
