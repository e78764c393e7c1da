"""With the vocabulary spread over ranks, losses and gradients equal those of one device.

The ranks are one process each, and compute all cases in one run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import BF16, FP32, IGNORE, Case, draw, error, gradients, in_fp64, of_operator, torch_path, weights_of
from cce_kernels import linear_cross_entropy, vocabulary_parallel_linear_cross_entropy, vocabulary_shards
from cce_kernels.options import Place
from cce_kernels.planner import Plan
from cce_kernels.reference import reference_linear_cross_entropy
from cce_kernels.runtime.interpreter import INTERPRETED
from everywhere import joined, run_ranks

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
    with joined(rank, ranks, f"{folder}/store", device, PATIENCE):
        results = {str(s): compute(s, rank, ranks, device) for s in cases(ranks) if str(s) in names}
        torch.save(results, f"{folder}/{rank}")
        dist.barrier()


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


INTERPRETS = "TRITON_INTERPRET"
SPREADS = [spread for spread in cases(3) if not spread.unequal]
ON_GPUS = (
    "plain-bfloat16-own", "everything-bfloat16-own", "uneven-bf16-same", "stored-bf16-same", "stored-bf16-own",
    "stored_rows-bf16-same", "stored_rows-bf16-own", "stored_softcap-bf16-same", "improbable-bf16-same",
    "stored_weights-bf16-same", "stored_weights-bf16-own", "stored_bias-bf16-same", "stored_bias-bf16-own",
    "stored_several-bf16-same", "stored_several-bf16-own", "several-bfloat16-own",
)  # fmt: skip
BY_KERNELS = (
    "everything-bfloat16-own", "uneven-bf16-same", "stored-bf16-same", "stored-bf16-own", "stored_rows-bf16-own",
    "stored_softcap-bf16-same", "improbable-bf16-same", "stored_weights-bf16-own", "stored_bias-bf16-same",
    "stored_several-bf16-same", "stored_several-bf16-own", "if_faster-fp32-same",
)  # fmt: skip


def results(folder: Path, spreads: list[Spread], ranks: int, device: str = "cpu") -> list[dict[str, Any]]:
    """Every rank's results and gradients for these of `cases(ranks)`."""
    names = [str(spread) for spread in spreads]
    if INTERPRETS in os.environ:  # a new process alone reads it
        codes = run_ranks(fork_all, [(str(folder), ranks, names)], "new", PATIENCE)
    else:
        codes = run_ranks(main, [(rank, str(folder), device, ranks, names) for rank in range(ranks)], device, PATIENCE)
    assert codes == [0] * len(codes)
    return [torch.load(folder / str(rank), weights_only=True) for rank in range(ranks)]


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results(tmp_path_factory.mktemp("ranks"), SPREADS, 3)


@pytest.mark.parametrize("spread", SPREADS, ids=str)
def test_losses_and_gradients_are_those_of_one_device(spread, computed):
    check(spread, [of_rank[str(spread)] for of_rank in computed])


not_within = pytest.mark.skipif(os.environ.get(INTERPRETS) == "1", reason="starts the interpreter in the ranks")


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("triton")
    spreads = [spread for spread in cases(2) if str(spread) in BY_KERNELS or spread.unequal]
    assert len(spreads) == len(BY_KERNELS) + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(INTERPRETS, "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        return results(tmp_path_factory.mktemp("interpreted"), spreads, 2)


@not_within
@pytest.mark.parametrize("name", BY_KERNELS)
def test_the_triton_kernels_spread_over_ranks_agree_with_one_device(name, interpreted):
    [spread] = [spread for spread in cases(2) if str(spread) == name]
    check(spread, [of_rank[name] for of_rank in interpreted])


@not_within
def test_gradients_of_sums_that_differ_over_ranks_are_refused(interpreted):
    for of_rank in interpreted:
        assert "the gradients of the ranks' losses differ" in of_rank["unequal-bf16-own"]["refused"]


@pytest.mark.gpu
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_on_gpus_losses_and_gradients_are_those_of_one_device(n_ranks, tmp_path):
    spreads = [spread for spread in cases(n_ranks) if str(spread) in ON_GPUS]
    got = results(tmp_path, spreads, n_ranks, "cuda")
    for spread in spreads:
        check(spread, [of_rank[str(spread)] for of_rank in got])


def check(spread: Spread, ranks: list[dict[str, torch.Tensor]], floor: float = 1e-6) -> None:
    """Within twice the error of torch's path (cases.check) or of one device, and bit for bit the same on all ranks."""
    case = spread.case
    e, c, targets, bias = draw(case, "cpu")
    options = {k: v for k, v in case.options.items() if k not in ("workspace_mib", "accumulate")}
    if options.get("filter_if_faster"):  # over shards a filter never is, nor on a CPU
        options = {k: v for k, v in options.items() if not k.startswith("filter")}
    weights = weights_of(case, targets)
    options |= weights
    e64, c64, bias64 = in_fp64(e, c, bias)
    truth, lse = reference_linear_cross_entropy(e64, c64, targets, bias=bias64, **options)
    want = dict(zip(("e", "c", "bias"), gradients(truth, (e64, c64, bias64)), strict=False))
    allowed = _errors(torch_path(e, c, targets, bias, **options), truth, want, (e, c, bias))
    one_device = linear_cross_entropy(e, c, targets, bias=bias, **case.options, **weights)
    alone = _errors(one_device, truth, want, (e, c, bias))
    whole = _assembled(spread, ranks)
    assert whole["loss"].shape == truth.shape
    assert whole["loss"].dtype == torch.float32
    for name, x in {"loss": truth, **want}.items():
        assert whole[name].shape == x.shape
        assert error(whole[name], x) <= 2 * max(allowed[name], alone[name]) + floor, name
    for name, x in (("e", e), ("c", c), ("bias", bias)):
        if x is not None:
            assert whole[name].dtype == (torch.float32 if spread.main_grad and name == "c" else x.dtype)
    if spread.extras:
        loss, *extras = linear_cross_entropy(e, c, targets, bias=bias, **spread.extras, **case.options, **weights)
        loss.sum().backward()
        if "return_lse" in spread.extras:
            assert error(whole["lse"], lse) < 1e-5
        for name in extras[-1].keys() & whole.keys():
            assert whole[name].item() == pytest.approx(extras[-1][name].item(), rel=1e-4), name


def _errors(loss: torch.Tensor, truth: torch.Tensor, want: dict[str, torch.Tensor], inputs: tuple) -> dict[str, float]:
    """Errors of a loss and its gradients."""
    grads = dict(zip(want, gradients(loss, inputs), strict=True))
    return {"loss": error(loss, truth), **{name: error(grad, want[name]) for name, grad in grads.items()}}


def _assembled(spread: Spread, ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The ranks' parts put together. Results that all ranks have must agree bit for bit."""
    first = ranks[0]
    whole = {name: torch.cat([rank[name] for rank in ranks]) for name in ("c", "bias") if name in first}
    for name in first.keys() - whole.keys():
        parts = [rank[name] for rank in ranks]
        if spread.rows == "own" and name in ("loss", "e", "lse"):
            whole[name] = torch.cat(parts) if parts[0].dim() else torch.stack(parts).sum()
        else:
            assert all(torch.equal(part, parts[0]) for part in parts), name
            whole[name] = parts[0]
    return whole


def test_what_does_not_fit_together_is_refused(group_of_one):
    e, c, targets = torch.randn(4, 8), torch.randn(10, 8), torch.tensor([9, *[IGNORE] * 3])

    def call(**options: Any) -> Any:
        return vocabulary_parallel_linear_cross_entropy(e, c, targets, **{"shards": [10], **options})

    assert call() > 0
    for options, message in (
        ({"shards": [5, 5]}, "shards: must be 1 positive integers"),
        ({"shards": [0]}, "shards: must be 1 positive integers"),
        ({"shards": [10.0]}, "shards: must be 1 positive integers"),
        ({"shards": 10}, "shards: must be 1 positive integers"),
        ({"shards": [9]}, "c: has 10 rows, shards says 9 for rank 0"),
        ({"rows": "some"}, "rows: must be one of same, own"),
        ({"preset": "cce_filter", "filter_eps": 0.1}, "filter_eps: comes from preset"),
        ({"softcap": -1.0}, "softcap: must be positive"),
        ({"preset": "paper/cce"}, "filter_eps: cannot combine with a vocabulary over several ranks; give preset="),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call(**options)
    targets[0] = 10
    with pytest.raises(ValueError, match=r"^targets: 10 lies outside \[0, 10\)"):
        call()


@pytest.mark.parametrize("rows", ["same", "own"])
def test_one_row_without_a_dimension_for_rows(rows, group_of_one):
    e, c = torch.randn(8), torch.randn(10, 8)
    options = {"reduction": "none", "return_lse": True}
    found = vocabulary_parallel_linear_cross_entropy(e, c, torch.tensor(3), shards=[10], rows=rows, **options)
    torch.testing.assert_close(found, linear_cross_entropy(e, c, torch.tensor(3), **options))


def test_shards_are_as_equal_as_dtensors_and_none_is_empty():
    assert vocabulary_shards(10, 4) == [3, 3, 3, 1]
    assert vocabulary_shards(128256, 4) == [32064] * 4
    with pytest.raises(ValueError, match=r"^vocab: 5 entries"):
        vocabulary_shards(5, 4)
    for vocab, ranks, kind, message in (
        (10, 0, ValueError, "ranks: must be positive, got 0"),
        (-10, 2, ValueError, "vocab: must be positive, got -10"),
        (10.0, 2, TypeError, "vocab: must be an integer, got 10.0"),
    ):
        with pytest.raises(kind, match=f"^{message}$"):
            vocabulary_shards(vocab, ranks)


@pytest.mark.parametrize("rows", ["same", "own"])
def test_the_custom_operator_keeps_to_pytorchs_rules(rows, group_of_one):
    inputs = draw(Case("operator", shape=(20,), dim=8, vocab=30, bias=True), "cpu")
    place = Place(dist.group.WORLD.group_name, (30,), rows == "own", agreed=False)
    arguments = of_operator(*inputs, torch.linspace(-1, 1, 20), place, label_smoothing=0.1, softcap=9.0)
    torch.library.opcheck(torch.ops.cce_kernels.cross_entropy.default, arguments)


@pytest.mark.parametrize("own_group", [False, True])
def test_under_torch_compile_all_of_it_is_in_one_graph(group_of_one, own_group):
    group = dist.new_group([0]) if own_group else dist.group.WORLD
    e, c = torch.randn(4, 8, requires_grad=True), torch.randn(10, 8, requires_grad=True)
    targets = torch.tensor([1, IGNORE, 3, 9])

    def losses(e: torch.Tensor) -> Any:
        loss, metrics = vocabulary_parallel_linear_cross_entropy(
            2 * e, c, targets, shards=[10], rows="own", return_metrics=True, group=group
        )
        return 2 * loss, metrics["entropy"]

    torch._dynamo.reset()
    compiled, plain = torch.compile(losses, backend="aot_eager", fullgraph=True)(e), losses(e)
    torch.testing.assert_close(compiled, plain)
    torch.testing.assert_close(*(torch.autograd.grad(loss, (e, c)) for loss, _ in (compiled, plain)))
