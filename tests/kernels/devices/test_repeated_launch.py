"""A launch that repeats an earlier one gets the numbers of that one; a launch that differs in any number does not."""

import os
import warnings
import weakref

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from cce_kernels.runtime import launch, program
from triton.tools.tensor_descriptor import TensorDescriptor

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled there")


@triton.jit(do_not_specialize=["n"])
def kernel(x_ptr, y_desc, n, scale, BLOCK: tl.constexpr):
    pass


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


@pytest.fixture(params=["3.6.0", "3.7.1"])
def quick(request, monkeypatch):
    """The kernel above, compiled once with a stand-in launcher; the launcher; and the descriptors encoded so far."""
    launcher, encoded = Launcher(request.param), []

    class Compiled:
        function, packed_metadata, run = 11, (4, 1, 0), launcher

    class Device:
        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 7

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
    return launch.quick(kernel), launcher, encoded


X, Y = torch.zeros(64), torch.zeros(32, 32)


def call(kernel, x=X, y=Y, rows=32, n=5, scale=0.5):
    kernel[(3,)](x, TensorDescriptor(y, [rows, 32], [32, 1], [16, 16]), n, scale, 64, num_warps=4)


def test_a_repeated_launch_encodes_no_descriptor(quick):
    kernel, launcher, encoded = quick
    for _ in range(4):  # the first is Triton's own
        call(kernel)
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
def test_a_launch_that_differs_is_a_launch_of_its_own(quick, change, place, value):
    kernel, launcher, _ = quick
    for arguments in ({}, {}, change, change, change, {}):
        call(kernel, **arguments)
    same, *_, last = launcher.values()
    assert last == same
    assert [got[place] for got in launcher.values() if got != same] in ([value] * 2, [value] * 3)


def test_the_launches_that_are_kept_keep_no_tensor_and_are_bounded(quick, monkeypatch):
    kernel, launcher, _ = quick
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
    assert [got[6] for got in launcher.values()[1:]] == list(range(50))


def test_other_versions_launch_through_triton_and_say_so_once(quick, monkeypatch):
    kernel, launcher, encoded = quick
    monkeypatch.setattr(triton, "__version__", "3.8.0")
    launch._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            call(kernel)
    monkeypatch.undo()
    assert ["Triton 3.8.0 has not run on a GPU" in str(warning.message) for warning in told] == [True]
    assert launcher.by_triton == 2
    assert not launcher.got
    assert not encoded


def test_a_program_launches_with_the_addresses_of_other_tensors(quick):
    """Recorded from one pair of tensors, and run with another. Pointers and descriptors follow."""
    kernel, launcher, encoded = quick
    call(kernel)  # compiled
    with program.Tape() as recorded:
        between = X.new_empty(64)
        call(kernel, x=between)
        call(kernel, x=between[16:], n=6)
    found = program.Program(recorded, [Y])
    launcher.got.clear()
    encoded.clear()
    y = torch.zeros(40, 32)[8:]
    assert found.run([y], y) == []  # the scratch is gone
    first, second = launcher.values()
    assert encoded == [(y.data_ptr(), (32, 32))] * 2
    assert first == [first[0], "map 1", 32, 32, 32, 1, 5, 0.5, 64]
    assert second == [first[0] + 64, "map 2", 32, 32, 32, 1, 6, 0.5, 64]
    assert {got[:4] for got in launcher.got} == {(3, 1, 1, 7)}

    found.run([y], y)  # the scratch may lie elsewhere now
    assert [values[6] for values in launcher.values()] == [5, 6, 5, 6]
