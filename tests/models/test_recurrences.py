"""Recurrences in 16 bits agree with plain torch in 32 bits: outputs and gradients, at every size of the study.

On a GPU FLA's kernels run in their stored configurations, or in their first. Triton has compiled some of them wrongly:
linrnn.models.tuning.exclusions names one whose gradients depended on the number of warps, although nothing failed.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from linrnn.config import load_config
from linrnn.core.errors import UnsupportedError
from linrnn.models import build_model, check_supported, cpu_ops, tuning
from linrnn.models.architecture import resolve
from linrnn.models.facts import facts_of
from linrnn.models.fla_import import import_fla

V, ROUNDING = 96, 3e-2
N_SEQUENCES, LENGTH = 2, 300  # the last chunk is not full
Call = tuple[Callable[..., Any], dict[str, Any]]
MODELS = [
    *(f"model={name}" for name in ("gla", "gated_deltanet", "kda")),
    *(f"model=fla model.config={name}" for name in ("delta_net", "hgrn2", "retnet")),
]
ON_CPU = [("cpu", model, "smoke") for model in MODELS]
ON_GPU = [("cuda", model, size) for model in MODELS for size in ("smoke", "mve", "350m", "1b3")]


def call_of_the_mixer(overrides: list[str], device: str, monkeypatch: pytest.MonkeyPatch) -> Call:
    """The function of the recurrence, as FLA's layer calls it, and the arguments of its first call."""
    config = load_config([*overrides, "size.num_layers=1", f"device={device}"])
    check_supported(config.model, torch.device(device))
    architecture = resolve(config.model, config.size, V)
    (module_name, name), *_ = facts_of(architecture.kind).cpu or {}
    model = build_model(architecture, device=device, seed=0)
    cpu_ops.install()  # on a GPU, too: `cpu_version` is what the kernels are compared with
    module = import_fla(module_name)
    function, calls = getattr(module, name), []

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append(dict(inspect.signature(function.cpu_version).bind(*args, **kwargs).arguments))
        return function(*args, **kwargs)

    ids = torch.randint(V, (N_SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0)).to(device)
    monkeypatch.setattr(module, name, record)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        model(ids)
    return function, calls[0]


def outputs_and_gradients(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Tensor]:
    """By name: the output, and the gradient of every tensor with real numbers for a random gradient of the output."""
    real = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and value.is_floating_point()}
    real = {name: value.detach().clone().requires_grad_() for name, value in real.items()}
    output = function(**{**arguments, **real})[0]
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
    output.backward(gradient)
    return {"output": output.detach(), **{name: value.grad for name, value in real.items() if value.grad is not None}}


@pytest.mark.parametrize(
    ("device", "model", "size"), [*ON_CPU, *(pytest.param(*case, marks=pytest.mark.gpu) for case in ON_GPU)]
)
def test_a_recurrence_in_bf16_is_that_of_plain_torch_in_fp32(
    device: str, model: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning.use("first")
    try:
        function, arguments = call_of_the_mixer([*model.split(), f"size={size}"], device, monkeypatch)
    except UnsupportedError as error:
        pytest.skip(error.cause)
    arguments |= {name: arguments[name].bfloat16() for name in ("q", "k", "v")}  # on a CPU some are in 32 bits
    found = outputs_and_gradients(function, arguments)
    exact = {
        name: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    expected = outputs_and_gradients(function.cpu_version, exact)
    assert found.keys() == expected.keys()
    assert {"q", "k", "v"} <= found.keys()
    for name, value in expected.items():
        error = (found[name].double() - value).norm() / value.norm()
        print(f"{model} {size}, {name}: {error:.1e}")
        assert error < ROUNDING, f"{name}: {error:.1e}"
