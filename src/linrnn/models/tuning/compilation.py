"""Compile all kernels of a step on all cores, before the step needs the first of them.

Triton compiles a kernel when it is called, so one after the other, and each takes about a second. Which kernels a step
calls, and for which arguments, is known only from calling them. So the step is rehearsed: its kernels are not run, and
their arguments go to a pool of threads which compile. Triton's compiler releases Python's lock most of the time.
What a kernel should have written is zero meanwhile (new_memory.py), so any model can be rehearsed.

Triton 3.6 also compiles a launcher in C for each kernel, when the kernel is first launched. The threads do that, too.
"""

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any
from unittest.mock import patch

from linrnn.core.machine import cores
from linrnn.models.tuning.new_memory import zeroed
from linrnn.models.tuning.progress import during


class _NotTuned(Exception):
    """Triton's cache on disk holds no timings for a key."""


class _Rehearsal:
    """Takes the place of calls to kernels. All results stay as they were allocated: zeros, if they are new."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        from triton.runtime.jit import JITFunction

        self._run, self._compile = JITFunction.run, JITFunction._do_compile
        self._pool = pool
        self._asked: set[tuple[int, Any, Any]] = set()
        self.compilations: list[Future[Any]] = []

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """For JITFunction.run."""
        return self._run(kernel, *args, grid=grid, warmup=True, **kwargs)

    def compile(self, kernel: Any, key: Any, signature: Any, device: Any, *rest: Any) -> None:
        """For JITFunction._do_compile. The kernel's own cache gets the result later."""
        if (asked := (id(kernel), key, device)) not in self._asked:
            self._asked.add(asked)
            self.compilations.append(self._pool.submit(self._prepare, kernel, key, signature, device, *rest))

    def _prepare(self, kernel: Any, *arguments: Any) -> None:
        """On a thread: compile a kernel and its launcher. Both are found again in Triton's cache on disk."""
        from triton.runtime.driver import driver

        if (compiled := self._compile(kernel, *arguments)) is not None:  # None: a hook of Triton's took the kernel
            driver.active.launcher_cls(compiled.src, compiled.metadata)

    def run_tuned(self, tuner: Any, *args: Any, **kwargs: Any) -> None:
        """For Autotuner.run: the chosen configuration, or all among which it will choose."""
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        for config in self._candidates(tuner, kwargs):
            tuner.fn.run(*args, **kwargs, **config.all_kwargs())
        tuner.nargs = None

    def _candidates(self, tuner: Any, kwargs: dict[str, Any]) -> list[Any]:
        if len(tuner.configs) == 1:
            return tuner.configs
        if (key := tuning_key(tuner, kwargs)) in tuner.cache:
            return [tuner.cache[key]]
        pruned = tuner.prune_configs(kwargs)
        if tuner.cache_results:
            with contextlib.suppress(_NotTuned):
                tuner.check_disk_cache(key, pruned, _not_tuned)
                return [tuner.cache[key]]
        return pruned


def _not_tuned() -> None:
    raise _NotTuned


def tuning_key(tuner: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The key of a call, as Autotuner.run makes it. `tuner.nargs` holds the positional arguments."""
    given = {name: value for name, value in {**tuner.nargs, **kwargs}.items() if name in tuner.arg_names}
    dtypes = [str(value.dtype) for value in given.values() if hasattr(value, "dtype")]
    return tuple([given[name] for name in tuner.keys if name in given] + dtypes)


@contextlib.contextmanager
def _cancelled_on_error(pool: ThreadPoolExecutor) -> Iterator[None]:
    """If the rehearsal fails, or is interrupted, compile nothing more."""
    try:
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


@contextlib.contextmanager
def compile_ahead(threads: int | None = None) -> Iterator[None]:
    """Within the context, Triton's kernels are compiled and not run: what they should write holds zeros.

    All are compiled when the context ends. A kernel that does not compile fails again when it is called in earnest.

    Args:
        threads: that compile; None: one for each core that this process may use.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    threads = threads or cores()
    with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
        rehearsal = _Rehearsal(pool)

        def progress() -> str:
            done = sum(future.done() for future in rehearsal.compilations)
            return f"compiled {done} of {len(rehearsal.compilations)} kernels on {threads} threads"

        with during(progress), _cancelled_on_error(pool):
            with (
                zeroed(),
                patch.object(JITFunction, "run", lambda *args, **kwargs: rehearsal.run(*args, **kwargs)),
                patch.object(JITFunction, "_do_compile", lambda *args: rehearsal.compile(*args)),
                patch.object(Autotuner, "run", lambda *args, **kwargs: rehearsal.run_tuned(*args, **kwargs)),
            ):
                yield
            wait(rehearsal.compilations)
