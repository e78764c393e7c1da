"""Launches that compile kernels for a device that does not exist, and run nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from cases import BF16, Case, draw
from cce_kernels import backends, linear_cross_entropy, linear_log_probs, planner
from cce_kernels.backends import with_triton
from cce_kernels.runtime.launch import kind_of
from cce_kernels.runtime.tiles import SHORT, Row
from cce_kernels.triton import hopper
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

PLAIN = {"shape": (256,), "dim": 512, "vocab": 1024, "ignored": 0}
EVERYTHING = {"softcap": 20.0, "logit_scale": 2.0, "label_smoothing": 0.1, "workspace_mib": 1.5}
LARGE = ("exponentials_kernel", "gradient_kernel", "product_kernel")  # those that the table of tiles is for
STREAM = 7
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
        return STREAM


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


def zeroed(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """New memory holds zeros: no kernel runs that would write indices."""
    return lambda *args, **options: function(*args, **options).zero_()


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
    case: Case, dtypes=None, rows: int = 0, unweighted: bool = True, entropies: bool = False, skip: bool = False,
    **options: Any,
) -> None:  # fmt: skip
    """Launch the kernels of a call and of its backward pass: three products in chunks of `rows`, or four for 0.

    dtypes: of e and c, if they are not those of the products. skip: ignored rows are left out. Nothing runs, so that
    the values are meaningless.
    """
    if dtypes:
        case = replace(case, dtype=dtypes[0], dtype_c=dtypes[1])
    e, c, targets, bias = draw(case, "cpu")
    options |= {"bias": bias, **case.options}
    if not unweighted:
        options["token_weights"] = torch.ones(targets.shape)
    if case.several:
        options["target_weights"] = torch.ones(targets.shape)
    function = linear_cross_entropy
    if entropies:
        function, options["return_entropy"] = linear_log_probs, True
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", BF16, enabled=bool(dtypes)):
        patch.setattr(backends, "_backend_on", lambda device: with_triton)
        for place, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(place, name, zeroed(getattr(place, name)))
        patch.setattr(planner, "LEAST_SKIPPED", 0 if skip else 2**60)
        if "filter_unbiased" not in options:
            patch.setattr(with_triton, "plan", lambda *_: planner.Plan(rows, 512))
        found = function(e, c, targets, **options)
        found = found if isinstance(found, tuple) else (found,)
        sum(x.sum() for x in found if isinstance(x, torch.Tensor)).backward()


def launch_lists(dtype, unbiased: bool, mass: float | None) -> None:
    """As `launch_all`, for a filter that uses lists; gradients have `dtype`."""
    case = Case("lists", dtype=BF16, **PLAIN | {"dim": 2304, "vocab": 8192})
    options = {"filter_eps": 2.0**-10, "filter_unbiased": unbiased, "filter_mass": mass, "return_stats": True}
    launch_all(case, (dtype, dtype), **options)


# With every tile of a row of the table (runtime/tiles.py).
# dC's products have upright tiles at D = 1152, deep ones with 1024 rows, and shallow ones otherwise.
SHORT_ROWS = Case("short", dtype=BF16, **PLAIN)
_FILTERED = Case("filtered", dtype=BF16, bias=True, **PLAIN, options={"filter_eps": 2**-8, "filter_c": False})
_SOFTCAP = Case("softcap", dtype=BF16, **PLAIN | {"dim": 2048, "shape": (1024,)}, options={"softcap": 20.0})
_EVERY_OPTION = Case("every_option", dtype=BF16, bias=True, **PLAIN | {"dim": 1152}, options=EVERYTHING)
OF_TABLE: dict[str, Callable[[], None]] = {
    "recomputed": partial(launch_all, _EVERY_OPTION, return_metrics=True),
    "filtered": partial(launch_all, _FILTERED),
    "stored": partial(launch_all, _SOFTCAP, rows=1024, return_metrics=True),
    "stored-short": partial(launch_all, SHORT_ROWS, rows=128, return_metrics=True),
}


def check_resources(launch: Launch, kernel: Any, shared_bytes: int, row: Row) -> None:
    """The kernel was compiled to the end. The shared memory that a program may have holds as many programs as stay on
    a multiprocessor with this row of the table."""
    name, resident = launch.name, 1
    if name == "exponentials_kernel" and not launch.full_precision and launch.value("e_desc").base.shape[1] <= SHORT:
        resident = row.short_logits.resident
    assert kernel.asm["cubin"], name
    assert kernel.metadata.shared <= (shared_bytes + RESERVED) // resident - RESERVED, (name, kernel.metadata.shared)
