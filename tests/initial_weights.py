"""What the ranks of tests/distributed/test_initial_weights.py do."""

import gc
import itertools
import os
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rank_process import _rank, set_launch
from torch.profiler import ProfilerActivity, profile

from linrnn.config import load_config
from linrnn.distributed.sharding import make_mesh, part_of, shard
from linrnn.models import BlankModel, LanguageModel, build_model
from linrnn.models.architecture import resolve
from linrnn.models.language_model import parameter_dtype


def compare(rank: int, world_size: int, port: int, overrides: list[str], device_type: str, log: str) -> None:
    """Shard a model before its weights are drawn, and one that `build_model` made. Both must be the same."""
    _into(log)
    set_launch(rank, world_size, port)
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    config = load_config(overrides)
    arch = resolve(config.model, config.size, 515)
    how: dict[str, Any] = {"device": torch.device(device_type)}
    how["dtype"] = parameter_dtype(config.trainer.precision)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    mesh = make_mesh(config.parallel, device_type)
    models = []
    state = torch.get_rng_state()
    for blank in (BlankModel(arch, part_of(mesh), **how), None):
        model = blank.model if blank else build_model(arch, **how, seed=3)
        shard(model, mesh, torch.float32, config.parallel)
        if blank:
            blank.draw(3)
        models.append(model)
    assert torch.equal(torch.get_rng_state(), state)
    ours, plain = map(_described, models)
    assert ours.keys() == plain.keys()
    for name, (tensor, facts) in ours.items():
        assert torch.equal(tensor, plain[name][0]), name
        assert facts == plain[name][1], name
    assert (models[0].head_weight is models[0].embedding.weight) == arch.tie_embeddings
    dist.destroy_process_group()


def _described(model: LanguageModel) -> dict[str, tuple[torch.Tensor, tuple]]:
    """Every parameter and buffer: its rows on this rank, and its type, dtype, device, shape and marks."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: (
            tensor.to_local() if hasattr(tensor, "to_local") else tensor,
            (type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.requires_grad, vars(tensor)),
        )
        for name, tensor in named
    }


def peak(rank: int, world_size: int, port: int, deferred: bool, log: str) -> None:
    """Print the most bytes that tensors held at once while this rank got its part of a model, over the model's bytes.

    torch's CPU allocator reports every block that it gives and takes back. The process's own memory says less: the C
    library keeps freed blocks, and gives them out again.
    """
    _into(log)
    set_launch(rank, world_size, port)
    config = load_config(["parallel=fsdp", "model=gla", "size.num_layers=20", "size.hidden_size=256"])
    dist.init_process_group("gloo")
    mesh = make_mesh(config.parallel, "cpu")
    arch = resolve(config.model, config.size, 515)
    gc.collect()  # models of the process's earlier runs, which would count as given back
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        if deferred:
            blank = BlankModel(arch, part_of(mesh), device=torch.device("cpu"))
            model = blank.model
        else:
            model = build_model(arch, device="cpu", seed=3)
        shard(model, mesh, torch.float32, config.parallel)
        if deferred:
            blank.draw(3)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    print("share", max(itertools.accumulate(sizes)) / (4 * arch.n_parameters))
    dist.destroy_process_group()


def without_drawing(*arguments: Any) -> None:
    """A rank of train.py that must not draw initial weights."""
    with patch.object(BlankModel, "draw", side_effect=AssertionError("weights were drawn")):
        _rank(*arguments)


def _into(log: str) -> None:
    with open(log, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
