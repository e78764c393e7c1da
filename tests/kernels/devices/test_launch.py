"""Quick launches: arguments for which Triton compiles one kernel share it; a repeated launch gets the same numbers."""

import os
import warnings
import weakref

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from cce_kernels.runtime import launch
from compiling import STREAM, Driver

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled there")


class Launcher:
    """A stand-in for Triton's launcher of 3.6 or 3.7, around a driver that records what it gets."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, version: str) -> None:
        self.got: list[tuple] = []
        self.by_triton = 0
        launcher, tensordesc_indices, tensordesc_meta = lambda *args: self.got.append(args), {1}, [{"swizzle": 3}]
        if version == "3.7.1":
            self.arg_annotations, self.kernel_signature = "annotations", "signature"

        def inner(*args):
            return launcher, tensordesc_indices, tensordesc_meta  # Triton's closure holds these, too

        self.launch = inner

    def __call__(self, *args):
        self.by_triton += 1

    def values(self) -> list:
        """What the kernel got at each launch: its arguments, flat."""
        if hasattr(self, "arg_annotations"):
            return [got[15] for got in self.got]
        return [list(got[13:]) for got in self.got]


class Compiled:
    """A stand-in for a compiled kernel. hooked: its launches that Triton's hooks hear of."""

    function, packed_metadata = 11, (4, 1, 0)

    def __init__(self, version: str) -> None:
        self.run, self.hooked = Launcher(version), []

    def __getitem__(self, grid):
        return lambda *args: self.hooked.append(args)


@triton.jit(do_not_specialize=["n"])
def kernel(x_ptr, y_desc, n, width, scale, BLOCK: tl.constexpr):
    pass


@pytest.fixture(params=["3.6.0", "3.7.1"])
def quick(request, monkeypatch):
    """The kernel above with quick launches, the stand-ins compiled so far, and the descriptors encoded so far."""
    compiled: list[Compiled] = []
    encoded: list[tuple] = []

    def compile_one(self, *args, grid, warmup, **options):
        compiled.append(Compiled(request.param))
        return compiled[-1]

    def encode(x, meta):
        encoded.append((x.base.data_ptr(), tuple(x.shape)))
        return [f"map {len(encoded)}", *x.shape, *x.strides]

    monkeypatch.setattr(launch, "CompiledKernel", Compiled)
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", compile_one)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(90))
    monkeypatch.setattr(launch, "CudaLauncher", Launcher)
    monkeypatch.setattr(launch, "make_tensordesc_arg", encode)
    monkeypatch.setattr(triton, "__version__", request.param)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    return launch.quick(kernel), compiled, encoded


X, Y = torch.zeros(64), torch.zeros(32, 32)
SAME = {
    "another tensor": {"x": torch.zeros(5)},
    "another aligned part": {"x": X[4:]},
    "a parameter": {"x": torch.nn.Parameter(X)},
    "a descriptor of another tensor": {"y": torch.zeros(32, 32)},
    "a size that is not specialised on": {"n": 1},
    "another size": {"width": 51},
    "another float": {"scale": 1.0},
}
OTHER = {
    "dtype": {"x": torch.zeros(64, dtype=torch.float16)},
    "alignment": {"x": X[1:]},
    "no tensor": {"x": None},
    "block of a descriptor": {"cols": 32},
    "dtype of a descriptor": {"y": Y.bfloat16()},
    "a size of 64 bits": {"n": 2**40},
    "a multiple of 16": {"width": 64},
    "one": {"width": 1},
    "constant": {"block": 128},
    "warps": {"num_warps": 8},
}


def call(kernel, x=X, y=Y, rows=32, cols=16, n=32, width=50, scale=0.5, block=64, num_warps=4) -> None:
    kernel[(3,)](x, launch.Descriptor(y[:rows], 16, cols), n, width, scale, block, num_warps=num_warps)


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_a_launch_of_the_same_kind_takes_the_kernel_that_is_there(quick, change):
    kernel, compiled, _ = quick
    call(kernel)
    call(kernel, **change)
    assert [len(each.run.got) for each in compiled] == [1], "the first launch was Triton's own"


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_a_launch_that_needs_another_kernel_is_compiled(quick, change):
    kernel, compiled, _ = quick
    for arguments in ({}, change, change, {}):
        call(kernel, **arguments)
    assert [len(each.run.got) for each in compiled] == [1, 1]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_whoever_hears_of_launches_hears_of_quick_ones(quick, name):
    kernel, compiled, _ = quick
    call(kernel)
    hooks = getattr(triton.knobs.runtime, name)

    def hook(metadata) -> None:
        pass

    hooks.add(hook)
    try:
        call(kernel)
    finally:
        hooks.remove(hook)
    call(kernel)
    [only] = compiled
    assert len(only.hooked) == len(only.run.got) == 1


def test_a_repeated_launch_encodes_no_descriptor(quick):
    kernel, compiled, encoded = quick
    for _ in range(4):
        call(kernel)
    [launcher] = [each.run for each in compiled]
    assert encoded == [(Y.data_ptr(), (32, 32))]
    assert launcher.values() == [[X.data_ptr(), "map 1", 32, 32, 32, 1, 32, 50, 0.5, 64]] * 3
    assert not launcher.by_triton
    assert {got[:7] for got in launcher.got} == {(3, 1, 1, STREAM, 11, False, True)}


@pytest.mark.parametrize(
    ("change", "place", "value"),
    [
        ({"x": X[4:]}, 0, X[4:].data_ptr()), ({"n": 6}, 6, 6), ({"scale": 0.25}, 8, 0.25), ({"rows": 16}, 2, 16),
        ({"y": Y[16:], "rows": 16}, 1, "map 2"),
    ],
    ids=["address", "integer", "float", "rows of a descriptor", "address of a descriptor"],
)  # fmt: skip
def test_a_launch_that_differs_is_a_launch_of_its_own(quick, change, place, value):
    kernel, compiled, _ = quick
    for arguments in ({}, {}, change, change, change, {}):
        call(kernel, **arguments)
    [launcher] = [each.run for each in compiled]
    same, *_, last = launcher.values()
    assert last == same
    assert [got[place] for got in launcher.values() if got != same] == [value] * 3


def test_other_addresses_are_put_into_the_launch_that_is_there(quick, monkeypatch):
    kernel, compiled, _ = quick
    for _ in range(2):
        call(kernel)
    monkeypatch.delattr(launch, "opened")
    call(kernel, x=X[4:], y=torch.zeros(32, 32))
    before, now = compiled[0].run.values()
    assert now == [X[4:].data_ptr(), "map 2", *before[2:]]


def test_the_launches_that_are_kept_keep_no_tensor_and_are_bounded(quick, monkeypatch):
    kernel, compiled, _ = quick
    x = torch.zeros(64)
    call(kernel)
    call(kernel, x=x)
    gone = weakref.ref(x)
    del x
    assert gone() is None
    monkeypatch.setattr(launch, "MOST_REPEATED", 8)
    for n in range(50):
        call(kernel, n=n)
    assert len(kernel._repeated) <= 8
    assert [got[6] for got in compiled[0].run.values()[1:]] == list(range(50))


def test_other_versions_launch_through_triton_and_say_so_once(quick, monkeypatch):
    kernel, compiled, encoded = quick
    monkeypatch.setattr(triton, "__version__", "3.8.0")
    launch._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            call(kernel)
    monkeypatch.undo()
    assert ["Triton 3.8.0 has not run on a GPU" in str(warning.message) for warning in told] == [True]
    assert compiled[0].run.by_triton == 2
    assert not compiled[0].run.got
    assert not encoded
