"""Ranks that share a model draw its weights after it is sharded. They equal those of one process bit for bit."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fitting import fitted
from forked import print_into, spawn, start
from rank_process import _of_ranks, _rank, assert_same_curve, ended, free_port, output, set_launch
from torch.profiler import ProfilerActivity, profile

from linrnn.config import load_config
from linrnn.distributed.sharding import make_mesh, row_shard_of, shard
from linrnn.models import BlankModel, LanguageModel, build_model
from linrnn.models.architecture import resolve
from linrnn.models.language_model import parameter_dtype


def compare(rank: int, world_size: int, port: int, overrides: list[str], device_type: str, log: str) -> None:
    """Shard a model before its weights are drawn, and one that `build_model` made. Both must be the same."""
    print_into(log)
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
    for blank in (BlankModel(arch, row_shard_of(mesh), **how), None):
        model = blank.model if blank else build_model(arch, **how, seed=3)
        shard(model, mesh, torch.float32, config.parallel)
        if blank:
            blank.init_weights(3)
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
    print_into(log)
    set_launch(rank, world_size, port)
    config = load_config(["parallel=fsdp", "model=gla", "size.num_layers=20", "size.hidden_size=256"])
    dist.init_process_group("gloo")
    mesh = make_mesh(config.parallel, "cpu")
    arch = resolve(config.model, config.size, 515)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        if deferred:
            blank = BlankModel(arch, row_shard_of(mesh), device=torch.device("cpu"))
            model = blank.model
        else:
            model = build_model(arch, device="cpu", seed=3)
        shard(model, mesh, torch.float32, config.parallel)
        if deferred:
            blank.init_weights(3)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    print("share", max(itertools.accumulate(sizes)) / (4 * arch.n_parameters))
    dist.destroy_process_group()


def without_drawing(*arguments: Any) -> None:
    """A rank of train.py that must not draw initial weights."""
    with patch.object(BlankModel, "init_weights", side_effect=AssertionError("weights were drawn")):
        _rank(*arguments)


CASES = [
    ["model=gla", "parallel=fsdp"],
    ["model=gated_deltanet", "parallel=vocab", "size.tie_embeddings=false"],
    ["model=kda", "parallel=fsdp"],
    ["model=transformer", "parallel=fsdp", "size.tie_embeddings=false", "trainer.precision=bf16"],
    ["model=fla", "model.config=delta_net", "parallel=vocab"],
]


def arguments(*more: object, tmp_path: Path, ranks: int = 2) -> list[tuple]:
    port = free_port()
    return [(rank, ranks, port, *more, f"{tmp_path / 'ranks'}.{rank}") for rank in range(ranks)]


def printed(function: Callable[..., None], of_ranks: list[tuple], tmp_path: Path, device: str = "cpu") -> str:
    """What the function prints in a process for each tuple of arguments. None may fail."""
    begin = start if device == "cpu" else spawn
    codes = ended([begin(function, *each) for each in of_ranks], seconds=240)
    text = output(tmp_path / "ranks", len(of_ranks))
    assert codes == [0] * len(of_ranks), text
    return text


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        *((2, case) for case in CASES if case[0] not in ("model=gla", "model=kda")),
        (4, ["model=gla", "parallel=fsdp", "parallel.shard_ranks=2"]),
        (4, ["model=kda", "parallel=fsdp"]),
        (4, ["model=kda", "parallel=vocab"]),
    ],
    ids=lambda value: "".join(value) if isinstance(value, list) else f"{value}",
)
def test_weights_drawn_after_sharding_are_those_of_one_process(ranks, overrides, tmp_path):
    """Also dtypes, buffers, ties, FLA's marks on parameters, and the state of the generator."""
    printed(compare, arguments(overrides, "cpu", tmp_path=tmp_path, ranks=ranks), tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("overrides", CASES, ids=lambda overrides: overrides[0] + overrides[1])
def test_on_gpus_weights_drawn_after_sharding_are_those_of_one_process(overrides, tmp_path):
    printed(compare, arguments(overrides, "cuda", tmp_path=tmp_path), tmp_path, "cuda")


def test_no_rank_ever_holds_the_whole_model(tmp_path):
    """Two ranks hold half of the model each. Tensors take that half and what drawing needs besides."""
    shares = {}
    for deferred in (True, False):
        text = printed(peak, arguments(deferred, tmp_path=tmp_path), tmp_path)
        shares[deferred] = [float(share) for share in re.findall(r"^share (.+)$", text, re.MULTILINE)]
        assert len(shares[deferred]) == 2, text
    assert max(shares[True]) < 0.6
    assert min(shares[False]) >= 1, "the test would notice"


def test_weights_that_are_loaded_are_not_drawn_before(small, tmp_path):
    same = ("schedule=constant", "schedule.steps=4", "schedule.warmup_steps=0", "trainer.max_steps=2")
    fitted(small(*same, "group=first")).model.hf.save_pretrained(tmp_path / "out")
    begin = (*same, f"init_from={tmp_path}/out", "trainer.batch_size=4")
    one = fitted(small(*begin, "trainer.max_steps=3"))
    cut = ("parallel=fsdp", "group=fsdp", "trainer.batch_size=2")
    for steps in (2, 3):
        overrides = small(*begin, *cut, f"trainer.max_steps={steps}")
        printed(without_drawing, _of_ranks(overrides, 2, tmp_path / "ranks", "", "train.py"), tmp_path)
    [directory] = (tmp_path / "results" / "fsdp").iterdir()
    assert "resuming at step 2" in (directory / "train.log").read_text()
    assert_same_curve(directory, one.directory.path, 5e-5)
