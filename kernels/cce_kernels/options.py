"""A call of the loss: its options, checked when they are made, its tensors, and everything else about it."""

from __future__ import annotations

import operator
from ast import literal_eval
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

MIB = 2**20
DEFAULT_WORKSPACE_MIB = 256
LEAST_EPS = 2.0**-126  # fp32's smallest normal number
ACCUMULATE = ("kahan", "fp32", "bf16")


class WorkspaceTooSmall(ValueError):
    """`workspace_mib` does not hold the narrowest vocabulary chunk of this shape; `least_mib` would."""

    def __init__(self, workspace_mib: float, least_mib: int) -> None:
        super().__init__(workspace_mib, least_mib)  # both arguments, so that the error can be pickled
        self.workspace_mib, self.least_mib = workspace_mib, least_mib

    def __str__(self) -> str:
        return f"workspace_mib: {self.workspace_mib:g} is too small for this shape; give at least {self.least_mib}"


@dataclass(frozen=True)
class Options:
    """How logits, loss and gradients are computed. `linear_cross_entropy` explains each field."""

    softcap: float | None = None
    logit_scale: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    filter_eps: float | None = None
    filter_unbiased: bool = False
    filter_mass: float | None = None
    filter_e: bool = True
    filter_c: bool = True
    filter_if_faster: bool = False
    accumulate: str = "kahan"
    workspace_mib: float | None = None

    def __post_init__(self) -> None:
        eps, mass = self.filter_eps, self.filter_mass
        for name, right, words in (
            ("softcap", self.softcap is None or 0 < self.softcap < inf, "must be positive and finite, or None"),
            ("logit_scale", -inf < self.logit_scale < inf, "must be finite"),
            ("label_smoothing", 0 <= self.label_smoothing <= 1, "must lie in [0, 1]"),
            ("z_loss", 0 <= self.z_loss < inf, "must be finite and not negative"),
            ("filter_eps", eps is None or LEAST_EPS <= eps < 1, "must lie in [2^-126, 1)"),
            ("filter_mass", mass is None or 0 < mass < 1, "must lie in [0, 1)"),
            ("accumulate", self.accumulate in ACCUMULATE, f"must be one of {', '.join(ACCUMULATE)}"),
            ("workspace_mib", self.workspace_mib is None or 0 < self.workspace_mib < inf,
             "must be positive and finite, or None"),
        ):  # fmt: skip
            if not right:
                raise ValueError(f"{name}: {words}, got {getattr(self, name)!r}")
        if eps is not None and self.label_smoothing > 0:
            raise ValueError(
                "label_smoothing: cannot combine with filter_eps, because smoothing gives every entry a gradient and "
                "leaves nothing to drop; give one of the two"
            )
        for name in ("filter_unbiased", "filter_mass", "filter_if_faster"):
            if eps is None and getattr(self, name):
                raise ValueError(f"{name}: says how filter_eps filters; give filter_eps, too")

    def without_filter(self) -> Options:
        """These options without a filter: every gradient is exact."""
        return replace(self, filter_eps=None, filter_unbiased=False, filter_mass=None, filter_if_faster=False)

    @property
    def eps_e(self) -> float | None:
        """The filter's threshold for the gradient of e; None where it is exact."""
        return self.filter_eps if self.filter_e else None

    @property
    def eps_c(self) -> float | None:
        """The filter's threshold for the gradients of c and bias; None where they are exact."""
        return self.filter_eps if self.filter_c else None

    def passes(self, need_e: bool, need_c: bool) -> list[float | None]:
        """The different thresholds that dL/dz is needed with, None (exact) first."""
        wanted = {self.eps_e} if need_e else set()
        wanted |= {self.eps_c} if need_c else set()
        return sorted(wanted, key=lambda eps: eps is not None)

    def filters(self, need_e: bool, need_c: bool) -> bool:
        """Whether a gradient that is needed is filtered."""
        return self.filter_eps is not None and self.filter_eps in self.passes(need_e, need_c)

    def chunk_width(self, vocab: int, fixed_bytes: int, bytes_per_column: int, multiple: int) -> int:
        """Vocabulary columns per chunk: the largest width whose bytes fit the workspace.

        A width takes fixed_bytes + width * bytes_per_column. It is `vocab` if that fits, else a multiple of
        `multiple`. Without a `workspace_mib` the width is at least `multiple`, however long the batch is.

        Raises:
            WorkspaceTooSmall: workspace_mib is given and does not hold `multiple` columns.
        """
        budget = int((self.workspace_mib or DEFAULT_WORKSPACE_MIB) * MIB)
        width = (budget - fixed_bytes) // bytes_per_column
        if width >= vocab:
            return vocab
        if width < multiple and self.workspace_mib is not None:
            least_mib = -(-(fixed_bytes + min(multiple, vocab) * bytes_per_column) // MIB)
            raise WorkspaceTooSmall(self.workspace_mib, least_mib)
        return max(multiple, width // multiple * multiple)


NAMES = tuple(field.name for field in fields(Options))
NUMBERS = ("softcap", "logit_scale", "label_smoothing", "z_loss", "filter_eps", "filter_mass", "workspace_mib")


class Inputs(NamedTuple):
    """The tensors of a call. All ranks of a group have the same rows, or rows of their own (`Place.own`)."""

    e: Tensor  # (N, D)
    c: Tensor  # (V, D), or this rank's rows of the whole vocabulary's
    targets: Tensor  # (N,) int64, columns of the whole vocabulary
    bias: Tensor | None  # (V,) contiguous
    main_grad_c: Tensor | None  # (V, D) fp32: dC is added to it
    stats: Tensor | None  # (5,) fp32, written (filter/rule.FilterStats)
    weights: Tensor | None  # (N,) fp32, what each row's loss is multiplied by
    every_target: Tensor | None = None  # (N, K) int64 and (N, K) fp32: several targets a row (several_targets.py)
    every_weight: Tensor | None = None


class Place(NamedTuple):
    """Where the vocabulary and the rows of a call lie, if its vocabulary is spread over several ranks."""

    group: str  # the process group's name; custom operators take names
    shards: tuple[int, ...]  # rows of C on each rank
    own: bool  # whether each rank has rows of E of its own (rows="own"), or all ranks have the same (rows="same")
    agreed: bool  # whether the host waits for no comparison of the ranks' numbers


class Call(NamedTuple):
    """Everything about a call but its tensors. Custom operators take it as one string, its `handle`."""

    options: Options
    dtype: torch.dtype  # of the products
    ignore_index: int
    reduction: str  # of the row losses: "mean" (with weights, divided by their sum), "sum" or "none"
    uniform: bool  # whether all row losses have one upstream gradient, and the log-sum-exps none
    with_lse: bool  # whether log-sum-exps are wanted; if not, those of ignored rows are undefined
    with_metrics: bool
    needs: tuple[bool, bool, bool]  # whether gradients of e, c and bias are wanted
    place: Place | None = None  # None: this rank has the whole vocabulary

    def handle(self) -> str:
        """This call as text, which torch.compile takes for a constant. A graph on disk stays right by it."""
        options = tuple([_constant(getattr(self.options, name)) for name in NAMES])
        place = None if self.place is None else (*self.place,)
        return repr((options, str(self.dtype), operator.index(self.ignore_index), *self[3:8], place))

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(handle: str) -> Call:
        """The call with this handle."""
        options, dtype, *rest, place = literal_eval(handle)
        values: Any = dict(zip(NAMES, options, strict=True))
        values |= {name: float.fromhex(values[name]) for name in NUMBERS if values[name] is not None}
        dtype = getattr(torch, dtype.removeprefix("torch."))
        place = None if place is None else Place._make(place)
        return Call._make((Options(**values), dtype, *rest, place))


def _constant(x: Any) -> Any:
    """A number as text. torch.compile treats some numbers as variables; index() and hex() make them constants."""
    return x if x is None or isinstance(x, str | bool) else float(x).hex()
