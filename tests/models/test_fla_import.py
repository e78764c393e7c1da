"""One module of FLA comes without the others, and all others are there when somebody asks for them."""

import subprocess
import sys

LAZY = """
import gc
gc.disable()  # imports leave no garbage, and looking for it takes two seconds
import sys
import torch
from linrnn.models.fla_import import import_fla

compile = torch.compile
gla = import_fla("fla.models.gla")
assert torch.compile is compile
print("fla.models.rwkv7" in sys.modules, "torch._inductor.compile_fx" in sys.modules)
print([name for name in ("scipy", "torchao", "sklearn", "torchvision") if name in sys.modules])

import fla
from fla.modules.activations import sqrelu_fwd
print(fla.__version__, fla.models.gla is gla)
print(sqrelu_fwd.__name__, "torch._inductor.compile_fx" in sys.modules)
torch._dynamo.config.disable = True
print(sqrelu_fwd(torch.tensor([-1.0, 3.0])).tolist())

from fla.models import RWKV7Config
print(RWKV7Config.model_type, fla.models.GLAConfig is gla.GLAConfig, fla.RWKV7Attention.__name__)
print(hasattr(fla.layers, "no_such_layer"), len(fla.ops.__all__) > 50)
"""


def test_one_model_is_imported_and_the_others_when_they_are_named() -> None:
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=True)
    assert "torchao" not in done.stderr, "transformers imports it, and no float8 was asked for"
    assert "Enum subclass" not in done.stderr, "so warns torch 2.13 of torchao"
    assert done.stdout.splitlines() == [
        "False False",
        "[]",
        "0.6.0 True",
        "sqrelu_fwd False",
        "[0.0, 9.0]",
        "rwkv7 True RWKV7Attention",
        "False True",
    ]
