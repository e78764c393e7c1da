"""AdamW, Muon and clipping on a rank's own rows, beside torch's. tests/distributed compares runs of several ranks."""

import pytest
import torch
import torch.distributed as dist
from forked import start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from linrnn.config import load_config
from linrnn.training.optimizer import build_optimizer, clip_gradients

CPU = torch.device("cpu")


def sharded() -> nn.Module:
    """A layer with gradients, sharded by rows over one rank."""
    torch.manual_seed(0)
    layer, mesh = nn.Linear(6, 5), init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    for name, parameter in list(layer.named_parameters()):
        cut = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
        cut.grad = distribute_tensor(3 * torch.randn_like(parameter), mesh, [Shard(0)])
        setattr(layer, name, cut)
    return layer


def test_adamw_on_own_rows_takes_torchs_steps(group_of_one):
    config = load_config().optimizer
    ours, theirs = sharded(), sharded()
    optimizer, groups = build_optimizer(ours, config, CPU), build_optimizer(theirs, config, CPU).param_groups
    reference = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
    for _ in range(3):
        optimizer.step()
        reference.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())
    for state in optimizer.state.values():
        assert isinstance(state["exp_avg"], DTensor), "checkpoints keep whole moments"


SHAPES = (5, 7), (8, 4), (1, 6)  # of the second one each rank has as many rows, of the third one rank has none


def updated_by_muon(rank: int, world_size: int, folder: str) -> None:
    """Three updates of matrices whose rows are shared by `world_size` ranks. Rank 0 writes the whole matrices."""
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    wholes = [torch.randn(shape) for shape in SHAPES]
    matrices = [nn.Parameter(distribute_tensor(whole.clone(), mesh, [Shard(0)])) for whole in wholes]
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.ParameterList(matrices)])
    optimizer = build_optimizer(model, load_config(["optimizer=muon", "optimizer.lr=0.1"]).optimizer, CPU)
    for _ in range(3):
        for matrix in matrices:
            matrix.grad = distribute_tensor(torch.randn(matrix.shape), mesh, [Shard(0)])
        optimizer.step()
    held = [(matrix, optimizer.state[matrix]["momentum_buffer"]) for matrix in matrices]
    assert all(isinstance(mean, DTensor) for _, mean in held), "checkpoints keep whole means"
    whole = [[tensor.full_tensor().detach() for tensor in pair] for pair in held]  # type: ignore[attr-defined]
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")
    dist.destroy_process_group()


def test_muon_on_rows_of_two_ranks_takes_torchs_steps_on_whole_matrices(tmp_path):
    ranks = [start(updated_by_muon, rank, 2, str(tmp_path)) for rank in range(2)]
    torch.manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    config = load_config(["optimizer=muon"]).optimizer
    reference = torch.optim.Muon(
        matrices, lr=0.1, momentum=config.momentum, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape)
        reference.step()
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode == 0
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    for matrix, (updated, mean) in zip(matrices, found, strict=True):
        torch.testing.assert_close(updated, matrix.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(mean, reference.state[matrix]["momentum_buffer"])


@pytest.mark.parametrize("max_norm", [1.0, 1e3, None])
def test_clipping_own_rows_gives_torchs_norm_and_gradients(max_norm, group_of_one):
    ours, theirs = sharded(), sharded()
    norm = clip_gradients(ours.parameters(), max_norm)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or float("inf"))
    assert not isinstance(norm, DTensor)
    assert norm.item() == pytest.approx(expected.full_tensor().item(), rel=1e-6)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad.full_tensor(), rtol=1e-6, atol=0)


def test_sharded_and_whole_gradients_are_not_mixed(group_of_one):
    layer, whole = sharded(), nn.Parameter(torch.ones(2))
    whole.grad = torch.ones(2)
    for parameters in ([whole, *layer.parameters()], [*layer.parameters(), whole]):
        with pytest.raises(TypeError, match="some gradients are sharded"):
            clip_gradients(parameters, 1.0)
