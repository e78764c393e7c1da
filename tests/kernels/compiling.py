"""Launches that compile kernels for a device that does not exist, and run nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from cases import BF16, Case, draw
from cce_kernels.row_math import Operands
from cce_kernels.runtime.launch import kind_of
from cce_kernels.runtime.tiles import SHORT, Row
from cce_kernels.triton import hopper
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

PLAIN = {"shape": (256,), "dim": 512, "vocab": 1024, "ignored": 0}
EVERYTHING = {"softcap": 20.0, "logit_scale": 2.0, "label_smoothing": 0.1, "workspace_mib": 1.5}
LARGE = ("exponentials_kernel", "gradient_kernel", "product_kernel")  # those that the table of tiles is for
RESERVED = 1024  # bytes of a multiprocessor's shared memory that every program on it takes besides its own


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


@dataclass(eq=False)
class Launch:
    """A launch that nothing ran: its kernel, arguments and options."""

    kernel: jit.JITFunction
    args: tuple
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def full_precision(self) -> bool:
        """Whether an operand that comes through a descriptor is fp32."""
        return any(x.base.dtype == torch.float32 for x in self.args if hasattr(x, "block_shape"))

    def paths(self) -> Iterator[tuple]:
        """The parts of the kernel's code that the arguments choose, each together with the tile.

        The tile decides about shared memory first. The block of the first operand, warps and stages tell tiles apart.
        An argument that is None chooses no code. Any other argument chooses code by what Triton specialises on.
        """
        options = dict(self.options)
        overlaps = options.pop("launch_pdl", False)  # for the driver alone
        operand = next((tuple(x.block_shape) for x in self.args if hasattr(x, "block_shape")), ())
        tile = (self.name, *options.items(), operand)
        yield tile
        yield self.name, "launch_pdl", overlaps
        for param, x in zip(self.kernel.params, self.args, strict=False):
            if param.is_constexpr:
                yield tile, param.name, x
            elif x is not None:
                yield tile, param.name, kind_of(x, param.do_not_specialize)

    def value(self, name: str) -> Any:
        """The argument of a parameter."""
        return self.args[[param.name for param in self.kernel.params].index(name)]

    def compile(self) -> Any:
        """The CompiledKernel for the device of :func:`pretend`."""
        return self.kernel.run(*self.args, grid=(1,), warmup=True, **self.options)


def pretend(monkeypatch: pytest.MonkeyPatch, capability: int) -> list[Launch]:
    """From now on launches are those for a device of this compute capability. They run nothing.

    Returns:
        a list that the launches extend.
    """
    launches: list[Launch] = []
    monkeypatch.setattr(hopper, "known_version", lambda: True)
    monkeypatch.setattr(driver, "_active", Driver(capability))

    def record(self, *args, grid, warmup, **options):
        launches.append(Launch(self, args, options))

    monkeypatch.setattr(jit.JITFunction, "run", record)
    return launches


def worth_compiling(launches: Iterable[Launch]) -> list[Launch]:
    """Launches that together take every path which any of the launches takes.

    A launch that is left out would compile the same code for the same tile again, in another combination. So a new
    option of a kernel adds the compilation of its own code, not of every combination.
    """
    left = [(launch, set(launch.paths())) for launch in launches]
    chosen = []
    while left:
        launch, taken = max(left, key=lambda each: len(each[1]))
        chosen.append(launch)
        left = [(each, paths - taken) for each, paths in left if paths - taken]
    return chosen


class Plan:
    """What cases launch on a device of a compute capability, and which of these launches are compiled.

    Args:
        cases: the functions that launch.
        names: the kernels that may be compiled. None: all.
    """

    def __init__(
        self, capability: int, cases: dict[str, Callable[[], None]], names: Iterable[str] | None = None
    ) -> None:
        self.capability = capability
        self.launches: dict[str, list[Launch]] = {}
        for name, launch in cases.items():
            with pytest.MonkeyPatch.context() as patch:
                self.launches[name] = pretend(patch, capability)
                launch()
        every = [launch for launches in self.launches.values() for launch in launches]
        self.candidates = [launch for launch in every if names is None or launch.name in names]
        self.chosen = worth_compiling(self.candidates)

    def compile(self, case: str) -> list[tuple[Launch, Any]]:
        """The launches of a case that are worth compiling, each with its CompiledKernel."""
        chosen = [launch for launch in self.launches[case] if launch in self.chosen]
        with pytest.MonkeyPatch.context() as patch:
            run = jit.JITFunction.run
            pretend(patch, self.capability)
            patch.setattr(jit.JITFunction, "run", run)
            return [(launch, launch.compile()) for launch in chosen]


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
    from cce_kernels.filter.rule import FilterStats
    from cce_kernels.options import Options
    from cce_kernels.several_targets import Several

    e, c, targets, bias = draw(case, "cpu")
    several = added = None
    if case.several:
        several, added = Several(targets, torch.ones(targets.shape)), (targets, torch.ones(targets.shape))
        targets = targets[:, 0].contiguous()
    e, c, options = (
        with_triton.prepare(e.detach(), e.dtype),
        with_triton.prepare(c.detach(), c.dtype),
        Options(**case.options),
    )
    bias = None if bias is None else bias.detach()
    columns, z_target = with_triton.find_targets(e, c, bias, targets, -100, options)
    if several is not None:
        with_triton.logits_at(e, c, bias, several.columns, options)
    ones = torch.ones(e.shape[0])
    dtypes = dtypes or (e.dtype, c.dtype, None if bias is None else bias.dtype)
    if rows:
        stored = with_triton.three_products
        weights = ones if weighted else None
        _, held, sums = stored.forward(
            e, c, columns, rows, dtypes, with_metrics, options, z_target=z_target, with_lse=with_lse, weights=weights,
            bias=bias, skip=skip, several=several,
        )  # fmt: skip
        upstream = (ones, ones) if with_lse else (ones[0], None)
        stored.backward(
            e, c, targets, upstream[0], rows, held, sums, None, options, grad_lse=upstream[1], weights=weights,
            several=several,
        )  # fmt: skip
        _, counted = with_triton.reduce_loss(ones, columns, "mean", weights)
        with_triton.mean_gradient(ones[0], counted)
        return
    with_triton.forward(e, c, bias, columns, with_metrics, options, z_target)
    stats = FilterStats(FilterStats.empty(e.device), c.shape[0])
    a, b = with_triton.row_coefficients(ones, ones[:1].expand(len(ones)), ones, columns, options, ones)
    with_triton.backward(Operands(e, c, bias, targets, ones, a, b), 512, options, dtypes, None, stats, added=added)


def launch_lists(dtype, unbiased: bool, mass: float | None, **case: Any) -> None:
    """As `launch_all`, for a filter that uses lists; gradients have `dtype`."""
    from cce_kernels.backends import with_triton
    from cce_kernels.filter.rule import FilterStats
    from cce_kernels.options import Options

    o = Options(filter_eps=2.0**-10, filter_unbiased=unbiased, filter_mass=mass)
    e, c, targets, _ = draw(Case("lists", dtype=BF16, **PLAIN | {"dim": 2304, "vocab": 8192} | case), "cpu")
    e, c, ones = e.detach(), c.detach(), torch.ones(e.shape[0])
    state = with_triton.select.forward(e, c, targets, 8000, False, o)[1]
    if unbiased:  # nothing has run that would have ranked and drawn
        lists = with_triton.select.Lists.of(state)
        for x in (lists.rank, lists.likely, lists.sample.columns, lists.sample.rows):
            x.zero_()
    stats = FilterStats(FilterStats.empty(e.device), c.shape[0])
    operands = Operands(e, c, None, targets, ones, ones, ones)
    with_triton.gather.backward(operands, state, 4096, o, (dtype, dtype), None, stats)


# With every tile of a row of the table (runtime/tiles.py).
# dC's products have upright tiles at D = 1152, deep ones with 1024 rows, and shallow ones otherwise.
SHORT_ROWS = Case("short", dtype=BF16, **PLAIN)
_FILTERED = Case("filtered", dtype=BF16, bias=True, **PLAIN, options={"filter_eps": 2**-8, "filter_c": False})
_SOFTCAP = Case("softcap", dtype=BF16, **PLAIN | {"dim": 2048, "shape": (1024,)}, options={"softcap": 20.0})
_EVERY_OPTION = Case("every_option", dtype=BF16, bias=True, **PLAIN | {"dim": 1152}, options=EVERYTHING)
OF_THE_TABLE: dict[str, Callable[[], None]] = {
    "recomputed": partial(launch_all, _EVERY_OPTION, with_metrics=True),
    "filtered": partial(launch_all, _FILTERED),
    "stored": partial(launch_all, _SOFTCAP, rows=1024, with_metrics=True),
    "stored-short": partial(launch_all, SHORT_ROWS, rows=128, with_metrics=True),
}


def check_resources(launch: Launch, kernel: Any, shared_bytes: int, row: Row) -> None:
    """The kernel was compiled to the end. The shared memory that a program may have holds as many programs as stay on
    a multiprocessor with this row of the table."""
    name, resident = launch.name, 1
    if name == "exponentials_kernel" and not launch.full_precision and launch.value("e_desc").base.shape[1] <= SHORT:
        resident = row.short_logits.resident
    assert kernel.asm["cubin"], name
    assert kernel.metadata.shared <= (shared_bytes + RESERVED) // resident - RESERVED, (name, kernel.metadata.shared)
