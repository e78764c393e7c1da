"""A process in which Triton's interpreter is on, for tests marked `interpreter`.

Triton reads TRITON_INTERPRET when it is first imported. A test process therefore either compiles kernels or interprets
them. Every test process starts one interpreting process, sends all of its marked tests there, and reports each result
as the test's own.
"""

import contextlib
import gc
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from typing import Any
from unittest.mock import patch

import pytest

ON = os.environ.get("TRITON_INTERPRET") == "1"
SETTINGS = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # threads only wait for Python


class Interpreter:
    """Runs test functions in one process that lives until :meth:`stop`."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def run(self, module: str, function: str, arguments: Mapping[str, Any], fixtures: Sequence[str]) -> None:
        """Call a test function in the interpreting process.

        Args:
            arguments: values of its parameters, which must be picklable.
            fixtures: other fixtures that it asks for; only `monkeypatch` is provided.

        Raises:
            pytest.skip.Exception, pytest.fail.Exception: the test was skipped, or failed with the traceback shown.
        """
        if surplus := set(fixtures) - {"monkeypatch"}:
            pytest.fail(f"a test in the interpreter cannot ask for the fixtures {surplus}", pytrace=False)
        try:
            future = self._started().submit(_call, list(sys.path), module, function, dict(arguments), bool(fixtures))
            outcome, text = future.result()
        except BaseException:  # the test's time is up, or the process died: the next test gets a new process
            self.stop()
            raise
        if outcome == "skipped":
            pytest.skip(text)
        if outcome == "failed":
            pytest.fail(text, pytrace=False)

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        pool, self._pool = self._pool, None
        if pool is not None:
            for process in list(pool._processes.values()):
                process.terminate()
            pool.shutdown()

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_end_with_parent)
            with patch.dict(os.environ, SETTINGS):
                self._pool.submit(os.getpid).result()  # the process starts here and keeps these variables
        return self._pool


def _end_with_parent() -> None:
    """In the interpreting process: end as soon as the test process is gone, even in the middle of a test."""

    def wait() -> None:
        parent = parent_process()
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _call(path: list[str], module: str, function: str, arguments: dict[str, Any], patched: bool) -> tuple[str, str]:
    """In the interpreting process: `passed`, `skipped` or `failed`, and the reason."""
    sys.path[:] = path
    with pytest.MonkeyPatch.context() as monkeypatch:
        try:
            gc.disable()  # imports leave no garbage
            test = getattr(importlib.import_module(module), function)
            gc.enable()
            repeat_no_calls(monkeypatch)
            test(**arguments, **({"monkeypatch": monkeypatch} if patched else {}))
        except pytest.skip.Exception as skipped:
            return "skipped", str(skipped)
        except BaseException:  # a failed check of pytest's own is no Exception
            return "failed", traceback.format_exc()
    return "passed", ""


def repeat_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every call of the loss as usual, also where an earlier one is like it (cce_kernels/runtime/program.py).

    Many tests change planner or kernels between two calls of one kind.
    """
    with contextlib.suppress(ImportError):  # without Triton nothing is repeated
        program = importlib.import_module("cce_kernels.runtime.program")
        monkeypatch.setattr(program, "MOST_TRIES", 0)
        monkeypatch.setattr(program.CALLS, "_known", {})
