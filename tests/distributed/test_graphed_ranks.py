"""`trainer.cuda_graph=true` on several ranks: every replay gathers parameters and sums gradients anew."""

from typing import Any

import pytest
import torch
from graph_stand_in import Graphs
from rank_process import curve, summary_of
from torch.distributed.tensor import DTensor

from benchmarks.training_step import TrainingStep, random_batch
from linrnn.config import load_config
from linrnn.config.schema import FsdpConfig
from linrnn.distributed import Launch
from linrnn.distributed.sharding import ShardedRanks
from linrnn.losses import build_loss
from linrnn.models import LanguageModel, build_model
from linrnn.models.architecture import resolve
from linrnn.training.optimizer import build_optimizer

CPU = torch.device("cpu")
RUN = ("trainer.max_steps=9", "trainer.warmup_measurement_steps=3", "trainer.valid_every=4", "device=cuda")


class OneShard(ShardedRanks):
    """One rank of a sharded model. It remembers whether parameters were gathered when the model was resharded."""

    def __init__(self, model: LanguageModel, parallel: FsdpConfig) -> None:
        nobody: Any = None
        super().__init__(Launch(), nobody, nobody, parallel)
        self.parallelize(model, torch.float32)
        self.gathered_before = list[bool]()

    def reshard(self) -> None:
        self.gathered_before.append(not _is_sharded(self._model))
        super().reshard()
        assert _is_sharded(self._model)


def _is_sharded(model: LanguageModel) -> bool:
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize("kept", ["true", "false"])
def test_a_replay_begins_with_sharded_parameters_though_a_pass_without_gradients_left_them_gathered(
    kept, group_of_one, monkeypatch
):
    """FSDP leaves parameters gathered after a forward pass whose backward pass never comes, as in a validation. A graph
    that is captured then would never gather, and validations between replays would use the parameters of the first.
    """
    run = load_config(["model=transformer", "size=smoke", "parallel=fsdp", f"parallel.keep_gathered={kept}"])
    arch = resolve(run.model, run.size, 64)
    model = build_model(arch, device=CPU, dtype=torch.float32, seed=0)
    ranks = OneShard(model, run.parallel)
    step = TrainingStep(
        model, build_optimizer(model, run.optimizer, CPU), random_batch(2, 16, 64, 0), tokens=32, precision="fp32",
        device=CPU, max_grad_norm=1.0, ranks=ranks,
    )  # fmt: skip
    loss = build_loss(load_config(["loss=standard"]).loss, device=CPU)
    step(loss)
    graphs = Graphs(monkeypatch)
    replayed = step.graphed(loss)
    for _ in range(2):
        with torch.no_grad():
            model(step.batch.input_ids)
        replayed()
    replayed()
    assert (graphs.captures, graphs.replays) == (1, 3)
    assert ranks.gathered_before == [True, True, False]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("kept", ["parallel.keep_gathered=true", "parallel.keep_gathered=false"])
@pytest.mark.parametrize("parallel", ["fsdp", "vocab"])
def test_on_gpus_losses_are_those_without_a_graph_bit_for_bit(parallel, kept, small, trained):
    run = small(*RUN, f"parallel={parallel}", kept, "trainer.batch_size=4", "loss=cce_kahan")
    plain = trained([*run, "group=plain"], 2)
    graphed = trained([*run, "group=graphed", "trainer.cuda_graph=true"], 2)
    assert "a CUDA graph replays the forward and backward pass" in (graphed / "train.log").read_text()
    assert curve(graphed) == curve(plain)
    assert len(curve(plain)) == 9
    assert summary_of(graphed)["valid_loss_nats"] == summary_of(plain)["valid_loss_nats"]
