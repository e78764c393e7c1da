"""Tests that run on CPU tensors, blockwise and by the kernels in Triton's interpreter, and on a GPU."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from triton_interpreter import MARKS

_ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
PLACES = {"cpu": ("cpu", []), "interpreter": ("cpu", MARKS), "cuda": ("cuda", _ON_GPU)}

devices = pytest.mark.parametrize(
    "device", [pytest.param(device, marks=marks, id=place) for place, (device, marks) in PLACES.items()]
)


kernels = pytest.mark.parametrize(
    "device", [pytest.param(PLACES[name][0], marks=PLACES[name][1], id=name) for name in ("interpreter", "cuda")]
)  # of the tests that only the Triton kernels pass


def devices_with(
    name: str, values: Sequence[Any], interpreted: Sequence[Any], ids: Callable[[Any], str] = str
) -> pytest.MarkDecorator:
    """`devices` crossed with `values` of a second parameter. The interpreter takes only `interpreted`.

    The interpreter needs a second or more per case.
    """
    cases = [
        pytest.param(device, value, marks=marks, id=f"{place}-{ids(value)}")
        for place, (device, marks) in PLACES.items()
        for value in (interpreted if place == "interpreter" else values)
    ]
    return pytest.mark.parametrize(("device", name), cases)
