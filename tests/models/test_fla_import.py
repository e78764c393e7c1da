"""One module of FLA comes without the others, which are there when somebody asks for them. No function is replaced."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc
gc.disable()  # imports leave no garbage, and looking for it takes two seconds
import sys
import torch
from triton.runtime import Autotuner, JITFunction

def functions():
    owners = torch, torch.Tensor, torch.compiler, Autotuner, JITFunction
    return {(owner, name): value for owner in owners for name, value in vars(owner).items() if callable(value)}

def replaced():
    return [name for name, value in functions().items() if name in before and value is not before[name]]

before = functions()
del before[torch, "manual_seed"]  # torch._dynamo changes it, as it is imported
from linrnn.config import load_config
from linrnn.models import cpu_ops, tuning
from linrnn.models.architecture import resolve
from linrnn.models.fla_import import import_fla

config = load_config([])
resolve(config.model, config.size, 512)  # as every plan of a run
cpu_ops.prepare("gla", torch.device("cpu"))
print(replaced(), "torch._inductor.compile_fx" in sys.modules and not torch.cuda.is_available())

gla = import_fla("fla.models.gla")
print("fla.models.rwkv7" in sys.modules)
print([name for name in ("scipy", "torchao", "sklearn", "torchvision") if name in sys.modules])

import fla
print(fla.__version__, fla.models.gla is gla)
from fla.models import RWKV7Config
print(RWKV7Config.model_type, fla.models.GLAConfig is gla.GLAConfig, fla.RWKV7Attention.__name__)
print(hasattr(fla.layers, "no_such_layer"), len(fla.ops.__all__) > 50)

tuning.use("first")
with tuning.compile_ahead():
    print(replaced())
"""


@pytest.fixture(scope="module")
def done() -> subprocess.CompletedProcess[str]:
    """The program in a new interpreter."""
    return subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)


def test_a_model_on_a_cpu_does_not_wait_for_torch_s_compiler(done):
    assert done.stdout.splitlines()[0].endswith(" False")


def test_no_function_of_torch_or_triton_is_replaced(done):
    """FLA's autotuners get settings. Their classes stay, and so does Triton's compiler."""
    lines = done.stdout.splitlines()
    assert lines[0].startswith("[] ")
    assert lines[-1] == "[]"


def test_one_model_is_imported_and_the_others_when_they_are_named(done):
    assert "torchao" not in done.stderr, "transformers imports it, and no float8 was asked for"
    assert "Enum subclass" not in done.stderr, "so warns torch 2.13 of torchao"
    assert done.stdout.splitlines()[1:-1] == ["False", "[]", "0.6.0 True", "rwkv7 True RWKV7Attention", "False True"]
