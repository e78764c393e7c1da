"""benchmarks/steps.py on tiny models: real steps on a CPU, ratios from the rows' raw times, what is refused."""

import math
from pathlib import Path
from statistics import median

import pytest
import torch
from fitting import fitted, losses
from graph_stand_in import Graphs

from benchmarks import steps
from benchmarks.steps import write_report
from benchmarks.steps_rows import AGAIN, Row, ratio_of, read_rows
from benchmarks.training_step import TrainingStep
from linrnn.config import load_config
from linrnn.core.errors import ConfigError
from linrnn.models import build_model
from linrnn.runs.intervals import estimate
from linrnn.training.checkpoint import found
from linrnn.training.optimizer import build_optimizer
from linrnn.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("traced")
SMALL = "size=smoke size.vocab_size=96 trainer.batch_size=2 trainer.seq_len=16 trainer.precision=fp32"
GLA = f"model=gla {SMALL}"
GRAPH = "trainer.cuda_graph=true"
MUON = f"model=transformer {SMALL} optimizer=muon trainer.activation_checkpointing=full"


def config_of(folder: Path, *overrides: str, models: str = f'["{GLA}"]') -> steps.BenchConfig:
    small = ["rounds=3", "steps=2", "warmup=1", "device=cpu", f"output_dir={folder}", *overrides]
    return load_config([f"models={models}", *small], "bench_steps")


def measured(folder: Path, *overrides: str, models: str = f'["{GLA}"]') -> list[Row]:
    return steps.run_benchmark(config_of(folder, *overrides, models=models))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    measured(folder, "losses=['cce_kahan  accumulate=fp32',liger]", models=f'["{GLA}","{MUON}"]')
    return folder


def test_the_baseline_comes_first_and_twice_and_all_losses_agree(folder):
    rows = read_rows(folder)
    assert [row.loss for row in rows] == 2 * ["compiled", AGAIN, "cce_kahan accumulate=fp32", "liger"]
    for own in (rows[:3], rows[4:7]):
        for row in own:
            assert (row.status, row.rounds, len(row.host_ms), row.steps) == ("ok", 3, 3, 2)
            assert row.loss_nats == pytest.approx(math.log(96), rel=0.1)
            assert row.loss_nats == pytest.approx(own[0].loss_nats, rel=1e-5)
            assert row.gradient_norm == pytest.approx(own[0].gradient_norm, rel=1e-4)
            assert all(host <= wall for host, wall in zip(row.host_ms, row.wall_ms, strict=True))
            assert 0 < row.loss_layer_share < 1
            assert (row.peak_gib, row.allocations, row.sm_mhz) == (None, None, []), "of a GPU"


def test_speeds_and_ratios_follow_from_the_raw_times(folder):
    compiled, again, *_ = rows = read_rows(folder)
    assert again.step_ms == median(again.wall_ms)
    assert again.tokens_per_second == pytest.approx(2 * 16 / again.step_ms * 1e3)
    pairs = [ms / base for ms, base in zip(again.wall_ms, compiled.wall_ms, strict=True)]
    assert ratio_of(again, compiled) == estimate(pairs, ratios=True)
    assert ratio_of(rows[3], compiled) is None, "Liger has no rounds here"


def test_a_loss_that_cannot_run_here_is_a_row(folder):
    liger = read_rows(folder)[3]
    assert (liger.status, liger.rounds) == ("unsupported", 0)
    assert "NVIDIA GPU" in liger.reason
    assert write_report(folder) == [folder / "steps.md"]
    text = (folder / "steps.md").read_text()
    assert text.count("\n## ") == 3
    assert "## gla smoke, 2 x 16 tokens, V = 96, precision=fp32: `model=gla " in text
    assert text.count("* `liger`: unsupported. ") == 2
    assert text.count("| `compiled, again` | 3 |") == 2
    assert "`: commit " in text


def test_a_loss_that_runs_out_of_memory_ends_neither_its_line_nor_the_next(tmp_path, monkeypatch):
    turn = steps.Bench._turn

    def fails(bench: steps.Bench, loss: object, row: Row) -> None:
        if row.loss == "cce_kahan" and row.model == "gla" and row.rounds == 1:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 7.83 GiB. GPU 0 has a total capacity of 79.18 GiB\nof which"
            )
        turn(bench, loss, row)  # type: ignore[arg-type]

    monkeypatch.setattr(steps.Bench, "_turn", fails)
    rows = measured(tmp_path, "losses=[cce_kahan]", models=f'["{GLA}","{MUON}"]')
    assert [(row.status, row.rounds) for row in rows] == [
        *(("ok", 3), ("ok", 3), ("out_of_memory", 1)), *3 * [("ok", 3)],
    ]  # fmt: skip
    assert rows[2].reason.startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 7.83 GiB.")
    assert ratio_of(rows[2], rows[0]) is None


def test_every_turn_captures_its_loss_and_its_graph_dies_with_the_turn(folder, tmp_path, monkeypatch):
    graphs = Graphs(monkeypatch)
    rows = measured(tmp_path, "losses=['cce_kahan accumulate=fp32',torch_native]", models=f'["{GLA} {GRAPH}"]')
    assert [row.status for row in rows] == [*3 * ["ok"], "unsupported"]
    assert "loss=torch_native may let its host wait for the GPU" in rows[3].reason
    assert graphs.captures == 3 * (1 + 3), "in the warm-up of each loss, and in each of three rounds"
    assert graphs.replays == 3 * (1 + 3 * (1 + 1 + 2)), "a round: the capture, one step that settles, two timed ones"
    assert graphs.most_alive == 1
    for row, eager in zip(rows[:3], read_rows(folder), strict=False):
        assert (row.loss, row.loss_nats, row.gradient_norm) == (eager.loss, eager.loss_nats, eager.gradient_norm)
        assert (row.rounds, row.loss_layer_ms, row.loss_layer_share) == (3, None, None)
    write_report(tmp_path)
    text = (tmp_path / "steps.md").read_text()
    assert "V = 96, precision=fp32, cuda_graph=true: `" in text


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_is_the_trainers_step(optimizer, small):
    options = (f"optimizer={optimizer}", "optimizer.max_grad_norm=0.1", "schedule=constant", "schedule.warmup_steps=0")
    trainer = Trainer(load_config(small(*options)))
    config, position = trainer.config, trainer.loader.state_dict()
    batch = next(trainer.loader)
    model = build_model(trainer.architecture, device="cpu", seed=config.seed)
    own = TrainingStep(
        model, build_optimizer(model, config.optimizer, trainer.device), batch, tokens=batch.n_tokens,
        precision="fp32", device=trainer.device, max_grad_norm=config.optimizer.max_grad_norm,
    )  # fmt: skip
    trainer.model.train()
    for _ in range(2):
        trainer.loader.load_state_dict(position)
        trainer.train_step()
        own(trainer.loss)
    for ours, theirs in zip(model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.grad is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{GLA} loss=liger", "'loss=liger' has no meaning"),
        (f"{GLA} data=text", "data.path"),
        (f"{GLA} init_from=results/x", "add the data that they were trained with"),
        (f"{GLA} parallel=ddp", "has no meaning .* on one GPU"),
        (f"{GLA} optimizer.lr=1", "without the learning rate"),
        ("model=gla size=smoke", "has no vocabulary"),
        (f"{GLA} size.hiden_size=2", "there is no such key"),
        (f"{GLA} trainer.compile=blocks trainer.activation_checkpointing=selective", "a compiled block shows none"),
    ],
)
def test_what_has_no_meaning_is_refused_before_anything_is_measured(line, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        measured(tmp_path, models=f'["{MUON}","{line}"]')
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_line_may_start_from_a_run_and_its_data(tmp_path, small):
    """The first values are those of the run's next step on the data's first batch."""
    trained = fitted(small("optimizer.lr=0.01", "schedule=constant"))
    source, vocabulary = trained.directory.path, trained.architecture.vocab_size
    [loss] = losses(fitted(small(f"init_from={source}", "trainer.max_steps=1")))
    kept = ("trainer.batch_size", "trainer.seq_len", "data")
    data = " ".join(["trainer.precision=fp32", *(word for word in small() if word.startswith(kept))])
    rows = measured(tmp_path / "rows", "losses=[]", models=f'["{data} init_from={source}","{data}"]')
    assert {(row.status, row.v) for row in rows} == {("ok", vocabulary)}
    assert rows[0].loss_nats == pytest.approx(loss, rel=1e-5)
    assert rows[2].loss_nats > rows[0].loss_nats, "random weights"
    [checkpoint] = found(trained.directory.checkpoints)
    assert [(row.weights, row.text) for row in rows[::2]] == [
        (str(checkpoint), trained.data.fingerprint),
        (None, trained.data.fingerprint),
    ]
    write_report(tmp_path / "rows")
    assert f"init_from={source.name}: `" in (tmp_path / "rows" / "steps.md").read_text()


@pytest.mark.gpu
def test_losses_take_turns_with_graphs_of_their_own_on_a_gpu(tmp_path):
    """Values are those of eager passes, and a replay allocates nothing beyond what the eager step needs."""
    line = GLA.replace("fp32", "auto")
    rows = measured(tmp_path, "device=cuda", "losses=[cce_kahan,liger]", models=f'["{line}","{line} {GRAPH}"]')
    assert [row.status for row in rows] == [*7 * ["ok"], "unsupported"]
    assert "loss=liger may let its host wait for the GPU" in rows[7].reason
    for eager, graphed in zip(rows[:3], rows[4:7], strict=True):
        assert (graphed.loss, graphed.loss_nats) == (eager.loss, pytest.approx(eager.loss_nats, rel=1e-4))
        assert (graphed.rounds, graphed.loss_layer_ms) == (3, None)
        assert graphed.allocations == 0
        assert graphed.peak_gib == pytest.approx(eager.peak_gib, rel=0.05, abs=80 / 1024)  # workspaces of cuBLAS
        assert median(graphed.host_ms) < median(eager.host_ms)


def test_each_loss_may_have_a_batch_of_its_own(tmp_path):
    rows = measured(tmp_path, "losses=[standard,cce_kahan]", "batch_sizes=[2,1,3]")
    assert [(row.loss, row.batch) for row in rows] == [("compiled", 2), (AGAIN, 2), ("standard", 1), ("cce_kahan", 3)]
    compiled, _, eager, ours = rows
    pairs = [ms / base / 1.5 for ms, base in zip(ours.wall_ms, compiled.wall_ms, strict=True)]
    ratio = ratio_of(ours, compiled)
    assert ratio.value == pytest.approx(median(pairs)), "for equally many tokens"
    assert ours.tokens_per_second == pytest.approx(3 * 16 / median(ours.wall_ms) * 1e3)
    assert len({row.loss_nats for row in (compiled, eager, ours)}) == 3, "other batches have other losses"
