"""Launches that compile kernels for a device that does not exist, and run nothing."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from cases import BF16, Case, draw
from cce_kernels.kernels import hopper
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

PLAIN = {"shape": (256,), "dim": 512, "vocab": 1024, "ignored": 0}
EVERYTHING = {"softcap": 20.0, "logit_scale": 2.0, "label_smoothing": 0.1, "workspace_mib": 1.5}


class Driver:
    """The part of a driver that compiling without a device needs."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability  # kernels are cached by device

    def get_current_stream(self, device):
        return 0


def compile_only(
    monkeypatch: pytest.MonkeyPatch, capability: int, names: Collection[str] | None = None
) -> list[tuple[str, Any]]:
    """From now on launches of the named kernels (None: all) compile for a compute capability; others do nothing.

    Returns:
        a list of (name, CompiledKernel) that launches extend.
    """
    kernels: list[tuple[str, Any]] = []
    run = jit.JITFunction.run

    def compile_one(self, *args, grid, warmup, **options):
        if names is None or self.__name__ in names:
            kernels.append((self.__name__, run(self, *args, grid=grid, warmup=True, **options)))

    monkeypatch.setattr(jit.JITFunction, "run", compile_one)
    monkeypatch.setattr(hopper, "TRITONS", ("",))  # every version's
    monkeypatch.setattr(driver, "_active", Driver(capability))
    return kernels


def launch_all(
    case: Case, dtypes=None, rows: int = 0, with_metrics: bool = False, with_lse: bool = False,
    weighted: bool = False, skip: bool = False,
) -> None:  # fmt: skip
    """Launch the kernels of a case's forward and backward pass, with stored exponentials of `rows` per chunk if given.

    weighted: the rows' losses have weights. skip: ignored rows are left out. Both need `rows`.
    with_lse: each row has gradients of its own, also its log-sum-exp. Needs `rows`, one chunk.

    Nothing runs, so the tensors' values are meaningless.
    """
    from cce_kernels.backends import with_triton
    from cce_kernels.filter_rule import FilterStats
    from cce_kernels.options import Options

    e, c, targets, bias = draw(case, "cpu")
    e, c, options = with_triton.prepare(e.detach()), with_triton.prepare(c.detach()), Options(**case.options)
    bias = None if bias is None else bias.detach()
    with_triton.target_columns(targets, -100, c.shape[0])
    columns, z_target = with_triton.find_targets(e, c, bias, targets, -100, options)
    ones = torch.ones(e.shape[0])
    dtypes = dtypes or (e.dtype, c.dtype, None if bias is None else bias.dtype)
    if rows:
        stored = with_triton.three_products
        weights = ones if weighted else None
        state = stored.forward(
            e, c, columns, rows, dtypes, with_metrics, options, z_target=z_target, with_lse=with_lse, weights=weights,
            bias=bias, skip=skip,
        )[1]  # fmt: skip
        upstream = (ones, ones) if with_lse else (ones[0], None)
        stored.backward(e, c, targets, upstream[0], rows, state, None, options, grad_lse=upstream[1], weights=weights)
        with_triton.reduce_loss(ones, columns, "mean", weights)
        return
    with_triton.forward(e, c, bias, columns, with_metrics, options, z_target)
    stats = FilterStats(FilterStats.empty(e.device), with_triton.filter_figures, c.shape[0])
    a, b = with_triton.row_coefficients(ones, ones[:1].expand(len(ones)), ones, columns, options)
    with_triton.backward(e, c, bias, targets, ones, a, b, 512, options, dtypes, None, stats)


def launch_lists(dtype, unbiased: bool, mass: float | None, **case: Any) -> None:
    """As `launch_all`, for a filter that uses lists; gradients have `dtype`."""
    from cce_kernels.backends import with_triton
    from cce_kernels.filter_rule import FilterStats
    from cce_kernels.options import Options

    o = Options(filter_eps=2.0**-10, filter_unbiased=unbiased, filter_mass=mass)
    e, c, targets, _ = draw(Case("lists", dtype=BF16, **PLAIN | {"dim": 2304, "vocab": 8192} | case), "cpu")
    e, c, ones = e.detach(), c.detach(), torch.ones(e.shape[0])
    state = with_triton.select.forward(e, c, targets, 8000, False, o)[1]
    if unbiased:  # nothing has run that would have ranked and drawn
        lists = with_triton.select.Lists.of(state)
        for x in (lists.rank, lists.likely, lists.sample.columns, lists.sample.rows):
            x.zero_()
    stats = FilterStats(FilterStats.empty(e.device), with_triton.filter_figures, c.shape[0])
    with_triton.gather.backward(e, c, targets, ones, ones, ones, state, 4096, o, (dtype, dtype), None, stats)
