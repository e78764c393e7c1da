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

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled there")


class Device:
    """A stand-in for Triton's driver."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 7


class Compiled:
    """A stand-in for a compiled kernel that records its launches, by the driver alone or through Triton."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launches: list[tuple] = []
        self.triton_launches: list[tuple] = []

    def run(self, x, y, z, stream, function, packed_metadata, *rest):
        assert (stream, function, packed_metadata) == (7, self.function, self.packed_metadata)
        assert rest[:3] == (None, None, None)  # launch metadata, hooks
        self.launches.append(((x, y, z), rest[3:]))

    def __getitem__(self, grid):
        return lambda *args: self.triton_launches.append((grid[:3], args))


@triton.jit(do_not_specialize=["n"])
def kernel(x_ptr, y_desc, n, width, scale, BLOCK: tl.constexpr):
    pass


@pytest.fixture
def quick(monkeypatch):
    """The kernel above with quick launches, and the stand-ins that it has compiled."""
    compiled: list[Compiled] = []

    def compile_one(self, *args, grid, warmup, **options):
        compiled.append(Compiled())
        return compiled[-1]

    monkeypatch.setattr(launch, "CompiledKernel", Compiled)
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", compile_one)
    monkeypatch.setattr(triton.runtime.driver, "_active", Device())
    return launch.quick(kernel), compiled


X = torch.zeros(64)


def descriptor(block=(16, 16), dtype=torch.float32):
    return launch.Descriptor(torch.zeros(32, 32, dtype=dtype), *block)


PLAIN = {"x": X, "y": descriptor(), "n": 32, "width": 50, "scale": 0.5, "block": 64, "num_warps": 4}
SAME = {
    "another tensor": {"x": torch.zeros(5)},
    "another aligned part": {"x": X[4:]},
    "a parameter": {"x": torch.nn.Parameter(X)},
    "a descriptor of another tensor": {"y": descriptor()},
    "a size that is not specialised on": {"n": 1},
    "another size": {"width": 51},
    "another float": {"scale": 1.0},
}
OTHER = {
    "dtype": {"x": torch.zeros(64, dtype=torch.float16)},
    "alignment": {"x": X[1:]},
    "no tensor": {"x": None},
    "block of a descriptor": {"y": descriptor((16, 32))},
    "dtype of a descriptor": {"y": descriptor(dtype=torch.bfloat16)},
    "a size of 64 bits": {"n": 2**40},
    "a multiple of 16": {"width": 64},
    "one": {"width": 1},
    "constant": {"block": 128},
    "warps": {"num_warps": 8},
}


def call(kernel, x, y, n, width, scale, block, **options) -> None:
    kernel[(3,)](x, y, n, width, scale, block, **options)


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_a_launch_of_the_same_kind_takes_the_kernel_that_is_there(quick, change):
    kernel, compiled = quick
    call(kernel, **PLAIN)
    arguments = PLAIN | change
    call(kernel, **arguments)
    assert len(compiled) == 1
    assert not compiled[0].triton_launches
    (grid, args), *more = compiled[0].launches  # the first launch was Triton's own
    assert not more
    assert grid == (3, 1, 1)
    assert all(a is b for a, b in zip(args, list(arguments.values())[:6], strict=True))


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_a_launch_that_needs_another_kernel_is_compiled(quick, change):
    kernel, compiled = quick
    for arguments in (PLAIN, PLAIN | change, PLAIN | change, PLAIN):
        call(kernel, **arguments)
    assert len(compiled) == 2
    assert [len(each.launches) for each in compiled] == [1, 1]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_whoever_hears_of_launches_hears_of_quick_ones(quick, name):
    kernel, compiled = quick
    call(kernel, **PLAIN)
    hooks = getattr(triton.knobs.runtime, name)

    def hook(metadata) -> None:
        pass

    hooks.add(hook)
    try:
        call(kernel, **PLAIN)
    finally:
        hooks.remove(hook)
    assert not compiled[0].launches
    call(kernel, **PLAIN)
    assert len(compiled[0].triton_launches) == len(compiled[0].launches) == 1


# -------------------------------------------------------------------------------------------------- repeated launches
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


@triton.jit(do_not_specialize=["n"])
def short_kernel(x_ptr, y_desc, n, scale, BLOCK: tl.constexpr):
    pass


@pytest.fixture(params=["3.6.0", "3.7.1"])
def launched(request, monkeypatch):
    """The kernel above, compiled once with a stand-in launcher; the launcher; and the descriptors encoded so far."""
    launcher, encoded = Launcher(request.param), []

    class Compiled:
        function, packed_metadata, run = 11, (4, 1, 0), launcher

    def encode(x, meta):
        encoded.append((x.base.data_ptr(), tuple(x.shape)))
        return [f"map {len(encoded)}", *x.shape, *x.strides]

    monkeypatch.setattr(launch, "CompiledKernel", Compiled)
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", lambda self, *args, **options: Compiled())
    monkeypatch.setattr(triton.runtime.driver, "_active", Device())
    monkeypatch.setattr(launch, "CudaLauncher", Launcher)
    monkeypatch.setattr(launch, "make_tensordesc_arg", encode)
    monkeypatch.setattr(triton, "__version__", request.param)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    return launch.quick(short_kernel), launcher, encoded


Y = torch.zeros(32, 32)


def call_short(kernel, x=X, y=Y, rows=32, n=5, scale=0.5):
    kernel[(3,)](x, launch.Descriptor(y[:rows], 16, 16), n, scale, 64, num_warps=4)


def test_a_repeated_launch_encodes_no_descriptor(launched):
    kernel, launcher, encoded = launched
    for _ in range(4):  # the first is Triton's own
        call_short(kernel)
    assert encoded == [(Y.data_ptr(), (32, 32))]
    assert launcher.values() == [[X.data_ptr(), "map 1", 32, 32, 32, 1, 5, 0.5, 64]] * 3
    assert not launcher.by_triton
    assert {got[:7] for got in launcher.got} == {(3, 1, 1, 7, 11, False, True)}


@pytest.mark.parametrize(
    ("change", "place", "value"),
    [
        ({"x": X[4:]}, 0, X[4:].data_ptr()), ({"x": None}, 0, None), ({"n": 6}, 6, 6), ({"scale": 0.25}, 7, 0.25),
        ({"rows": 16}, 2, 16), ({"y": Y[16:], "rows": 16}, 1, "map 2"), ({"y": Y.bfloat16()}, 1, "map 2"),
    ],
    ids=["address", "no tensor", "integer", "float", "rows of a descriptor", "address of a descriptor", "dtype"],
)  # fmt: skip
def test_a_launch_that_differs_is_a_launch_of_its_own(launched, change, place, value):
    kernel, launcher, _ = launched
    for arguments in ({}, {}, change, change, change, {}):
        call_short(kernel, **arguments)
    same, *_, last = launcher.values()
    assert last == same
    assert [got[place] for got in launcher.values() if got != same] in ([value] * 2, [value] * 3)


def test_the_launches_that_are_kept_keep_no_tensor_and_are_bounded(launched, monkeypatch):
    kernel, launcher, _ = launched
    x = torch.zeros(64)
    call_short(kernel)
    call_short(kernel, x=x)
    gone = weakref.ref(x)
    del x
    assert gone() is None
    monkeypatch.setattr(launch, "MOST_REPEATED", 8)
    for n in range(50):
        call_short(kernel, n=n)
    assert len(kernel._repeated) <= 8
    assert [got[6] for got in launcher.values()[1:]] == list(range(50))


def test_other_versions_launch_through_triton_and_say_so_once(launched, monkeypatch):
    kernel, launcher, encoded = launched
    monkeypatch.setattr(triton, "__version__", "3.8.0")
    launch._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            call_short(kernel)
    monkeypatch.undo()
    assert ["Triton 3.8.0 has not run on a GPU" in str(warning.message) for warning in told] == [True]
    assert launcher.by_triton == 2
    assert not launcher.got
    assert not encoded
