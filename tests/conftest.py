"""Shared fixtures: small runs in temporary directories, and the command line as a user calls it."""

import gc
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads sleep, because test processes share the cores
if "PYTEST_XDIST_WORKER" in os.environ:  # several workers: a second thread of each only costs time
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from forked import ROOT, Popen, freeze, run_elsewhere, start, start_server, use_server
from interpreted import ON, Interpreter

from linrnn.config import compose, last_of_each
from linrnn.config.schema import ABOUT, SCHEMAS
from linrnn.losses import registry

gc.disable()  # until the end of the collection: what is imported stays
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup as elsewhere
Command = Callable[..., subprocess.CompletedProcess[str]]
SECONDS = 300  # time limit of a command
# Overrides with which most end-to-end tests start: three steps of the smallest model, wandb off.
SMALL = (
    *("device=cpu", "trainer.max_steps=3", "trainer.batch_size=2", "trainer.seq_len=80", "trainer.valid_tokens=400"),
    *("data.n_tokens=20000", "data.n_valid_tokens=2000", "logger.wandb.mode=disabled", "logger.picture=false"),
)

_interpreter = Interpreter()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All workers fork from one server: it imports the libraries once, while the workers collect the tests."""
    with patch.dict(os.environ, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1")):
        node.workerinput["fork_server"] = start_server()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        use_server(config.workerinput["fork_server"])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `interpreter` in the process with Triton's interpreter, and every other test here."""
    if ON or pyfuncitem.get_closest_marker("interpreter") is None:
        return None
    parameters = pyfuncitem.callspec.params if hasattr(pyfuncitem, "callspec") else {}
    fixtures = [name for name in pyfuncitem._fixtureinfo.argnames if name not in parameters]
    _interpreter.run(pyfuncitem.module.__name__, pyfuncitem.originalname, parameters, fixtures)
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Folders of short files come last: a long file at the end would leave the other worker without work."""
    short = ("bench", "config", "core", "docs", "profiling")
    items.sort(key=lambda item: item.path.parent.name in short)


def pytest_collection_finish() -> None:
    """In a worker the garbage collector looks at old objects a tenth as often as by default: few of them are garbage.

    Tests on a GPU run in one process, where garbage may hold much of the GPU's memory.
    """
    freeze()
    if "PYTEST_XDIST_WORKER" in os.environ:
        gc.set_threshold(700, 10, 100)
    gc.enable()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What a file has imported and keeps is frozen, too."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        freeze()


def pytest_unconfigure() -> None:
    _interpreter.stop()


@pytest.fixture
def small(tmp_path: Path, data_cache: Path) -> Callable[..., list[str]]:
    """Overrides of a small run that writes below the test's own directory."""
    return lambda *more: small_below(tmp_path, data_cache, *more)


@pytest.fixture
def on_text(small: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Overrides of a small run on text: a tokenizer of 300 entries is trained on it."""
    kept = [override for override in small() if not override.startswith("data.n_")]
    kept += ["data=text", "data.tokenizer_vocab_size=300", "data.valid_fraction=0.1"]
    return lambda *more: last_of_each([*kept, *more])


@pytest.fixture(scope="module")
def small_of_module(tmp_path_factory: pytest.TempPathFactory, data_cache: Path) -> Callable[..., list[str]]:
    """Overrides of a small run that several tests of a module share."""
    directory = tmp_path_factory.mktemp("of_module")
    return lambda *more: small_below(directory, data_cache, *more)


def small_below(directory: Path, data_cache: Path, *more: str) -> list[str]:
    return last_of_each([*SMALL, f"results_dir={directory}/results", f"data.cache_dir={data_cache}", *more])


@pytest.fixture(scope="session")
def data_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One data cache for all tests: the same small data is generated once."""
    return tmp_path_factory.mktemp("data_cache")


@pytest.fixture
def command_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a script of the repository in this process: for the further cases of what a process of its own has shown."""

    def call(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", list(arguments))
            patch.chdir(cwd)
            for name, value in environment.items():
                patch.setenv(name, value)
            capsys.readouterr()
            code: int | str | None = 0
            try:
                runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")
            except SystemExit as end:
                code = end.code
        assert isinstance(code, int | None)
        return subprocess.CompletedProcess(arguments, code or 0, *capsys.readouterr())

    return call


@pytest.fixture
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Run a script of the repository in its own process, forked from one that has imported the libraries.

    With a GPU the process is new instead: CUDA does not survive a fork.
    """
    import torch

    def call(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
        if torch.cuda.is_available():
            how = {"cwd": cwd, "env": {**os.environ, **environment}, "timeout": SECONDS, "check": False}
            return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **how)
        folder = tmp_path_factory.mktemp("command")
        printed = folder / "stdout", folder / "stderr"
        process = start(run_elsewhere, {**os.environ, **environment}, cwd, arguments[0], list(arguments[1:]), *printed)
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(arguments, SECONDS)
        return subprocess.CompletedProcess(arguments, process.exitcode, *(path.read_text() for path in printed))

    return call


@pytest.fixture
def quick_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points of a sweep in this process are forked. What asks another process in order to leave the GPU alone asks
    this one, which has the CPU only.

    tests/faults/test_kill_at_random.py also runs points in new interpreters, as users do.
    """
    import torch

    from linrnn.experiments import max_batch, points, sweep

    if torch.cuda.is_available():  # CUDA does not survive a fork
        return
    popen = SimpleNamespace(Popen=Popen, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(points, "subprocess", popen)
    for module in (sweep, max_batch):
        monkeypatch.setattr(module, "in_another_process", lambda function, *arguments: function(*arguments))


@pytest.fixture
def trained(tmp_path: Path) -> Callable[[list[str], int], Path]:
    """The directory of a run, with these overrides and so many ranks, that finished."""
    from rank_process import trained_in

    return partial(trained_in, tmp_path=tmp_path)


@pytest.fixture
def text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are written without their pictures, which take most of the time."""
    monkeypatch.setattr("linrnn.report.write._figures", lambda *given: [])


@pytest.fixture
def new_losses() -> Iterator[None]:
    """Remove losses that the test registers."""
    registers: tuple[dict, ...] = (SCHEMAS["loss"], ABOUT, registry._BACKENDS)
    before = [dict(register) for register in registers]
    yield
    for register, content in zip(registers, before, strict=True):
        register.clear()
        register.update(content)
    compose._composed.cache_clear()


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def traced() -> Iterator[None]:
    """On a CPU torch.compile, as in the loss `compiled`, runs the graph that it traces: compiling one takes seconds.

    tests/losses/test_losses.py compiles it.
    """
    import torch

    compiled = torch.compile

    def compile(*functions: Any, options: dict[str, Any] | None = None, **how: Any) -> Any:
        return compiled(*functions, **how, **({"backend": "eager"} if options else {}))  # others give no options

    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch, "compile", compile)
        yield


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each of FLA's kernels runs with its first configuration: tuning would take minutes."""
    from rank_process import leave_kernels_untuned  # imports Triton, which few tests need

    leave_kernels_untuned(monkeypatch.setattr)
