"""A model sharded over ranks: its blocks by FSDP2, its embedding and head by vocabulary.

Every parameter becomes a DTensor sharded along its first dimension on one mesh. The mesh is `("shard",)` over all
ranks. If `parallel.shard_ranks` is smaller it is `("replicate", "shard")` (HSDP: each group of ranks holds a whole
model). Gradients are summed over all ranks in fp32: within a group in every micro-step, across groups in the last one.

Blocks are gathered when they are needed, forward and backward (`fully_shard`): one by one, or `blocks_together` at
once. Embedding and head are as large as many blocks and are handled apart:

* The head is gathered once, in the dtype of the loss's products. Its gradient is reduced and scattered.
* The embedding is gathered for a lookup, and not again for its backward pass.
* With parallel=vocab neither is gathered. Hidden states and token ids are sent to the ranks that hold the rows.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from linrnn.config.schema import FsdpConfig, VocabConfig
from linrnn.core.errors import ConfigError, UnsupportedError
from linrnn.distributed.ranks import DistributedRanks
from linrnn.models.build import RowShard, allocate


def make_mesh(parallel: FsdpConfig, device_type: str) -> DeviceMesh:
    """The ranks as groups of `shard_ranks` that share one model. `shard_ranks` divides the number of ranks."""
    ranks = dist.get_world_size()
    shard_ranks = parallel.ranks_of_model(ranks)
    if shard_ranks == ranks:
        return init_device_mesh(device_type, (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (ranks // shard_ranks, shard_ranks), mesh_dim_names=("replicate", "shard"))


def shard(model: Any, mesh: DeviceMesh, compute: torch.dtype, parallel: FsdpConfig) -> None:
    """Shard `model` (a LanguageModel) over the mesh, in place. Its parameters become DTensors.

    Parameters on the meta device get memory for this rank's part, without values
    (:class:`linrnn.models.BlankModel`).

    Args:
        compute: the dtype of matrix products. The blocks' weights are gathered in it. If FLA's kernels need some of
            them in fp32, all are gathered in their own dtype.
        parallel: how many blocks are gathered together, and whether they stay so until their backward pass. A
            VocabConfig does not gather embedding and head: see :class:`VocabularyParallelEmbedding`. A loss then gets
            the rank's rows of the head.

    Raises:
        ConfigError: with a VocabConfig, a rank would have no row of the vocabulary.
        UnsupportedError: a block has parameters of two dtypes, which FSDP2 does not take.
    """
    marked = {name for name, parameter in model.named_parameters() if getattr(parameter, "_no_weight_decay", False)}
    kept = {parameter.dtype for parameter in model.blocks.parameters()}
    if len(kept) > 1:
        raise UnsupportedError(
            f"trainer.precision=bf16: FLA keeps some parameters of {model.arch.model} in fp32, FSDP2 takes one dtype",
            "use trainer.precision=bf16_autocast, or parallel=ddp",
        )
    _shard_vocabulary(model, mesh, isinstance(parallel, VocabConfig))
    gathered = None if model.arch.keeps_fp32 else compute
    policy = MixedPrecisionPolicy(gathered, torch.float32, cast_forward_inputs=False)
    blocks, together = list(model.blocks), parallel.blocks_together
    for first in range(0, len(blocks), together):
        some = blocks[first : first + together]
        again = not parallel.keep_gathered
        fully_shard(some if len(some) > 1 else some[0], mesh=mesh, mp_policy=policy, reshard_after_forward=again)
    own = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(model, mesh=mesh, mp_policy=own, ignored_params={model.embedding.weight, model.head_weight})
    allocate(model, mesh.device_type)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
            module.set_gradient_divide_factor(1.0)
    for name, parameter in model.named_parameters():
        if name in marked:
            parameter._no_weight_decay = True


class ShardedRanks(DistributedRanks):
    """Ranks that share one model: parallel=fsdp and parallel=vocab.

    Where groups of ranks each hold a whole model (HSDP), their gradients are summed once per optimizer step. FSDP does
    so for the blocks, and this class for embedding and head, as soon as a backward pass has them.
    """

    _defers_sums = False

    @functools.cached_property
    def _mesh(self) -> DeviceMesh:
        return make_mesh(self._parallel, "cuda" if "nccl" in dist.get_backend_config() else "cpu")

    @property
    def row_shard(self) -> RowShard:
        return row_shard_of(self._mesh)

    def parallelize(self, model: Any, compute: torch.dtype) -> nn.Module:
        shard(model, self._mesh, compute, self._parallel)
        self._model, self._gathering = model, [one for one in model.modules() if isinstance(one, FSDPModule)]
        if self._mesh.ndim > 1:
            for weight in {model.embedding.weight, model.head_weight}:  # a single one if they are tied
                weight.register_post_accumulate_grad_hook(self._sum_over_groups)
        return model

    def _sum_over_groups(self, weight: Any) -> None:
        if not self._defers_sums:
            dist.all_reduce(weight.grad.to_local(), group=self._mesh.get_group("replicate"))

    def broadcast_weights(self, model: Any) -> None:
        if self._mesh.ndim > 1:
            for parameter in model.parameters():
                dist.broadcast(parameter.detach().to_local(), group=self._mesh.get_group("replicate"), group_src=0)

    @contextlib.contextmanager
    def no_sync(self, replica: Any) -> Iterator[None]:
        self._defers_sums = True
        self._model.set_requires_all_reduce(False)
        try:
            yield
        finally:
            self._defers_sums = False
            self._model.set_requires_all_reduce(True)

    def reshard(self) -> None:
        for module in self._gathering:  # also those whose parameters wait for a backward pass
            module.reshard()

    def vocabulary(self, vocab_size: int) -> tuple[dist.ProcessGroup, list[int]] | None:
        if not isinstance(self._parallel, VocabConfig):
            return None
        return self._mesh.get_group("shard"), vocabulary_shards(vocab_size, self._mesh)


def _shard_vocabulary(model: Any, mesh: DeviceMesh, by_vocabulary: bool) -> None:
    """Shard embedding and head (one parameter if they are tied) by rows. What they compute stays the same."""
    embedding, tied = model.embedding, model.head_weight is model.embedding.weight
    if by_vocabulary:
        vocabulary_shards(len(embedding.weight), mesh)  # raises if the vocabulary is too small
    kind = VocabularyParallelEmbedding if by_vocabulary else GatheredEmbedding
    weight = _cut(embedding.weight, mesh)
    model.set_embedding(kind(weight, embedding.padding_idx))
    model.set_head(weight if tied else _cut(model.head_weight, mesh), rows_here if by_vocabulary else gathered)


def vocabulary_shards(vocab_size: int, mesh: DeviceMesh) -> list[int]:
    """The number of embedding and head rows on each rank of a group.

    Raises:
        ConfigError: some rank would have none.
    """
    ranks = mesh["shard"].size()
    each = shard_rows(vocab_size, ranks)
    shards = [min(each, max(0, vocab_size - rank * each)) for rank in range(ranks)]
    if shards[-1] == 0:
        cause = f"a vocabulary size of {vocab_size} in shards of {each} leave some of {ranks} ranks empty"
        remedy = "use fewer parallel.shard_ranks, a larger size.vocab_size, or parallel=fsdp"
        raise ConfigError(f"parallel=vocab: {cause}", remedy)
    return shards


def _cut(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's rows as a DTensor. All ranks have the same parameter. One on the meta device has no values."""
    rows = row_shard_of(mesh).of(parameter.detach())
    local = torch.empty_like(rows, device=mesh.device_type) if parameter.is_meta else rows.clone()
    placements: list[Placement] = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    return nn.Parameter(
        DTensor.from_local(local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
    )


def row_shard_of(mesh: DeviceMesh) -> RowShard:
    """The rows of every parameter that this rank holds."""
    return RowShard(mesh["shard"].get_local_rank(), mesh["shard"].size())


def shard_rows(rows: int, ranks: int) -> int:
    """Rows of each rank. As with torch.chunk, the last ranks may have fewer or none."""
    return -(-rows // ranks)


class GatheredEmbedding(nn.Module):
    """An embedding (V, D) sharded by rows, gathered in its own dtype for each lookup."""

    def __init__(self, weight: nn.Parameter, padding_idx: int | None) -> None:
        super().__init__()
        self.weight, self.padding_idx = weight, padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        """(…) ids to (…, D)."""
        return F.embedding(ids, gathered(self.weight, self.weight.dtype), self.padding_idx)


def gathered(weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """The whole of a sharded matrix, (V, D) in `dtype`. Its gradient is summed over the group's ranks and scattered."""
    assert isinstance(weight, DTensor)
    groups = [Replicate()] * (weight.device_mesh.ndim - 1)  # :class:`ShardedRanks` sums over them
    every = weight.redistribute(placements=[*groups, Replicate()], forward_dtype=dtype, backward_dtype=torch.float32)
    return every.to_local(grad_placements=[*groups, Partial()])


class VocabularyParallelEmbedding(GatheredEmbedding):
    """Rows stay on their ranks. Every rank looks up the ids of all ranks of the group."""

    def forward(self, ids: Tensor) -> Tensor:
        """(…) ids, the same number on every rank, to (…, D)."""
        weight = self.weight
        assert isinstance(weight, DTensor)
        group = weight.device_mesh.get_group("shard")
        return _LookUp.apply(weight.to_local(), ids.flatten(), len(weight), self.padding_idx, group).view(
            *ids.shape, -1
        )


class _LookUp(torch.autograd.Function):
    """All-gather of ids, then reduce-scatter of vectors; the reverse in the backward pass.

    For each id one rank has the vector and all others add 0, so the sum is exact in any dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, ids: Tensor, rows: int, padding_idx: int | None, group: dist.ProcessGroup
    ) -> Tensor:
        every = ids.new_empty(group.size() * len(ids))
        all_gather(every, ids.contiguous(), group)
        here = every - group.rank() * shard_rows(rows, group.size())
        elsewhere = (here < 0) | (here >= len(local))
        vectors = F.embedding(here.masked_fill(elsewhere, 0), local).masked_fill_(elsewhere[:, None], 0)
        mine = vectors.new_empty(len(ids), local.shape[1])
        reduce_scatter(mine, vectors, group)
        nowhere = elsewhere if padding_idx is None else elsewhere | (every == padding_idx)
        ctx.save_for_backward(here.masked_fill(nowhere, len(local)))
        ctx.group, ctx.rows = group, len(local)
        return mine

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        every = grad.new_empty(len(places), grad.shape[1])
        all_gather(every, grad.contiguous(), ctx.group)
        local = torch.ops.aten.embedding_dense_backward(every, places, ctx.rows + 1, -1, False)[: ctx.rows]
        return local, None, None, None, None


def rows_here(weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """This rank's rows of a matrix, in `dtype`."""
    assert isinstance(weight, DTensor)
    return weight.to_local().to(dtype)


def all_gather(out: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> None:
    """Concatenate every rank's `part` into `out`, in order of rank. (torch 2.13 has a new name for the function.)"""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, part, group=group)


def reduce_scatter(out: Tensor, whole: Tensor, group: dist.ProcessGroup | None) -> None:
    """Put this rank's part of the sum of all ranks' `whole` into `out`. (New name in torch 2.13, too.)"""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, whole, group=group)
