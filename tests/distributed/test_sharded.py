"""parallel=fsdp and parallel=vocab on gloo: ranks that share one model train like one process."""

import json
from types import SimpleNamespace
from typing import Any

import cce_kernels as kernels
import pytest
import torch
from rank_process import ROUNDING, as_rank, assert_same_curve, curve, ended, output, start_ranks, summary_of

from linrnn.config import load_config
from linrnn.core.errors import ConfigError
from linrnn.distributed.sharding import vocabulary_shards
from linrnn.experiments.dry_run import print_forecast
from linrnn.models.architecture import resolve
from linrnn.training.checkpoint import found, load_model
from linrnn.training.plan import make_training_plan
from linrnn.training.trainer import Trainer

FSDP = ("parallel=fsdp", "group=fsdp")
VOCAB = ("parallel=vocab", "group=vocab")
TWICE, TWO_GROUPS, UNTIED = "trainer.accumulation_steps=2", "parallel.shard_ranks=2", "size.tie_embeddings=false"
CHECKPOINTED = ("size.num_layers=3", "trainer.activation_checkpointing=full")
TOGETHER = ("parallel.blocks_together=2", "parallel.keep_gathered=true")  # the small models have two or three blocks


def test_the_harness_divides_a_vocabulary_as_the_kernels_do():
    for ranks in (1, 2, 3, 5, 8):
        mesh: Any = {"shard": SimpleNamespace(size=lambda ranks=ranks: ranks)}
        for vocab in (40, 515, 128_256, 131_073):
            assert vocabulary_shards(vocab, mesh) == kernels.vocabulary_shards(vocab, ranks)
    with pytest.raises(ConfigError, match="leave some of 8 ranks empty"):
        vocabulary_shards(9, mesh)


def one_process(overrides: list[str]) -> tuple[Trainer, dict[str, Any]]:
    trainer = Trainer(load_config(overrides))
    return trainer, trainer.fit()


@pytest.mark.parametrize(
    ("world_size", "cut", "more"),
    [
        (2, (*FSDP, TWICE, "trainer.batch_size=1"), ("loss=standard", UNTIED)),
        (4, (*FSDP, "trainer.batch_size=1"), ("loss=cce_kahan", "optimizer.max_grad_norm=null")),
        (2, (*FSDP, TWICE, *TOGETHER, "trainer.batch_size=1"), ("model=kda", "loss=standard", *CHECKPOINTED)),
        (4, (*FSDP, TWICE, "trainer.batch_size=1", TWO_GROUPS), ("model=transformer", "loss=standard")),
        (2, (*VOCAB, TWICE, "trainer.batch_size=2"), ("model=gated_deltanet", "loss=cce_kahan", UNTIED)),
        (4, (*VOCAB, "trainer.batch_size=4"), ("loss=cce_filter", "loss.filter_eps=0.001")),
        (4, (*VOCAB, TWICE, "trainer.batch_size=2", TWO_GROUPS), ("model=transformer", "loss=cce_kahan", UNTIED)),
    ],
)
def test_n_ranks_have_the_losses_gradients_and_validation_of_one(world_size, cut, more, small, trained):
    """The ranks do not divide the vocabulary, they have different numbers of labels, and there are fewer validation
    batches than ranks. The checkpoint equals that of one process.
    """
    common = (*more, "data.reset_at_document=true", "trainer.valid_every=2", "size.vocab_size=515")
    rows = 8 if TWO_GROUPS in cut else 4
    one, reference = one_process(small(*common, f"trainer.batch_size={rows}"))
    directory = trained(small(*common, *cut), world_size)
    assert_same_curve(directory, one.directory.path)
    summary = summary_of(directory)
    assert summary["valid_loss_nats"] == pytest.approx(reference["valid_loss_nats"], rel=ROUNDING)
    for name in ("steps", "tokens", "status", "data_fingerprint", "n_parameters"):
        assert summary[name] == reference[name]
    shards = 2 if TWO_GROUPS in cut else world_size
    assert summary["memory_bytes"]["parameters"] < 1.05 * reference["memory_bytes"]["parameters"] / shards
    trained_by_one = {name: tensor.clone() for name, tensor in one.model.hf.state_dict().items()}
    load_model(found(directory / "checkpoints")[-1], one.model.hf)
    for name, tensor in one.model.hf.state_dict().items():
        assert (tensor - trained_by_one[name]).abs().max() < 2e-3, name  # AdamW's steps of 1e-3, whatever the gradient


of_one_process: dict[tuple[str, ...], dict[int, tuple[float, float]]] = {}


def on_gpus(world_size: int, *cut: str) -> Any:
    few = torch.cuda.device_count() < world_size
    marks = [pytest.mark.gpu, pytest.mark.skipif(few, reason=f"needs {world_size} GPUs")]
    return pytest.param("cuda", world_size, cut, marks=marks)


@pytest.mark.parametrize("model", ["gla", "transformer"])
@pytest.mark.parametrize(
    ("device", "world_size", "cut"),
    [
        ("cpu", 2, (*FSDP, "trainer.batch_size=2")),
        on_gpus(2, "parallel=ddp", "group=ddp", "trainer.batch_size=2"),
        on_gpus(2, *FSDP, "trainer.batch_size=2"),
        on_gpus(2, *VOCAB, "trainer.batch_size=4"),
        on_gpus(4, "parallel=ddp", "group=ddp", "trainer.batch_size=1"),
        on_gpus(4, *FSDP, "trainer.batch_size=1"),
        on_gpus(4, *FSDP, "trainer.batch_size=1", "parallel.shard_ranks=2"),
        on_gpus(4, *VOCAB, "trainer.batch_size=4"),
        on_gpus(4, *VOCAB, "trainer.batch_size=2", "parallel.shard_ranks=2", "size.tie_embeddings=false"),
    ],
)
def test_in_mixed_precision_the_losses_differ_by_its_rounding(device, world_size, cut, model, small, trained, request):
    """Compared with one process in fp32. Two runs in bf16 may differ from each other by twice as much.

    The gradients' norms are the Transformer's. GLA's first gradients multiply rounding errors
    (a first token's small q·k in some head): on one processor its third norm in bf16 differs by 9 % in one process.
    On GPUs FLA's kernels are not tuned.
    """
    size = (f"model={model}", *(override for override in cut if override.startswith("size.")))
    options = (f"model={model}", f"device={device}", "trainer.precision=bf16_autocast", "size.vocab_size=515")
    if (device, *size) not in of_one_process:
        if device == "cuda":
            request.getfixturevalue("untuned")
        one, _ = one_process(small(*options, *size[1:], "trainer.batch_size=4", "trainer.precision=fp32"))
        of_one_process[device, *size] = curve(one.directory.path)
    expected = of_one_process[device, *size]
    directory = trained(small(*options, *cut), world_size)
    assert curve(directory).keys() == expected.keys()
    for step, (loss, norm) in curve(directory).items():
        assert loss == pytest.approx(expected[step][0], rel=2e-3), step
        if model == "transformer":
            assert norm == pytest.approx(expected[step][1], rel=2e-2), step


@pytest.mark.parametrize(("optimizer", "rounding"), [("adamw", ROUNDING), ("muon", 1e-3)])  # Muon's is that of bf16
def test_a_run_continues_with_another_number_of_ranks(optimizer, rounding, small, trained):
    same = ("schedule=constant", "schedule.steps=4", "schedule.warmup_steps=0", "size.vocab_size=515")
    same = (*same, f"optimizer={optimizer}", *(["model=transformer"] if optimizer == "muon" else []))
    one, _ = one_process(small(*same, "trainer.batch_size=4", "trainer.max_steps=4"))
    first = trained(small(*same, *FSDP, "trainer.batch_size=1", "trainer.max_steps=2"), 4)
    parts = found(first / "checkpoints")[-1].glob("*.safetensors")
    files = {path.name.split("-model")[0]: path.stat().st_size for path in parts}
    assert files.keys() == {f"shard-{rank:05d}" for rank in (1, 2, 3, 4)}, "every rank writes a file"
    assert max(files.values()) < 0.3 * sum(files.values()), "its part of model and moments"
    second = trained(small(*same, *FSDP, "trainer.batch_size=2", "trainer.max_steps=4"), 2)
    assert second == first
    assert "resuming at step 2" in (second / "train.log").read_text()
    assert_same_curve(second, one.directory.path, rounding)


def test_a_dry_run_foresees_what_a_rank_holds(small, monkeypatch, capsys):
    as_rank(monkeypatch.setenv, 0, 8)
    held = {}
    for parallel in ("ddp", "fsdp", "vocab"):
        config = load_config(small(f"parallel={parallel}", "size=mve", "trainer.batch_size=8"))
        print_forecast(config)
        said = capsys.readouterr().out
        assert "FLOPs per step and rank" in said
        held[parallel] = make_training_plan(config).memory_estimate(resolve(config.model, config.size, 32000))
    assert held["ddp"].state["parameters"] == pytest.approx(8 * held["fsdp"].state["parameters"], rel=1e-6)
    assert held["ddp"].peak > held["fsdp"].peak > held["vocab"].peak


def test_what_fsdp_cannot_cut_is_refused_once(small, tmp_path):
    log = tmp_path / "ranks"
    overrides = small(*FSDP, "model=kda", "trainer.precision=bf16")
    assert ended(start_ranks(overrides, 2, log)) == [4] * 2, output(log, 2)
    assert output(log, 2).count("error: ") == 1
    assert "FLA keeps some parameters of kda in fp32" in output(log, 2)


def test_the_benchmark_of_several_gpus_writes_its_tables(tmp_path, command):
    vocab = "vocab blocks_together=2 keep_gathered=true"
    overrides = (
        "device=cpu", "models=[transformer/smoke]", f"weak=['{vocab}',ddp]", "batch_size=2", "seq_len=80", "steps=1",
        "warmup=1", "repeats=2", f"output_dir={tmp_path}",
    )  # fmt: skip
    log = tmp_path / "log"
    ranks = start_ranks(list(overrides), 2, log, script="benchmarks/parallel.py")
    assert ended(ranks, seconds=120) == [0, 0], output(log, 2)
    steps = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["parallel"], row["scaling"], row["repeat"]) for row in steps] == [
        (*of, repeat) for repeat in (1, 2) for of in (("none", "alone"), (vocab, "weak"), ("ddp", "weak"))
    ]
    for row in steps:
        assert row["host_ms"] > 0
        alone = next(one for one in steps if one["parallel"] == "none" and one["repeat"] == row["repeat"])
        speed = None if row is alone else pytest.approx(alone["step_ms"] / row["step_ms"])
        assert row["efficiency"] == speed
    page = (tmp_path / "steps.md").read_text()
    assert f"| transformer smoke | {vocab} | weak | 2 | 2 |" in page
    again = command("benchmarks/parallel.py", "measure=false", f"output_dir={tmp_path}")
    assert again.returncode == 0, again.stdout + again.stderr
    assert (tmp_path / "steps.md").read_text() == page
