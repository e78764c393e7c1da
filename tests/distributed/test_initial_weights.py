"""Ranks that share a model draw its weights after it is sharded. They equal those of one process bit for bit."""

import re
from pathlib import Path

import pytest
import torch
from forked import spawn
from initial_weights import compare, peak, without_drawing
from rank_process import _of_ranks, curve, ended, free_port, output

from linrnn.config import load_config
from linrnn.training.trainer import Trainer

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


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        *((2, case) for case in CASES),
        (4, ["model=gla", "parallel=fsdp", "parallel.shard_ranks=2"]),
        (4, ["model=kda", "parallel=fsdp"]),
        (4, ["model=kda", "parallel=vocab"]),
    ],
    ids=lambda value: "".join(value) if isinstance(value, list) else f"{value}",
)
def test_weights_drawn_after_sharding_are_those_of_one_process(ranks, overrides, pool, tmp_path):
    """Also dtypes, buffers, ties, FLA's marks on parameters, and the state of the generator."""
    codes = pool.run(compare, arguments(overrides, "cpu", tmp_path=tmp_path, ranks=ranks), seconds=60)
    assert codes == [0] * ranks, output(tmp_path / "ranks", ranks)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("overrides", CASES, ids=lambda overrides: overrides[0] + overrides[1])
def test_on_gpus_weights_drawn_after_sharding_are_those_of_one_process(overrides, tmp_path):
    ranks = [spawn(compare, *each) for each in arguments(overrides, "cuda", tmp_path=tmp_path)]
    assert ended(ranks, seconds=240) == [0, 0], output(tmp_path / "ranks", 2)


def test_no_rank_ever_holds_the_whole_model(pool, tmp_path):
    """Two ranks hold half of the model each. Tensors take that half and what drawing needs besides."""
    shares = {}
    for deferred in (True, False):
        codes = pool.run(peak, arguments(deferred, tmp_path=tmp_path), seconds=60)
        printed = output(tmp_path / "ranks", 2)
        assert codes == [0, 0], printed
        shares[deferred] = [float(share) for share in re.findall(r"^share (.+)$", printed, re.MULTILINE)]
        assert len(shares[deferred]) == 2, printed
    assert max(shares[True]) < 0.6
    assert min(shares[False]) >= 1, "the test would notice"


def test_weights_that_are_loaded_are_not_drawn_before(small, pool, tmp_path):
    """From an export, and from the run's own checkpoint. Both are read by ranks that cannot draw."""
    same = ("schedule=constant", "schedule.steps=4", "schedule.warmup_steps=0", "trainer.max_steps=2")
    first = Trainer(load_config(small(*same, "group=first")))
    first.fit()
    first.model.hf.save_pretrained(tmp_path / "out")
    start = (*same, f"init_from={tmp_path}/out", "trainer.batch_size=4")
    one = Trainer(load_config(small(*start, "trainer.max_steps=3")))
    one.fit()
    cut = ("parallel=fsdp", "group=fsdp", "trainer.batch_size=2")
    for steps in (2, 3):
        overrides = small(*start, *cut, f"trainer.max_steps={steps}")
        ranks = _of_ranks(overrides, 2, tmp_path / "ranks", "", "train.py")
        assert pool.run(without_drawing, ranks, seconds=60) == [0, 0], output(tmp_path / "ranks", 2)
    [directory] = (tmp_path / "results" / "fsdp").iterdir()
    assert "resuming at step 2" in (directory / "train.log").read_text()
    expected = curve(one.directory.path)
    assert curve(directory).keys() == expected.keys()
    for step, figures in curve(directory).items():
        assert figures == pytest.approx(expected[step], rel=5e-5), step
