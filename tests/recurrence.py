"""Does FLA's recurrent kernel compute on this GPU what plain torch computes? Outputs and gradients, side by side.

Triton has compiled some of FLA's kernels wrongly, and no error said so: `linrnn.models.tuning.exclusions` names one.
A model trains with such gradients, and its loss falls.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from benchmarks.problems import without_tf32
from linrnn.config.schema import Config
from linrnn.core.errors import UnsupportedError
from linrnn.core.tables import Table
from linrnn.models import build_model, check_supported, tuning
from linrnn.models.architecture import resolve
from linrnn.models.facts import facts_of
from linrnn.models.fla_import import calling, import_fla
from linrnn.training.runtime import device_name

N_SEQUENCES, LENGTH, VOCAB_SIZE = 2, 300, 96  # the last chunk is not full
# Largest relative error that rounding to bf16 explains. On Hopper GPUs it was up to 0.012 (results/log/2026-11-28.md).
ROUNDING = 0.03
IN_BF16 = ("q", "k", "v")  # on a CPU some of them are in fp32


@dataclass(frozen=True)
class Agreement:
    """How far a recurrence in bf16 is from plain torch in fp32.

    Attributes:
        what: model, size, GPU and version of Triton.
        errors: relative error, |found - expected| / |expected|, of the output and of each gradient, by name.
    """

    what: str
    errors: dict[str, float]

    @property
    def holds(self) -> bool:
        """Whether rounding explains every error. A NaN is no agreement."""
        return all(error < ROUNDING for error in self.errors.values())

    def markdown(self) -> str:
        """The comparison as a table, a line for the output and for each gradient."""
        rows = [[name, f"{error:.1e}", "yes" if error < ROUNDING else "**no**"] for name, error in self.errors.items()]
        columns = "bf16 against fp32", "relative error", f"below {ROUNDING}"
        table = Table(columns, rows, words=(columns[0], columns[2])).markdown()
        return "\n".join([f"{self.what}, {N_SEQUENCES} x {LENGTH} tokens", "", *table])


@dataclass(frozen=True)
class Call:
    """A call of a recurrence.

    Attributes:
        function: as FLA's layer calls it.
        plain: its plain-torch form.
        arguments: by name: q, k (B, T, H, K), v (B, T, H, V), and further ones of the model.
    """

    function: Callable[..., Any]
    plain: Callable[..., Any]
    arguments: dict[str, Any]


def measure(config: Config, device: torch.device) -> Agreement:
    """Compare the recurrence of `config.model` at `config.size` with its plain-torch form, for random weights.

    FLA's kernels run in the configurations of training, as `trainer.kernel_choices` says.

    Raises:
        UnsupportedError: the model has no recurrence with a plain-torch form, or cannot run on this device.
    """
    tuning.use(config.trainer.kernel_choices)
    call = call_of_the_mixer(config, device)
    arguments = call.arguments | {name: call.arguments[name].bfloat16() for name in IN_BF16}
    exact = {name: value.float() if _is_real(value) else value for name, value in arguments.items()}
    found = outputs_and_gradients(call.function, arguments)
    with without_tf32():
        expected = outputs_and_gradients(call.plain, exact)
    errors = {
        name: ((found[name].double() - value).norm() / value.double().norm()).item() for name, value in expected.items()
    }
    triton = f", Triton {version('triton')}" if device.type == "cuda" else ""
    return Agreement(f"{config.model.label} {config.size.name} on {device_name(device)}{triton}", errors)


def call_of_the_mixer(config: Config, device: torch.device) -> Call:
    """The recurrence as FLA's first layer calls it, for random weights and tokens.

    Raises:
        UnsupportedError: as for :func:`measure`.
    """
    check_supported(config.model, device)
    size = replace(config.size, num_layers=1)
    architecture = resolve(replace(config.model, chunk_size=None), size, VOCAB_SIZE)
    facts = facts_of(architecture.kind)
    model = build_model(architecture, device=device, seed=config.seed)
    [mixer] = model.mixers
    fla, calls = import_fla(type(mixer).__module__), list[Call]()
    recorded = {
        name: _recorded(getattr(fla, name), plain, calls)
        for (module, name), plain in (facts.cpu or {}).items()
        if module == fla.__name__
    }
    mixer.forward = MethodType(calling(type(mixer).forward, recorded), mixer)  # type: ignore[method-assign]
    ids = torch.randint(VOCAB_SIZE, (N_SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(config.seed))
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        model(ids.to(device))
    if not calls:
        raise UnsupportedError(
            f"the first layer of {config.model.label} calls no recurrence that has a plain-torch form",
            "choose model=gla, gated_deltanet or kda, or model=fla model.config=delta_net",
        )
    call = calls[0]
    if config.model.chunk_size is not None:
        assert facts.chunks is not None  # otherwise no chunk size can be set
        kernel = functools.partial(facts.chunks.own or call.function, chunk_size=config.model.chunk_size)
        call = replace(call, function=kernel)
    return call


def _recorded(function: Callable[..., Any], plain: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    """`function`, which notes each call that has queries, keys and values."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.keys() >= set(IN_BF16):
            calls.append(Call(function, plain, kwargs))
        return function(*args, **kwargs)

    return call


def outputs_and_gradients(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Tensor]:
    """By name: the output, and the gradient of every tensor with real numbers, for a random gradient of the output."""
    real = {name: value.detach().clone().requires_grad_() for name, value in arguments.items() if _is_real(value)}
    output = function(**{**arguments, **real})[0]
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
    output.backward(gradient)
    gradients = {name: value.grad for name, value in real.items() if value.grad is not None}
    return {"output": output.detach(), **{f"gradient of {name}": gradient for name, gradient in gradients.items()}}


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
