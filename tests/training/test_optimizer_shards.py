"""AdamW and clipping on a rank's own rows, beside torch's on DTensors. tests/distributed compares several ranks."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from linrnn.config import load_config
from linrnn.training.optimizer import build_optimizer, clip_gradients

CPU = torch.device("cpu")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """One rank, as the shards of a model."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def sharded(mesh: DeviceMesh) -> nn.Module:
    """A layer with gradients, sharded by rows."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 5)
    for name, parameter in list(layer.named_parameters()):
        cut = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
        cut.grad = distribute_tensor(3 * torch.randn_like(parameter), mesh, [Shard(0)])
        setattr(layer, name, cut)
    return layer


def test_adamw_on_own_rows_takes_torchs_steps(mesh):
    config = load_config().optimizer
    ours, theirs = sharded(mesh), sharded(mesh)
    optimizer = build_optimizer(ours, config, CPU)
    groups = copy.copy(build_optimizer(theirs, config, CPU).param_groups)
    reference = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
    for _ in range(3):
        optimizer.step()
        reference.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())
    for state in optimizer.state.values():
        assert isinstance(state["exp_avg"], DTensor), "checkpoints keep whole moments"


@pytest.mark.parametrize("max_norm", [1.0, 1e3, None])
def test_clipping_own_rows_gives_torchs_norm_and_gradients(mesh, max_norm):
    ours, theirs = sharded(mesh), sharded(mesh)
    norm = clip_gradients(ours.parameters(), max_norm)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or float("inf"))
    assert not isinstance(norm, DTensor)
    assert norm.item() == pytest.approx(expected.full_tensor().item(), rel=1e-6)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(_grad(one), _grad(other), rtol=1e-6, atol=0)


def test_sharded_and_whole_gradients_are_not_mixed(mesh):
    layer = sharded(mesh)
    whole = nn.Parameter(torch.zeros(2))
    whole.grad = torch.ones(2)
    for parameters in ([whole, *layer.parameters()], [*layer.parameters(), whole]):
        with pytest.raises(TypeError, match="some gradients are sharded"):
            clip_gradients(parameters, 1.0)


def _grad(parameter: nn.Parameter) -> Tensor:
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.full_tensor()
