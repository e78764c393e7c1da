"""Recurrences in bf16 agree with plain torch in fp32: outputs and gradients, at every size of the study.

On a GPU FLA's kernels run in their stored configurations, or in their first. Triton has compiled some of them wrongly:
linrnn.models.tuning.exclusions names one whose gradients depended on the number of warps, although nothing failed.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import recurrence
import torch
from recurrence import Agreement, measure
from torch import Tensor

from linrnn.config import load_config
from linrnn.core.errors import UnsupportedError

MODELS = [
    *(f"model={name}" for name in ("gla", "gated_deltanet", "kda")),
    "model=fla model.config=delta_net",
]
ON_CPU = [("cpu", model, "smoke") for model in MODELS]
ON_GPU = [("cuda", model, size) for model in MODELS for size in ("smoke", "mve", "350m", "1b3")]


def measured(model: str, size: str, device: str) -> Agreement:
    overrides = [*model.split(), f"size={size}", f"device={device}", "trainer.kernel_choices=first"]
    return measure(load_config(overrides), torch.device(device))


@pytest.mark.parametrize(
    ("device", "model", "size"), [*ON_CPU, *(pytest.param(*case, marks=pytest.mark.gpu) for case in ON_GPU)]
)
def test_a_recurrence_in_bf16_is_that_of_plain_torch_in_fp32(device, model, size):
    try:
        found = measured(model, size, device)
    except UnsupportedError as error:
        pytest.skip(error.cause)
    print(found.markdown())
    assert {"output", *(f"gradient of {name}" for name in ("q", "k", "v"))} <= found.errors.keys()
    assert found.holds, found.markdown()
    assert device == "cuda" or all(error > 1e-4 for error in found.errors.values()), "bf16 and fp32 were compared"


def test_a_wrong_gradient_is_found(monkeypatch):
    right, passes = recurrence.outputs_and_gradients, []

    def wrong_at_first(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Tensor]:
        found = right(function, arguments)
        if not passes:
            found["gradient of k"] *= 1.05
        passes.append(1)
        return found

    monkeypatch.setattr(recurrence, "outputs_and_gradients", wrong_at_first)
    found = measured("model=gla", "smoke", "cpu")
    assert not found.holds
    assert [line.split(" | ")[0] for line in found.markdown().splitlines() if "**no**" in line] == ["| gradient of k"]
    assert not Agreement("a GPU", {"output": math.nan}).holds


@pytest.mark.parametrize("model", MODELS)
def test_plain_torch_runs_on_the_device_of_its_inputs(model, monkeypatch):
    right = recurrence.outputs_and_gradients

    def with_another_default(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Tensor]:
        def call(**given: Any) -> Any:
            with torch.device("meta"):
                return function(**given)

        return right(call, arguments)

    monkeypatch.setattr(recurrence, "outputs_and_gradients", with_another_default)
    assert measured(model, "smoke", "cpu").holds


def test_other_chunks_are_compared_too():
    assert measured("model=gla model.chunk_size=128", "smoke", "cpu").holds


@pytest.mark.parametrize("model", ["model=transformer", "model=fla model.config=delta_net model.attention_every=1"])
def test_attention_is_refused(model):
    with pytest.raises(UnsupportedError, match="calls no recurrence that has a plain-torch form"):
        measured(model, "smoke", "cpu")
