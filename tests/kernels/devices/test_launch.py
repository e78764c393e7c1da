"""Quick launches: arguments for which Triton compiles one kernel share one, and other arguments get another kernel."""

import os

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from cce_kernels.runtime import launch
from triton.tools.tensor_descriptor import TensorDescriptor

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled there")


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

    class Device:
        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 7

    monkeypatch.setattr(launch, "CompiledKernel", Compiled)
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", compile_one)
    monkeypatch.setattr(triton.runtime.driver, "_active", Device())
    return launch.quick(kernel), compiled


X = torch.zeros(64)


def descriptor(block=(16, 16), dtype=torch.float32):
    return TensorDescriptor(torch.zeros(32, 32, dtype=dtype), [32, 32], [32, 1], list(block))


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


def test_an_argument_of_unknown_kind_is_refused(quick):
    with pytest.raises(TypeError, match="argument of type str"):
        call(quick[0], **PLAIN | {"x": "text"})


def test_within_through_triton_every_launch_is_triton_s(quick, monkeypatch):
    """As in a rehearsal, which compiles kernels and runs none: not even those that were launched before."""
    quick, compiled = quick
    arguments = torch.zeros(16), torch.zeros(16), 3, 4, 0.5, 16
    for _ in range(3):
        quick[(1,)](*arguments)
    before = [len(one.launches) for one in compiled]
    asked = []
    with monkeypatch.context() as replaced, launch.through_triton():
        replaced.setattr(triton.runtime.jit.JITFunction, "run", lambda self, *args, **options: asked.append(args))
        quick[(1,)](*arguments)
        quick[(1,)](*arguments)
    assert len(asked) == 2
    assert [len(one.launches) for one in compiled] == before
    quick[(1,)](*arguments)
    assert len(asked) == 2
    assert sum(len(one.launches) for one in compiled) == sum(before) + 1
