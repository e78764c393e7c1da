"""Which implementation serves which device, what is optional, and a clear error where the kernels cannot run."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cce_kernels import backends, linear_cross_entropy
from cce_kernels.backends import in_torch
from cce_kernels.options import Options
from cce_kernels.row_math import Operands
from cce_kernels.runtime import devices
from torch._subclasses.fake_tensor import FakeTensorMode

interpreted = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(interpreted, reason="there the kernels run on the CPU")
GPU = torch.device("cuda", 0)
KERNEL_TESTS = Path(__file__).parents[1]  # where cases.py lies


@pytest.fixture
def gpu(monkeypatch):
    """Pretends that there is a GPU of a compute capability, and that no device has been examined yet."""

    def pretend(major: int, minor: int, hip: str | None = None) -> None:
        found = SimpleNamespace(
            major=major, minor=minor, shared_memory_per_block_optin=64 * 1024, multi_processor_count=100
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
        monkeypatch.setattr(torch.version, "hip", hip)
        forget()

    def forget() -> None:
        devices.properties.cache_clear()
        backends._backend_on.cache_clear()

    forget()
    yield pretend
    forget()


def on(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without values on a device, whether the device exists or not."""
    with FakeTensorMode():
        return torch.empty(*shape, device=device, dtype=dtype)


@pytest.mark.parametrize(
    ("capability", "hip", "reason"),
    [((9, 0), "6.4", "not tested on AMD"), ((7, 5), None, r"need compute capability 8.0, it has 7.5")],
    ids=["MI200, which says it is 9.0", "Turing"],
)
def test_amd_and_old_gpus_take_the_path_in_torch_and_say_so_once(gpu, capability, hip, reason):
    gpu(*capability, hip)
    x = on("cuda", 4, 8)
    with pytest.warns(UserWarning, match=f"no kernels run on cuda:0 .*{reason}"):
        assert backends.backend_of(x) is in_torch
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.backend_of(x) is in_torch


def test_a_gpu_without_triton_takes_the_path_in_torch_and_names_the_remedy(gpu, monkeypatch):
    gpu(9, 0)
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="pip install triton"):
        assert backends.backend_of(on("cuda", 4, 8)) is in_torch


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_newer_nvidia_gpus_run_the_kernels(gpu, capability):
    pytest.importorskip("triton")
    gpu(*capability)
    assert backends.backend_of(on("cuda", 4, 8)).__name__ == "cce_kernels.backends.with_triton"


def test_a_cpu_runs_torch_without_a_word(gpu):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.backend_of(torch.zeros(1)) is in_torch


def test_a_device_that_nobody_has_tried_is_refused_with_a_remedy():
    e, c, targets = on("mps", 4, 8), on("mps", 10, 8), on("mps", 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^e: is on mps:0; .* Move e, c and targets to the CPU"):
        linear_cross_entropy(e, c, targets)


OPTIONS = {
    "plain": {},
    "everything": {"softcap": 20.0, "label_smoothing": 0.1, "z_loss": 1e-3, "logit_scale": 1.3},
    "filter": {"filter_eps": 2.0**-10},
    "unbiased": {"filter_eps": 2.0**-10, "filter_unbiased": True, "filter_mass": 0.5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_path_in_torch_never_asks_a_device_for_values(options):
    """A tensor on meta raises at an operation that has to wait for values (nonzero, item)."""
    o = Options(**options)
    e, c = (torch.empty(n, 64, device="meta", dtype=torch.bfloat16) for n in (300, 2000))
    bias, lse = torch.empty(2000, device="meta"), torch.empty(300, device="meta")
    columns, _ = in_torch.find_targets(e, c, bias, torch.zeros(300, device="meta", dtype=torch.int64), -100, o)
    rows = in_torch.forward(e, c, bias, columns, True, o)
    dtypes = (torch.bfloat16, torch.bfloat16, torch.float32)
    grads = in_torch.backward(Operands(e, c, bias, columns, lse, lse, lse), 512, o, dtypes, None, None)
    assert rows.lse.shape == (300,)
    assert [grad.shape for grad in grads] == [(300, 64), (2000, 64), (2000,)]
    with pytest.raises(NotImplementedError, match="nonzero"):
        torch.nonzero(lse)


WITHOUT = """
import sys
from types import ModuleType
import pytest
from cases import BF16, Case
import triton.experimental.gluon.language.nvidia.hopper  # Triton itself may need it
import triton.language.extra.cuda
sys.modules["triton.language.extra.cuda"] = ModuleType("triton.language.extra.cuda")  # one that has no names
sys.modules["triton.experimental.gluon.language.nvidia.hopper"] = None  # the import of it fails
from compiling import LARGE, PLAIN, Plan, launch_all
plan = Plan(90, {"plain": lambda: launch_all(Case("plain", dtype=BF16, **PLAIN), rows=128)}, LARGE)
names = {launch.name for launch in plan.launches["plain"]}
assert "exponentials_kernel" in names and "hopper_exponentials_kernel" not in names, sorted(names)
ptx = {launch.name: kernel.asm["ptx"] for launch, kernel in plan.compile("plain")}
assert set(ptx) == {"exponentials_kernel", "product_kernel"}
assert "griddepcontrol" not in ptx["product_kernel"]
"""


def test_a_triton_without_gluon_and_dependent_launches_runs_the_plain_kernels():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=KERNEL_TESTS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
