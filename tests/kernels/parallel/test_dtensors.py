"""DTensors: losses and gradients are those of one device, and gradients are placed as their inputs are."""

import os
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from cce_kernels import linear_cross_entropy, linear_log_probs
from everywhere import joined, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the ranks have their own process")
RANKS = 4
R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
B, T, D, V = 4, 8, 16, 50  # 4 ranks have 13, 13, 13 and 11 rows of c
LSE = {"return_lse": True, "return_metrics": True}
# e's placements, c's placements, and options: on a mesh of 4, or of 2 x 2
CASES: dict[str, tuple[list[Any], list[Any], dict[str, Any]]] = {
    "tensor parallel": ([R], [S0], LSE),
    "tensor parallel, rows": ([R], [S0], {"reduction": "none", "shift": 1, "softcap": 20.0}),
    "sequence parallel": ([S1], [S0], {"shift": 1, **LSE}),
    "sequence parallel, rows": ([S1], [S0], {"reduction": "none", "return_lse": True}),
    "batch": ([S0], [S0], {"reduction": "sum", "label_smoothing": 0.1}),
    "batch, whole head": ([S0], [R], LSE),
    "sequence, whole head": ([S1], [R], {"shift": 2, "reduction": "none"}),
    "dimensions of e sharded": ([S2], [S0], {}),
    "dimensions of c sharded": ([S1], [S1], {}),
    "everywhere the same": ([R], [R], {"shift": 1}),
    "batch and vocabulary": ([S0, R], [R, S0], LSE),
    "batch, sequence and vocabulary": ([S0, S1], [R, S0], {"shift": 1, **LSE}),
    "vocabulary over both": ([S0, S1], [S0, S0], {}),
}


def mesh_of(dimensions: int = 1, **names: Any) -> DeviceMesh:
    """All ranks along one dimension, or 2 x half of them."""
    ranks = dist.get_world_size()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(device, (ranks,) if dimensions == 1 else (2, ranks // 2), **names)


def tensors(rows: tuple[int, ...] = (B, T), vocab: int = V) -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {"e": torch.randn(*rows, D), "c": torch.randn(vocab, D), "targets": torch.randint(vocab, rows)}
    found |= {"bias": torch.randn(vocab), "token_weights": torch.rand(rows)}
    found["targets"][..., 1] = -100
    return found


def flat(found: Any) -> list[Tensor]:
    """The tensors in what a loss returns."""
    items = found if isinstance(found, tuple) else (found,)
    return [x for item in items for x in (item.values() if isinstance(item, dict) else [item])]


def step(function: Callable[..., Any], e: Tensor, c: Tensor, targets: Tensor, bias: Any, **options: Any) -> list[Any]:
    """What the function returns, and the gradients of e, c and bias of a weighted sum of all that has some."""
    inputs = [x.detach().requires_grad_() for x in (e, c, bias)]
    found = flat(function(*inputs[:2], targets, bias=inputs[2], **options))
    total = sum((x * x).sum() for x in found if x.requires_grad)
    total.backward()
    return [*found, *(x.grad for x in inputs)]


def whole(x: Any) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=5e-6 * (1 + want.abs().max().item()))


def same(got: list[Any], want: list[Any]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert isinstance(one, DTensor)
        close(whole(one), other.detach())


def as_one_device(
    e_as: list[Any], c_as: list[Any], options: dict[str, Any], of: dict[str, Tensor], function: Any = None
) -> list[Any]:
    """Check one case."""
    function = function or linear_cross_entropy
    mesh = mesh_of(len(e_as))
    weights = {"token_weights": of["token_weights"]} if function is linear_cross_entropy else {}
    want = step(function, of["e"], of["c"], of["targets"], of["bias"], **options, **weights)
    e, c = (distribute_tensor(of[name], mesh, as_) for name, as_ in (("e", e_as), ("c", c_as)))
    bias = distribute_tensor(of["bias"], mesh, [p if p.is_shard(0) else R for p in c_as])
    got = step(function, e, c, of["targets"], bias, **options, **weights)
    same(got, want)
    assert got[-2].placements == c.placements
    assert got[-3].placements == e.placements
    assert got[-1].placements == bias.placements
    return got


def uneven_rows() -> None:
    """6 x 5 rows on 4 ranks: e is gathered where the vocabulary is spread."""
    of = tensors((6, 5))
    for e_as, c_as in (([S0], [S0]), ([S1], [S0]), ([S0], [R]), ([S1, S0], [R, S0])):
        as_one_device(e_as, c_as, {"reduction": "none"}, of)


def few_rows_of_c() -> None:
    """5 rows of c in shards of 2 leave a rank without any: c is gathered."""
    for e_as in ([R], [S1]):
        as_one_device(e_as, [S0], {}, tensors(vocab=5))


def targets_as_dtensors() -> None:
    of, mesh = tensors(), mesh_of()
    for as_ in (S0, S1, R):
        spread = {name: distribute_tensor(of[name], mesh, [as_]) for name in ("targets", "token_weights")}
        e, c = distribute_tensor(of["e"], mesh, [S1]), distribute_tensor(of["c"], mesh, [S0])
        got = linear_cross_entropy(e, c, **spread, shift=1)
        want = linear_cross_entropy(of["e"], of["c"], of["targets"], token_weights=of["token_weights"], shift=1)
        close(whole(got), want)


def log_probabilities() -> None:
    options = {"temperature": 0.7, "return_entropy": True, "shift": 1, "softcap": 9.0}
    for e_as, c_as in (([R], [S0]), ([S1], [S0]), ([S0, S1], [R, S0])):
        as_one_device(e_as, c_as, options, tensors(), linear_log_probs)
    as_one_device([S0], [R], {}, tensors(), linear_log_probs)


class Model(nn.Module):
    def __init__(self, vocab: int = V) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(D, D), nn.Linear(D, vocab)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).tanh()


def sharded(mesh: DeviceMesh | None = None, parallel: bool = False) -> Model:
    """FSDP2 shards head and body over all ranks, or over "dp"; parallel: after the head was spread over "tp"."""
    model = Model()
    if parallel and mesh is not None:
        parallelize_module(model.head, mesh["tp"], ColwiseParallel())
    for part in (model.head, model):
        fully_shard(part, mesh=None if mesh is None else mesh["dp"])
    return model


def averaged(of: dict[str, Tensor], parts: int) -> list[Tensor]:
    """The gradients of a model on one device: the mean of the losses of `parts` of the batch."""
    model = Model()
    states = model(of["e"]).chunk(parts)
    for hidden, targets in zip(states, of["targets"].chunk(parts), strict=True):
        loss = nn.functional.cross_entropy(model.head(hidden).flatten(0, 1), targets.flatten())
        (loss / parts).backward(retain_graph=True)
    return [x.grad for x in model.parameters()]


def compare(model: nn.Module, want: list[Tensor]) -> None:
    for x, grad in zip(model.parameters(), want, strict=True):
        assert isinstance(x.grad, DTensor)
        assert x.grad.placements == x.placements
        close(whole(x.grad), grad)


def fsdp() -> None:
    of, rank, ranks = tensors(), dist.get_rank(), dist.get_world_size()
    for function in (linear_cross_entropy, linear_log_probs):
        model = sharded()
        hidden, targets = model(of["e"].chunk(ranks)[rank]), of["targets"].chunk(ranks)[rank]
        assert isinstance(model.head.weight, DTensor)
        loss = function(hidden, model.head.weight, targets, bias=model.head.bias)
        assert type(loss) is Tensor
        (loss if function is linear_cross_entropy else -loss.sum() / (targets != -100).sum()).backward()
        compare(model, averaged(of, ranks))


def fsdp_and_tensor_parallel() -> None:
    of, mesh = tensors(), mesh_of(2, mesh_dim_names=("dp", "tp"))
    rank = mesh.get_local_rank("dp")
    for as_ in (R, S1):
        model = sharded(mesh, parallel=True)
        hidden = DTensor.from_local(model(of["e"][2 * rank : 2 * rank + 2]), mesh["tp"], [R]).redistribute(
            placements=[as_]
        )
        loss = linear_cross_entropy(
            hidden, model.head.weight, of["targets"][2 * rank : 2 * rank + 2], bias=model.head.bias
        )
        loss.backward()
        compare(model, averaged(of, 2))


def unsharded_head() -> None:
    """FSDP2 gathers a head that is unsharded by hand, here over "dp", and sums as torchtitan tells it to."""
    of, mesh = tensors(), mesh_of(2, mesh_dim_names=("dp", "tp"))
    rank = mesh.get_local_rank("dp")
    for parallel in (False, True):
        model = sharded(mesh, parallel)
        for part in (model.head, model):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no product beside the sum
        hidden = model(of["e"][2 * rank : 2 * rank + 2])
        hidden = DTensor.from_local(hidden, mesh["tp"], [R]) if parallel else hidden
        model.head.unshard()
        weight, bias = model.head.weight, model.head.bias
        assert isinstance(weight, DTensor) == parallel
        loss = linear_cross_entropy(hidden, weight, of["targets"][2 * rank : 2 * rank + 2], bias=bias)
        assert isinstance(loss, DTensor) == parallel
        loss.backward()
        compare(model, [2 * grad for grad in averaged(of, 2)])


def refused() -> None:
    of, mesh = tensors(), mesh_of(2, mesh_dim_names=("dp", "tp"))
    spread = {name: distribute_tensor(x, mesh["tp"], [R]) for name, x in of.items()}
    over_dp, bias_over_dp = (distribute_tensor(of[name], mesh["dp"], [R]) for name in ("c", "bias"))
    right = {"e": spread["e"], "c": spread["c"], "targets": of["targets"]}
    for wrong, message in (
        ({"c": of["c"]}, r"c: is no DTensor, e is one; give DTensor.from_local\(c, mesh, \[Replicate\(\)\]\)"),
        ({"bias": of["bias"]}, "bias: is no DTensor, e is one"),
        ({"c": over_dp}, "c: is a DTensor on .*, e on .*; e's mesh must be c's mesh or a part of it"),
        ({"bias": bias_over_dp}, "bias: is a DTensor on .*, e on .*; e's mesh must be bias's mesh or a part of it"),
        ({"e": of["e"], "targets": spread["targets"]}, "targets: is a DTensor, e is none; give its to_local"),
        ({"targets": of["targets"][:2]}, r"targets: must be \(4, 8\) like e without D, got \(2, 8\)"),
        ({"main_grad_c": torch.zeros(V, D)}, "main_grad_c: cannot be given with DTensors"),
        ({"return_stats": True}, "return_stats: each rank of a DTensor has statistics of its own"),
        ({"target_weights": torch.ones(4, 8, 1)}, "target_weights: cannot be given with a DTensor for e"),
        ({"shift": 9}, r"shift: must lie in \[0, 8\]"),
        ({"reduction": "all"}, "reduction: must be one of"),
        ({"preset": "none"}, "preset: must be one of"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            linear_cross_entropy(**right | wrong)


def summed() -> None:
    """The sum over ranks in place of FSDP2's average, said with PyTorch's own word."""
    of, mesh = tensors(), mesh_of()
    c = distribute_tensor(of["c"], mesh, [S0]).requires_grad_()
    linear_cross_entropy(of["e"], c.full_tensor(grad_placements=[Partial()]), of["targets"]).backward()
    want = of["c"].requires_grad_()
    linear_cross_entropy(of["e"], want, of["targets"]).backward()
    close(whole(c.grad), dist.get_world_size() * want.grad)


def waits() -> None:
    """Hidden states that are still being gathered."""
    of, rank, ranks = tensors(), dist.get_rank(), dist.get_world_size()
    gather = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
    e = of["e"].chunk(ranks)[rank].clone().requires_grad_()
    hidden = gather(e, 0, dist.group.WORLD)
    assert type(hidden).__name__ == "AsyncCollectiveTensor"
    got = linear_cross_entropy(hidden, of["c"], of["targets"])
    got.backward()
    whole_e = of["e"].requires_grad_()
    want = linear_cross_entropy(whole_e, of["c"], of["targets"])
    want.backward()
    close(got.detach(), want.detach())
    close(e.grad, ranks * whole_e.grad.chunk(ranks)[rank])


FURTHER = {
    f.__name__: f
    for f in (
        uneven_rows, few_rows_of_c, targets_as_dtensors, log_probabilities, fsdp,
        fsdp_and_tensor_parallel, unsharded_head, refused, summed, waits,
    )
}  # fmt: skip


def all_cases(rank: int, store: str, output: str, ranks: int, device: str) -> None:
    """What one rank does: it writes a line for each case, and the error of a case that fails."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    with joined(rank, ranks, store, device), open(f"{output}.{rank}", "w") as file:
        cases = {name: partial(as_one_device, *case, tensors()) for name, case in CASES.items()} | FURTHER
        for name, case in cases.items():
            try:
                case()
                print(f"{name}: ok", file=file, flush=True)
            except Exception:
                print(f"{name}: {traceback.format_exc()}", file=file, flush=True)
                raise  # the other ranks cannot go on


@pytest.mark.parametrize(("device", "ranks"), [("cpu", RANKS), pytest.param("cuda", 2, marks=pytest.mark.gpu)])
def test_dtensors(device, ranks, tmp_path):
    files = str(tmp_path / "store"), str(tmp_path / "output")
    run_ranks(all_cases, [(rank, *files, ranks, device) for rank in range(ranks)], device)
    for rank in range(ranks):
        text = Path(f"{files[1]}.{rank}").read_text()
        assert all(f"{name}: ok\n" in text for name in (*CASES, *FURTHER)), f"rank {rank}: {text[-3000:]}"


def test_dtensors_compile_without_a_graph_break(group_of_one):
    function = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    of, mesh = tensors(), init_device_mesh("cpu", (1,))
    e, c = distribute_tensor(of["e"], mesh, [S1]), distribute_tensor(of["c"], mesh, [S0])
    bias = distribute_tensor(of["bias"], mesh, [S0])
    got, want = (step(f, e, c, of["targets"], bias, shift=1) for f in (function, linear_cross_entropy))
    same(got, [whole(x) for x in want])
