"""Muon on the rows of two ranks, and what clipping refuses. tests/distributed compares runs of several ranks."""

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


def test_sharded_and_whole_gradients_are_not_mixed(group_of_one):
    sharded = nn.Parameter(distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)]))
    whole = nn.Parameter(torch.ones(2))
    for parameter in (sharded, whole):
        parameter.grad = parameter.detach().clone()
    for parameters in ([whole, sharded], [sharded, whole]):
        with pytest.raises(TypeError, match="some gradients are sharded"):
            clip_gradients(parameters, 1.0)
