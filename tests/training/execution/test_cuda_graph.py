"""`trainer.cuda_graph=true`: which step is captured, the same losses bit for bit, and what is refused."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from fitting import fitted, losses, summary_of
from graph_stand_in import Graphs

from linrnn.config import load_config
from linrnn.core.errors import ConfigError, UnsupportedError
from linrnn.core.machine import GIB
from linrnn.training.execution.cuda_graph import check_cuda_graph
from linrnn.training.trainer import Trainer

GRAPH = "trainer.cuda_graph=true"
RUN = ("trainer.max_steps=9", "trainer.warmup_measurement_steps=3")
RUN += ("trainer.valid_every=5", "trainer.checkpoint_every=4")
MODELS = ("gla", "kda", "transformer")
LOSSES = ("cce_kahan", "cce_filter", "compiled", "standard", "fla")


@pytest.mark.parametrize(
    ("overrides", "ranks", "cause", "remedy"),
    [
        (["trainer.accumulation_steps=2"], 1, "overwrites the gradients of the micro-step before", "steps=1"),
        (["data.reset_at_document=true"], 1, "every batch gets other sequences", "data.reset_at_document=false"),
        (["trainer.activation_checkpointing=full"], 1, "reads the state of the random numbers", "checkpointing=none"),
        (["trainer.compile=blocks"], 1, "trainer.compile=blocks was not tried with it", "trainer.compile=none"),
        (["trainer.warmup_measurement_steps=1"], 1, "the last step of the warm-up is captured", "steps=2 or more"),
        (["trainer.max_steps=2"], 1, "the last step of the warm-up is captured", "at least three steps"),
        (["parallel=ddp"], 2, "parallel=ddp was not tried with a CUDA graph", "parallel=fsdp"),
        (["parallel=vocab", "parallel.shard_ranks=2"], 4, "several groups of ranks", "parallel.shard_ranks=4"),
        (["parallel=fsdp"], 2, None, ""),
        (["parallel=ddp"], 1, None, ""),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(overrides, ranks, cause, remedy, small):
    config = load_config(small(GRAPH, "trainer.max_steps=9", *overrides))
    with pytest.raises(ConfigError, match=cause) if cause else contextlib.nullcontext() as caught:
        check_cuda_graph(config, torch.device("cuda"), ranks, config.trainer.max_steps)
    assert caught is None or all(word in caught.value.remedy for word in (remedy, "trainer.cuda_graph=false"))


def test_a_loss_whose_host_waits_is_refused_with_the_losses_that_do_not(small):
    with pytest.raises(UnsupportedError, match=r"(?s)loss=torch_native may let its host wait for the GPU.*cce_kahan"):
        check_cuda_graph(load_config(small(GRAPH, "loss=torch_native")), torch.device("cuda"), 1, 9)


def test_a_cpu_is_refused(small):
    with pytest.raises(UnsupportedError, match="needs a GPU"):
        Trainer(load_config(small(GRAPH)))


def test_the_last_step_of_the_warm_up_is_captured_and_all_later_ones_are_replayed(small, monkeypatch, capsys):
    plain = fitted(small(*RUN))
    graphs = Graphs(monkeypatch)
    graphed = fitted(small(*RUN, GRAPH))
    assert (graphs.captures, graphs.replays) == (1, 9 - 2)
    assert losses(graphed) == losses(plain)
    assert graphed._graphed._graph is None, "the ranks could not leave NCCL otherwise"
    assert "from step 3 on a CUDA graph replays the forward and backward pass" in capsys.readouterr().out
    summary = summary_of(graphed)
    assert summary["loss_layer_ms"] is None
    assert summary["measured_steps"] == 9 - 3
    assert "trainer.cuda_graph=True" in summary["training"]
    assert graphed.plan.steps_before_memory == 2
    assert plain.plan.steps_before_memory == 3


def test_what_the_device_refuses_to_capture_is_unsupported(small, monkeypatch):
    graphs = Graphs(monkeypatch)

    @contextlib.contextmanager
    def capture(graph: object, **_: object) -> Iterator[None]:
        yield
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", capture)
    with pytest.raises(UnsupportedError, match=r"a CUDA graph cannot hold .*not permitted when stream is capturing"):
        fitted(small(*RUN, GRAPH))
    assert graphs.replays == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("model", MODELS)
def test_on_a_gpu_losses_are_those_without_a_graph_bit_for_bit(model, loss, small):
    run = (*RUN, f"model={model}", f"loss={loss}", "device=cuda")
    plain, graphed = fitted(small(*run)), fitted(small(*run, GRAPH))
    assert losses(graphed) == losses(plain)
    assert len(losses(plain)) == 9


@pytest.mark.gpu
@pytest.mark.usefixtures("untuned")
def test_on_a_gpu_the_memory_measured_in_the_capture_is_that_of_a_step(small):
    """Activations of some GiB. With small ones the workspaces of cuBLAS decide.

    Each stream takes such a workspace when it first multiplies (32 MiB on an H100, with cublasLt's up to 70 MiB), and
    a capture has a stream of its own. Two runs of one process also begin beside other leftovers: hence 80 MiB.
    """
    batch = ("trainer.batch_size=64", "trainer.seq_len=1024", "data.n_tokens=700000", "size.vocab_size=4096")
    run = (*RUN, *batch, "model=transformer", "loss=standard", "device=cuda")
    summaries = [fitted(small(*run, *more)).directory.read_summary() for more in ((), (GRAPH,))]
    plain_peak, peak = (summary["memory_bytes"]["peak"] for summary in summaries if summary)
    assert plain_peak > 2 * GIB
    assert abs(peak - plain_peak) < 0.05 * plain_peak + 80 * 2**20


@pytest.mark.gpu
@pytest.mark.usefixtures("untuned")
def test_on_a_gpu_a_stopped_run_goes_on_with_a_graph_of_its_own(small):
    run = (*RUN, GRAPH, "device=cuda", "schedule.steps=9")
    whole = losses(fitted(small(*run, "group=whole")))
    fitted(small(*run, "group=parts", "trainer.max_steps=5"))
    assert losses(fitted(small(*run, "group=parts"))) == whole
