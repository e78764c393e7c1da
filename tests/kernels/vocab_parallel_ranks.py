"""Ranks that compute the loss with the vocabulary spread over them: one process each, all cases in one run."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from cases import BF16, FP32, Case, draw, weights_of
from cce_kernels import vocabulary_parallel_linear_cross_entropy, vocabulary_shards
from cce_kernels.planner import Plan
from cce_kernels.runtime.interpreter import INTERPRETED

PATIENCE = 300  # s that a rank waits for the others
EXTRAS = {"return_lse": True, "return_metrics": True}


@dataclass(frozen=True)
class Spread:
    """A case and how it is spread. Leading dimensions are (ranks, …) if each rank has its own rows."""

    case: Case
    rows: str = "same"
    shards: tuple[int, ...] | None = None  # None: as torch.chunk
    main_grad: bool = False
    stored_rows: int = 0  # per chunk, where the Triton kernels are to store exponentials
    unequal: bool = False  # each rank's loss has another gradient
    compiled: bool = False  # under torch.compile, in one graph
    again: bool = False  # the gradients are those of a second backward pass
    extras: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.case}-{self.rows}"


PLAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {},
    "sum": {"reduction": "sum"},
    "softcap": {"softcap": 15.0, "logit_scale": 1.3},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
    "shift": {"shift": 1, "reduction": "none"},
    "many_chunks": {"workspace_mib": 0.5},
    "weights": {"z_loss": 1e-2},
    "several": {"softcap": 15.0, "label_smoothing": 0.1, "z_loss": 1e-2},
    "everything": {
        "softcap": 20.0, "logit_scale": 1.3, "label_smoothing": 0.2, "z_loss": 1e-3, "shift": 1, "reduction": "none",
    },
}  # fmt: skip


def cases(ranks: int) -> list[Spread]:
    """Every option alone and all together, on a vocabulary that the number of ranks does not divide."""
    found: list[Spread] = []

    def add(name: str, rows: str = "same", n: int = 43, options: Any = (), spread: Any = (), **case: Any) -> None:
        found.append(Spread(Case(name, shape=(ranks, n), options=dict(options), **case), rows, **dict(spread)))

    metrics = {"return_metrics": True}
    extras = {"plain": EXTRAS, "everything": EXTRAS, "weights": metrics}
    for dtype, rows in ((FP32, "same"), (BF16, "own")):
        for name, options in PLAIN.items():
            add(
                f"{name}-{str(dtype)[6:]}", rows, options=options, dtype=dtype, bias=name in ("bias", "everything"),
                peak=12 if name == "softcap" else 0, weights=name in ("weights", "everything"),
                several=3 if name == "several" else 0, spread={"extras": extras.get(name, {})},
            )  # fmt: skip
    uneven = (700, *[1] * (ranks - 2), 77 - (ranks - 2))
    add("uneven-bf16", dtype=BF16, peak=6, spread={"shards": uneven, "main_grad": True})
    add("all_ignored-fp32", n=5, ignored=1)
    add("sure-fp32", vocab=97, peak=40, ignored=0)
    add("mixed-bf16_fp32", "own", dtype=BF16, dtype_c=FP32)
    stored, chunks = {"n": 75, "vocab": 391, "dtype": BF16, "peak": 8}, {"stored_rows": 64, "extras": metrics}
    for rows in ("same", "own"):
        own = rows == "own"
        add("stored-bf16", rows, **stored, spread=chunks | {"main_grad": own})
        options = {"reduction": "sum"} if own else {"z_loss": 1e-3}
        add("stored_weights-bf16", rows, **stored, weights=True, options=options, spread=chunks | {"again": True})
        add(  # with few entries, so that another column in a target's place has a large p
            "stored_several-bf16", rows, **stored | {"vocab": 24, "peak": 1}, several=3, bias=True,
            options={"reduction": "none", "shift": 1} if own else {"z_loss": 1e-3},
            spread=chunks | {"stored_rows": 64 * 5 if own else 64, "compiled": not own, "again": own},
        )  # fmt: skip
        options = {"logit_scale": 1.4, "z_loss": 1e-3}
        add("stored_bias-bf16", rows, **stored, bias=True, options=options, spread=chunks)
        options = {"z_loss": 1e-3, "reduction": "none"}  # each row's own gradient: one chunk
        add("stored_rows-bf16", rows, **stored, options=options, spread={"stored_rows": 64 * 5, "extras": EXTRAS})
        everything = {"options": PLAIN["everything"], "bias": True, "weights": True}
        add("compiled-fp32", rows, **everything, spread={"extras": EXTRAS, "compiled": True})
    options = {"softcap": 30.0, "logit_scale": 1.4, "z_loss": 1e-3, "reduction": "sum"}
    add("stored_softcap-bf16", **stored | {"peak": 0}, options=options, spread={"stored_rows": 64})
    add("unequal-bf16", "own", n=5, vocab=97, dtype=BF16, spread={"stored_rows": 64, "unequal": True})
    # losses beyond what the kernels' offset allows for
    add("improbable-bf16", vocab=391, dtype=BF16, peak=-90, spread={"stored_rows": 64})
    options = {"filter_eps": 2.0**-8, "workspace_mib": 0.75, "filter_unbiased": True, "filter_if_faster": True}
    add("if_faster-fp32", n=75, vocab=1300, peak=9, options=options, spread={"extras": {"return_stats": True}})
    return found


def compute(spread: Spread, rank: int, ranks: int, device: str) -> dict[str, Any]:
    """Results and gradients of one rank."""
    case = spread.case
    whole = draw(case, device)
    shards = spread.shards or vocabulary_shards(case.vocab, ranks)
    first = sum(shards[:rank])
    here = slice(first, first + shards[rank])
    mine = slice(rank, rank + 1) if spread.rows == "own" else slice(None)
    e, targets = whole[0].detach()[mine].requires_grad_(), whole[2][mine]
    c = whole[1].detach()[here].requires_grad_()
    bias = None if whole[3] is None else whole[3].detach()[here].requires_grad_()
    weights = {name: x[mine] for name, x in weights_of(case, whole[2]).items()}
    function = vocabulary_parallel_linear_cross_entropy
    if spread.compiled and (with_kernels() or not spread.stored_rows):  # a trace costs a second
        torch._dynamo.reset()  # otherwise the cases add up to its limit of recompilations
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    buffer = torch.zeros(c.shape, device=device) if spread.main_grad else None
    with stored(spread.stored_rows):
        loss, *extras = _as_tuple(
            function(
                e, c, targets, bias=bias, shards=shards, rows=spread.rows, main_grad_c=buffer, **case.options,
                **spread.extras, **weights,
            )
        )  # fmt: skip
    upstream = None
    if loss.dim():  # as cases.gradients has it
        shape = whole[0][..., case.options.get("shift", 0) :, 0].shape
        upstream = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(loss)[mine]
    if spread.unequal:
        upstream = torch.full_like(loss, 1.0 + rank)
    inputs = [x for x in (e, c, bias) if x is not None]
    try:
        with stored(spread.stored_rows):
            for last in (False, True) if spread.again else (True,):
                grads = torch.autograd.grad(
                    loss, inputs, upstream, retain_graph=not last, allow_unused=spread.main_grad
                )
    except RuntimeError as error:
        if not spread.unequal:
            raise
        return {"refused": str(error)}
    got = {"loss": loss, "e": grads[0], "c": grads[1] if buffer is None else buffer}
    if bias is not None:
        got["bias"] = grads[2]
    for extra in extras:
        got |= extra if isinstance(extra, dict) else {"lse": extra}
    return {name: tensor.detach().cpu() for name, tensor in got.items()}


def with_kernels() -> bool:
    return INTERPRETED or torch.cuda.is_available()


@contextlib.contextmanager
def stored(rows: int) -> Iterator[None]:
    """Make the Triton kernels store exponentials in chunks of this many rows (0: their own choice)."""
    if not rows or not with_kernels():
        yield
        return
    from cce_kernels.backends import with_triton

    with patch.object(with_triton, "plan", lambda *_: Plan(rows, 256)):
        yield


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def main(rank: int, folder: str, device: str, ranks: int, names: list[str]) -> None:
    """One rank: its results for these of `cases(ranks)`, in FOLDER/RANK."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank,
        world_size=ranks, timeout=timedelta(seconds=PATIENCE),
    )  # fmt: skip
    results = {str(s): compute(s, rank, ranks, device) for s in cases(ranks) if str(s) in names}
    torch.save(results, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def fork_all(folder: str, ranks: int, names: list[str]) -> None:
    """All ranks, on CPUs: forked from this process, which has imported torch and Triton."""
    if any(spread.compiled for spread in cases(ranks) if str(spread) in names):
        # The compiler takes seconds to begin. No gradients here, because their threads do not survive a fork.
        import_module("torch._inductor.lowering")
        torch.compile(torch.sin, backend="aot_eager")(torch.ones(2))
    fork = multiprocessing.get_context("fork").Process
    processes = [fork(target=main, args=(rank, folder, "cpu", ranks, names)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(sum(process.exitcode != 0 for process in processes))
