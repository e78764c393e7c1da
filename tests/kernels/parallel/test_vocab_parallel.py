"""With the vocabulary spread over ranks, losses and gradients equal those of one device."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import IGNORE, Case, draw, error, gradients, in_fp64, of_operator, torch_path, weights_of
from cce_kernels import (
    linear_cross_entropy,
    reference_linear_cross_entropy,
    vocabulary_parallel_linear_cross_entropy,
    vocabulary_shards,
)
from cce_kernels.options import Place
from everywhere import run_ranks
from torch import distributed as dist
from vocab_parallel_ranks import PATIENCE, Spread, cases, fork_all, main

INTERPRETS = "TRITON_INTERPRET"
SPREADS = [spread for spread in cases(3) if not spread.unequal]
ON_GPUS = (
    "plain-bfloat16-own", "everything-bfloat16-own", "uneven-bf16-same", "stored-bf16-same", "stored-bf16-own",
    "stored_rows-bf16-same", "stored_rows-bf16-own", "stored_softcap-bf16-same", "improbable-bf16-same",
    "stored_weights-bf16-same", "stored_weights-bf16-own", "stored_bias-bf16-same", "stored_bias-bf16-own",
    "stored_several-bf16-same", "stored_several-bf16-own", "several-bfloat16-own",
)  # fmt: skip
INTERPRETED = (*ON_GPUS, "if_faster-fp32-same")


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
    spreads = [spread for spread in cases(2) if str(spread) in INTERPRETED or spread.unequal]
    assert len(spreads) == len(INTERPRETED) + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(INTERPRETS, "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        return results(tmp_path_factory.mktemp("interpreted"), spreads, 2)


@not_within
@pytest.mark.parametrize("name", INTERPRETED)
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


@pytest.fixture
def alone(tmp_path):
    """A group of only this process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_does_not_fit_together_is_refused(alone):
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
def test_one_row_without_a_dimension_for_rows(rows, alone):
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
def test_the_custom_operator_keeps_to_pytorchs_rules(rows, alone):
    """As in test_linear_cross_entropy."""
    inputs = draw(Case("operator", shape=(20,), dim=8, vocab=30, bias=True), "cpu")
    place = Place(dist.group.WORLD.group_name, (30,), rows == "own", agreed=False)
    arguments = of_operator(*inputs, torch.linspace(-1, 1, 20), place, label_smoothing=0.1, softcap=9.0)
    torch.library.opcheck(torch.ops.cce_kernels.cross_entropy.default, arguments)


@pytest.mark.parametrize("own_group", [False, True])
def test_under_torch_compile_all_of_it_is_in_one_graph(alone, own_group):
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
    for a, b in zip(*(torch.autograd.grad(loss, (e, c)) for loss, _ in (compiled, plain)), strict=True):
        torch.testing.assert_close(a, b)
