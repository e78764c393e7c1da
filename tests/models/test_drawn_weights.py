"""Initial weights have the distribution of those that FLA's own constructor draws, parameter by parameter."""

import math
import re

import pytest
import torch
from torch import Tensor

from linrnn.config import load_config
from linrnn.config.fla import fla_models
from linrnn.core.errors import LinrnnError
from linrnn.models import build_model, cpu_ops
from linrnn.models.architecture import MODELS, Architecture, resolve
from linrnn.models.build import RowShard
from linrnn.models.fla_any import build_hf

UNLIKELY = 5.5  # standard errors: one in thirty million


def architecture(*overrides: str) -> Architecture:
    config = load_config([*overrides, "size.tie_embeddings=false"])
    return resolve(config.model, config.size, 512)


def constructed(arch: Architecture, seed: int) -> dict[str, Tensor]:
    """The parameters of a model that FLA's constructor made as a whole."""
    torch.manual_seed(seed)
    return dict(build_hf(arch.kind, arch.settings, "cpu").named_parameters())


def by_kind(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values of the parameters that have one name but for the number of their block."""
    found: dict[str, list[Tensor]] = {}
    for name, parameter in parameters.items():
        found.setdefault(re.sub(r"\.\d+\.", ".N.", name, count=1), []).append(parameter.detach().double().flatten())
    return {name: torch.cat(values) for name, values in found.items()}


def compare(arch: Architecture) -> None:
    """Compare constants exactly, and random values by mean, standard deviation and their whole distribution."""
    ours, theirs = dict(build_model(arch, device="cpu", seed=3).hf.named_parameters()), constructed(arch, 4)
    again = constructed(arch, 5)
    assert ours.keys() == theirs.keys()
    drawn = []
    for name, tensor in theirs.items():
        own = ours[name]
        assert (own.shape, own.dtype, own.requires_grad) == (tensor.shape, tensor.dtype, tensor.requires_grad), name
        assert hasattr(own, "_no_weight_decay") == hasattr(tensor, "_no_weight_decay"), name
        if torch.equal(tensor, again[name]):
            assert torch.equal(own, tensor), name
        else:
            drawn.append(name)
    assert len({ours[name].flatten()[0].item() for name in drawn}) == len(drawn), "each part has its own numbers"
    values, expected = (by_kind({name: all_of[name] for name in drawn}) for all_of in (ours, theirs))
    for name, a in values.items():
        b, n = expected[name], len(a)
        kurtosis = (((b - b.mean()) / b.std()) ** 4).mean().item()
        if n >= 100:
            assert abs(a.mean() - b.mean()) < UNLIKELY * b.std() * math.sqrt(2 / n), name
            assert abs(a.std() / b.std() - 1) < UNLIKELY * math.sqrt((kurtosis - 1) / (2 * n)), name
        # Kolmogorov and Smirnov: the largest distance between the two distribution functions, at 65,536 values or all
        in_order = [one.sort().values for one in (a, b)]
        both = torch.cat([one[:: max(n // 65536, 1)] for one in in_order])
        shares = [torch.searchsorted(one, both, right=True) / n for one in in_order]
        assert (shares[0] - shares[1]).abs().max() < UNLIKELY / 2 * math.sqrt(2 / n), name


@pytest.mark.parametrize("model", MODELS)
def test_the_four_models_are_drawn_as_fla_draws_them(model):
    compare(architecture(f"model={model}", "size.num_layers=26"))


@pytest.mark.parametrize("name", sorted(fla_models()))
def test_any_model_of_fla_is_drawn_as_fla_draws_it(name, monkeypatch):
    """Logarithms of random numbers, constants, rescaled, orthogonal and zero matrices, vectors that differ by layer."""
    monkeypatch.setattr(cpu_ops, "check_model", lambda kind: None)  # most have no CPU form, and none runs here
    try:
        arch = architecture("model=fla", f"model.config={name}")
    except LinrnnError as error:
        pytest.skip(error.cause)
    compare(arch)


@pytest.mark.parametrize("options", [["use_short_conv=true"], ["initializer_range=0.1"]])
def test_options_of_fla_that_change_the_initial_weights_do(options):
    compare(architecture("model=fla", "model.config=gla", *(f"+model.options.{option}" for option in options)))


def test_buffers_hold_what_fla_s_constructor_gives_them(monkeypatch):
    monkeypatch.setattr(cpu_ops, "check_model", lambda kind: None)
    for name, count in (("transformer", 2), ("retnet", 2), ("mamba3", 2)):
        arch = architecture("model=fla", f"model.config={name}")
        ours = dict(build_model(arch, device="cpu").hf.named_buffers())
        theirs = dict(build_hf(arch.kind, arch.settings, "cpu").named_buffers())
        assert ours.keys() == theirs.keys()
        assert len(ours) == count
        assert all(torch.equal(buffer, theirs[key]) for key, buffer in ours.items())


@pytest.mark.parametrize("rows", [1, 3, 8, 9])
def test_parts_are_cut_like_torch_chunk(rows):
    whole = torch.arange(2 * rows).view(rows, 2)
    chunks = [*torch.chunk(whole, 4), *[whole[:0]] * 4][:4]
    assert all(torch.equal(RowShard(index, 4).of(whole), chunk) for index, chunk in enumerate(chunks))
