"""Stored choices of autotuned kernels: which configuration runs, what is recorded and said, what is compiled ahead."""

import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import triton.testing
from filelock import FileLock
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver

from linrnn.core.errors import DataError
from linrnn.core.files import write_json
from linrnn.models import tuning
from linrnn.models.fla_import import import_fla
from linrnn.models.support import FLA_VERSION
from linrnn.models.tuning import choices, progress
from linrnn.models.tuning.table import TABLES, Table, nearest, read_table, read_tables, table_path

VERSIONS = {"triton": version("triton"), "flash-linear-attention": FLA_VERSION}
KERNEL = f"{__name__}:kernel"
KEY = "B=8 D=64 bfloat16"
SMALL, LARGE = "BT=16 num_warps=1 num_stages=2", "BT=32 num_warps=4 num_stages=3"


def kernel(x: Any, B: int, D: int, BT: int) -> None:
    """What the tuners below tune."""


class Called:
    """Stands in for a compiled kernel: notes the tile size of each call."""

    last = 0  # of all of them

    def __init__(self) -> None:
        self.fn, self.arg_names = kernel, ["x", "B", "D", "BT"]
        self.tiles: list[int] = []

    def run(self, *args: Any, BT: int, **kwargs: Any) -> None:
        self.tiles.append(BT)
        Called.last = BT


def tuner(kind: Callable[..., Any] = Autotuner) -> Any:
    """An autotuner with two tile sizes, of which 32 is the fastest."""
    called = Called()
    configs = [triton.Config({"BT": 16}, num_warps=1, num_stages=2), triton.Config({"BT": 32})]
    tuned = kind(called, called.arg_names, configs, ["B", "D"], None, None)
    choices.Choices(tuned)
    return tuned


def call(tuned: Any, batch: int = 8, width: int = 64) -> list[int]:
    """Run the tuner's kernel. Returns the tile sizes that it was called with, of which the last one is the choice."""
    tuned.fn.tiles.clear()
    tuned.run(torch.empty(2, dtype=torch.bfloat16), B=batch, D=width, grid=(1,), warmup=False)
    return list(tuned.fn.tiles)


def table(kernel: str = KERNEL, key: str = KEY, config: str = SMALL, **head: str) -> Table:
    return {"gpu": "a GPU", "compute_capability": "9.0", **VERSIONS, **head, "kernels": {kernel: {key: config}}}


def use(mode: str, *tables: Table) -> None:
    """Begin a run on a GPU with these tables."""
    choices.stored_tables = lambda: tables
    tuning.use(mode)


def do_bench(call: Callable[[], None], quantiles: Any, **_: Any) -> list[float]:
    call()
    return [0.0 if Called.last == 32 else 1.0] * 3


@pytest.fixture(autouse=True)
def _a_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    monkeypatch.setattr(choices, "stored_tables", choices.stored_tables)  # as it was, after the test
    yield
    tuning.use("stored")


# ------------------------------------------------------------------------------------------------------- the table
@pytest.mark.parametrize("text", ["", "[]", '{"gpu": "a GPU"}'])
def test_a_damaged_table_is_named(tmp_path, text):
    table_path("a GPU", "3.6.0", tmp_path).write_text(text)
    with pytest.raises(DataError, match=r"a_gpu-triton_3\.6\.json"):
        read_tables("a GPU", "9.0", "3.6.0", tmp_path)


def test_the_nearest_batch_counts_where_the_same_is_not_stored():
    stored = [f"B={batch} D=64 NB=1" for batch in (1, 4, 32)]
    for batch, expected in {1: 1, 2: 1, 3: 4, 11: 4, 12: 32, 4096: 32}.items():
        assert nearest(f"B={batch} D=64 NB=1", stored) == f"B={expected} D=64 NB=1"
    assert nearest("B=4 D=128 NB=1", stored) is None, "another width is another kernel"
    assert nearest("B=4 D=64", stored) is None


def test_stored_tables_fit_the_installed_fla():
    for path in sorted(TABLES.glob("*.json")):
        stored = read_table(path)
        assert table_path(stored["gpu"], stored["triton"]) == path
        assert stored["flash-linear-attention"] == FLA_VERSION == version("flash-linear-attention")
        for name in stored["kernels"]:
            module, _, function = name.partition(":")
            found = vars(import_fla(module))[function]
            while not isinstance(found, Autotuner):
                found = found.fn
            assert isinstance(found.cache, choices.Choices)


# -------------------------------------------------------------------------------------------------------- choices
@pytest.mark.parametrize("kind", [Autotuner, import_fla("fla.ops.utils.cache").CachedAutotuner])
@pytest.mark.parametrize(
    ("mode", "batch", "width", "tiles", "source"),
    [
        ("stored", 8, 64, [16], "stored"),
        ("stored", 12, 64, [16], "near"),
        ("stored", 8, 128, [16, 32, 32], "tuned"),
        ("first", 8, 64, [16], "stored"),
        ("first", 8, 128, [16], "first"),
        ("tune", 8, 64, [16, 32, 32], "tuned"),
    ],
)
def test_which_configurations_are_measured_and_what_is_recorded(mode, batch, width, tiles, source, kind):
    tuned = tuner(kind)
    use(mode, table())
    assert call(tuned, batch, width) == tiles
    assert call(tuned, batch, width) == tiles[-1:], "it is chosen once"
    found = tuning.used()
    assert {name for name in ("stored", "near", "first", "tuned") if found[name]} == {source}
    chosen = {f"B={batch} D={width} bfloat16": {16: SMALL, 32: LARGE}[tiles[-1]]}
    assert found["choices"] == {f"{KERNEL} {key}": config for key, config in chosen.items()}
    words = {"stored": "1 stored", "near": "1 stored for another batch", "first": "1 in their first configuration"}
    words["tuned"] = "1 tuned here (kernel_choices=tune stores them)"
    assert tuning.remark() == f"autotune cache {found['fingerprint']}: {words[source]}"
    use("stored", table())
    assert call(tuned) == [16], "a run begins without the choices of an earlier run of the process"


def test_a_run_s_choices_are_added_to_the_table_of_its_gpu(tmp_path, monkeypatch):
    """A table of other versions is begun anew."""
    monkeypatch.setattr(choices, "gpu_name", lambda: "a GPU")
    monkeypatch.setattr(choices, "gpu_capability", lambda: "9.0")
    monkeypatch.setattr(choices, "stored_tables", lambda: [table()])
    tuning.use("tune")
    assert tuning.store(tmp_path) is None, "no kernel was called"
    for batch, expected in ((8, {KEY: LARGE}), (4, {KEY: LARGE, KEY.replace("B=8", "B=4"): LARGE})):
        tuning.use("tune")
        call(tuner(), batch)
        path = tuning.store(tmp_path)
        assert path == table_path("a GPU", VERSIONS["triton"], tmp_path)
        assert read_table(path) == {**table(), "kernels": {KERNEL: expected}}
        assert read_tables("another", "9.0", "3.0", tmp_path) == [read_table(path)]
        assert read_tables("another", "8.0", "3.0", tmp_path) == []
    write_json(path, table("old:kernel", **{"flash-linear-attention": "0.1"}))
    tuning.store(tmp_path)
    assert list(read_table(path)["kernels"]) == [KERNEL]
    with FileLock(path.with_suffix(".lock")):  # of a run that stores its own at the same time
        waits = threading.Thread(target=tuning.store, args=(tmp_path,))
        waits.start()
        waits.join(0.2)
        write_json(path, table("another:kernel"))
    waits.join()
    assert list(read_table(path)["kernels"]) == ["another:kernel", KERNEL]


def test_a_kernel_that_one_table_lacks_is_looked_up_in_the_next(monkeypatch):
    use("stored", table("another:kernel", config=LARGE), table())
    assert call(tuner()) == [16]


def test_a_configuration_that_the_kernel_lacks_is_not_used():
    tuned = tuner()
    use("stored", table(config="BT=64 num_warps=4 num_stages=3"))
    assert call(tuned)[-1] == 32


def left_out(kernel: Any, **sizes: object) -> set[tuple[int | None, int]]:
    """The tile size, if a kernel has several, and the warps of the configurations that are not tuned."""
    kernel.nargs = sizes
    return {(config.kwargs.get("B"), config.num_warps) for config in {*kernel.configs} - {*kernel.prune_configs({})}}


def test_activations_are_not_tuned_with_many_elements_in_a_thread():
    kernel = import_fla("fla.modules.activations.ops").swiglu_fwdbwd_kernel.fn
    assert left_out(kernel) == {(2048, 1), (4096, 1), (4096, 2), (8192, 1), (8192, 2), (8192, 4)}


@pytest.mark.parametrize(
    ("capability", "width", "expected"), [(9, 16, {4}), (9, 32, {4}), (9, 64, set()), (8, 32, set())]
)
def test_what_triton_compiles_wrongly_for_hopper_is_left_out(capability, width, expected, monkeypatch):
    """Neither tuned nor taken from a table."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    monkeypatch.setattr(choices, "gpu_name", lambda: "a GPU")
    kernel = import_fla("fla.ops.common.chunk_o").chunk_bwd_kernel_dqkwg.fn
    assert {warps for _, warps in left_out(kernel, BK=width)} - {8} == expected
    key = tuple(width if name == "BK" else 64 for name in kernel.keys)
    use("stored", table(kernel.cache.kernel, choices.key_text(kernel, key), "num_warps=4 num_stages=2"))
    assert (key in kernel.cache) is not bool(expected)


# ------------------------------------------------------------------------------------------------- progress lines
def lines_during(action: Callable[[], None]) -> list[str]:
    lines: list[str] = []
    with tuning.show_progress(lines.append):
        action()
    return lines


def test_long_activities_are_shown_and_short_ones_are_not(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.05)

    def action() -> None:
        with tuning.during("short"):
            pass
        time.sleep(0.1)
        with tuning.during("step 1"), tuning.during(lambda: "tuning f with 3 configurations"):
            time.sleep(0.3)

    lines = lines_during(action)
    assert 2 <= len(lines) <= 6, "about one every 50 ms"
    assert set(lines) == {"step 1: 0 s so far; tuning f with 3 configurations"}


# --------------------------------------------------------------------------------------------- compilation ahead
@triton.jit
def add_one(x, N: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + places, tl.load(x + places, mask=places < N) + 1, mask=places < N)


def tuned_add_one(*sizes: int) -> Any:
    tuned = triton.autotune([triton.Config({"BLOCK": size}) for size in sizes], ["N"], cache_results=True)(add_one)
    choices.Choices(tuned)
    return tuned


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Triton compiles for an H100 that is not there. Returns the names of compiled kernels, and of their launchers."""
    compiled: list[str] = []
    target = GPUTarget("cuda", 90, 32)
    fake = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=lambda source, metadata: compiled.append(f"launcher of {metadata.name}"),
    )
    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, src, **_: compiled.append(src.name))
    return compiled


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
def test_kernels_are_compiled_on_threads_and_not_run(hopper, tmp_path):
    tuned, both = tuned_add_one(16, 32), ["add_one", "launcher of add_one"]
    x = torch.zeros(8)
    tuning.use("tune")
    with tuning.compile_ahead(2):
        tuned[(1,)](x, N=8)
        tuned[(1,)](x, N=8)
        assert hopper == []
    assert sorted(hopper) == sorted(both * 2), "every configuration once"
    assert not x.any()
    assert tuning.used() is None, "nothing is chosen yet"
    assert not tuned.cache
    assert tuned.cache_results
    assert not [*tmp_path.rglob("*autotune*")], "Triton keeps no timings of what was not measured"
    hopper.clear()
    tuning.use("first")
    with tuning.compile_ahead():
        tuned[(1,)](x, N=4)
    assert hopper == both, "the first configuration alone"
    hopper.clear()
    stored = "BLOCK=16 num_warps=4 num_stages=3"
    use("stored", table(f"{__name__}:add_one", "N=16 float32", stored))
    with tuning.compile_ahead():
        tuned[(1,)](x, N=16)
    assert hopper == both, "the stored configuration alone"
    assert not x.any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
def test_what_was_compiled_ahead_is_not_compiled_again(hopper):
    """The kernel is at hand: its launch is the first thing that this machine cannot do."""
    with tuning.compile_ahead():
        add_one[(1,)](torch.zeros(8), N=64, BLOCK=64)
    hopper.clear()
    with pytest.raises(AttributeError, match="utils"):
        add_one[(1,)](torch.zeros(8), N=64, BLOCK=64)
    assert "add_one" not in hopper


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
def test_a_rehearsal_that_fails_compiles_nothing_and_leaves_nothing(hopper):
    tuned = tuned_add_one(128, 256)
    tuning.use("tune")

    def rehearsal() -> None:
        with tuning.compile_ahead(1):
            tuned[(1,)](torch.zeros(8), N=8)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        rehearsal()
    assert hopper == []
    assert not tuned.cache
    assert tuned.cache_results
    assert triton.knobs.runtime.jit_cache_hook is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
def test_a_kernel_that_does_not_compile_fails_when_it_is_called(hopper):
    with tuning.compile_ahead():
        add_one[(1,)](torch.zeros(8), N=8, BLOCK=24)  # no power of two
    with pytest.raises(triton.CompilationError, match="power of 2"):
        add_one[(1,)](torch.zeros(8), N=8, BLOCK=24)
