"""Ranges, timers, memory and traces measure the right things and do not change the training step."""

import contextlib
import functools
import json
import statistics
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from linrnn import profiling
from linrnn.core.errors import StorageError
from linrnn.profiling import MemoryByComponent, SpeedMeter, Stopwatch, memory_snapshot, observe, trace, watched_loss

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Output:
    sum_nats: torch.Tensor
    n_tokens: int = 5


class TracedLoss(torch.autograd.Function):
    """Σ hidden weightᵀ. Records its backward pass, and the place of the weight's gradient, in `events`."""

    @staticmethod
    def forward(ctx, hidden, weight, events):
        ctx.save_for_backward(hidden, weight)
        ctx.events = events
        events.append("loss")
        return (hidden @ weight.T).sum()

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        dweight = grad * hidden.sum(0).expand(weight.shape).contiguous()
        ctx.events += ["loss gradient", dweight.data_ptr()]
        return grad * weight.sum(0).expand(hidden.shape), dweight, None


class After(torch.autograd.Function):
    """Identity between the model and the loss. Its backward pass comes after the loss layer's."""

    @staticmethod
    def forward(ctx, x, events):
        ctx.events = events
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.events.append("model gradient")
        return grad, None


@pytest.fixture
def events(monkeypatch):
    seen = []

    @contextlib.contextmanager
    def recorded(name):
        seen.append(f"<{name}>")
        yield
        seen.append(f"</{name}>")

    monkeypatch.setattr(observe, "nvtx_range", recorded)
    return seen


def inputs():
    torch.manual_seed(0)
    return torch.randn(5, 3, requires_grad=True), nn.Parameter(torch.randn(7, 3)), torch.zeros(5).long()


def test_ranges_enclose_the_loss_layers_passes_in_each_micro_step_and_nothing_else(events):
    _, weight, labels = inputs()
    for _ in range(2):
        events.clear()
        hidden = After.apply(weight[:5] * 2, events)  # the weight is the embedding, too
        output = watched_loss(lambda h, w, _: Output(TracedLoss.apply(h, w, events)), hidden, weight, labels)
        assert events == ["<loss forward>", "loss", "</loss forward>"]
        assert output.n_tokens == 5
        (output.sum_nats / 5).backward()
        del events[5]  # the gradient's address
        assert events[3:] == ["<loss backward>", "loss gradient", "</loss backward>", "model gradient"]


def test_loss_and_gradients_are_those_of_the_bare_loss_bit_for_bit():
    """And the weight's gradient is passed on without a copy."""
    results, seen = [], []

    def loss(h, w, _):
        return Output(TracedLoss.apply(h, w, seen))

    for call in (loss, lambda *tensors: watched_loss(loss, *tensors)):
        hidden, weight, labels = inputs()
        output = call(hidden, weight, labels)
        output.sum_nats.backward()
        assert weight.grad.data_ptr() == seen[-1]
        results.append((output.sum_nats, hidden.grad, weight.grad))
    assert all(torch.equal(bare, watched) for bare, watched in zip(*results, strict=True))


@pytest.fixture
def ticking(monkeypatch):
    """A second passes between two moments."""
    clock = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))


def test_the_loss_layers_times_add_up_over_micro_steps_and_leave_out_the_first_steps(ticking):
    hidden, weight, labels = inputs()
    clock = Stopwatch(CPU, skip=1)
    assert clock.seconds == []
    for micro_steps in (5, 2, 2, 3):
        for _ in range(micro_steps):
            output = watched_loss(lambda h, w, _: Output(TracedLoss.apply(h, w, [])), hidden, weight, labels, clock)
            output.sum_nats.backward()
        clock.lap()
    assert clock.seconds == [{"loss/forward": n, "loss/backward": n} for n in (2, 2, 3)]


@pytest.fixture
def hand(monkeypatch):
    """A clock whose `now` is set by hand."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def test_a_lap_goes_from_step_to_step_without_what_was_paused(hand):
    """A checkpoint may be due during a validation, and a run may begin with a validation."""
    watch = Stopwatch(CPU, skip=1)
    with watch.paused():
        hand.now = 10.0
    watch.start()
    for now in (11.0, 13.0):  # the first lap is left out
        hand.now = now
        watch.lap()
    hand.now = 14.0
    with watch.paused():
        hand.now = 20.0
        with watch.paused():
            hand.now = 23.0
        hand.now = 24.0
    for now in (26.0, 27.0):
        hand.now = now
        watch.lap()
    assert watch.seconds == [{"lap": 2.0}, {"lap": 3.0}, {"lap": 1.0}]


def test_the_speed_of_a_step_is_that_of_its_end_and_not_of_when_the_host_reads_it(hand):
    meter = SpeedMeter(CPU, skip=1, tokens_per_step=6)
    meter.start()
    for begin, end in ((0.0, 1.0), (1.5, 3.0), (3.5, 5.0)):
        hand.now = begin
        meter.step_begins()
        hand.now = end
        meter.step_ended()
    hand.now = 9.0
    meter.arrived(1)
    assert meter.record() == {}, "warm-up"
    for step in (2, 3):
        meter.arrived(step)
        assert meter.record() == {
            "speed/tokens_per_second": 3.0,
            "speed/wall_step_ms": 2000,
            "speed/step_ms": 1500,
            "speed/measured_steps": 1,
        }
    assert meter.recent_step_seconds() == 2.0


def test_the_rate_of_a_matrix_product_is_its_flops_over_its_time(ticking):
    assert profiling.matmul_rate(torch.float32, size=8, bursts=2, seconds=3) == 2 * 8**3


def test_cpu_memory_counts_every_tensor_and_labels_the_peak_as_the_process_s():
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.detach().T.clone().to(torch.bfloat16).float())
    optimizer = torch.optim.AdamW(model.parameters())
    memory = MemoryByComponent(model, optimizer, CPU)
    memory.start()
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    report = memory.report()
    assert report["parameters"] == report["gradients"] == 64 * 4
    assert report["optimizer"] == 2 * 64 * 4 + 2 * 4  # two moments, and a step count per tensor
    assert report["resident_peak"] > 2**20
    assert set(report) == {"parameters", "gradients", "optimizer", "resident_peak"}


class FakeAllocator:
    """torch.cuda's counters, driven by hand."""

    def __init__(self, monkeypatch):
        self.now = self.most = 0
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: self.now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: self.most)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def reset(self, device=None):
        self.most = self.now

    def allocate(self, size):
        self.now += size
        self.most = max(self.most, self.now)


def test_cuda_memory_is_told_apart_on_one_step_and_the_peak_survives_the_marks(monkeypatch):
    allocator = FakeAllocator(monkeypatch)
    weight = nn.Parameter(torch.zeros(10))  # 40 bytes
    optimizer = torch.optim.SGD([weight], lr=0.1)
    model = nn.ParameterList([weight])
    memory = MemoryByComponent(model, optimizer, torch.device("cuda"))
    allocator.allocate(40)

    def step(before_loss, forward, kept, backward):
        """A spike before the loss layer, `before_loss` kept; then the loss layer's passes."""
        allocator.allocate(before_loss + 500)
        allocator.allocate(-500)

        def loss(h, w, _):
            allocator.allocate(forward)
            allocator.allocate(kept - forward)
            return Output(Spike.apply((h * w).sum(), backward, kept))

        hidden = torch.ones(10, requires_grad=True)
        watched_loss(loss, hidden, weight, torch.zeros(1), memory).sum_nats.backward()
        optimizer.step()
        optimizer.zero_grad()
        allocator.allocate(-before_loss)

    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, spike, kept):
            ctx.sizes = spike, kept
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            spike, kept = ctx.sizes
            allocator.allocate(spike)
            allocator.allocate(-spike - kept)
            return grad, None, None

    step(9000, 9000, 0, 9000)  # warm-up: must not count
    memory.start()
    step(1000, 300, 100, 200)
    step(800, 7, 0, 7)  # a later step changes nothing but the peak
    assert memory.report() == {
        "parameters": 40,
        "gradients": 40,
        "optimizer": 0,
        "activations": 1000,
        "loss_forward": 300,
        "loss_backward": 300,  # 100 kept from the forward pass, 200 more
        "peak": 40 + 1000 + 500,
    }


def run_traced(path, profile_steps, skip, steps):
    layer = nn.Linear(4, 4)
    with trace(profile_steps, path, skip) as end_of_step:
        for _ in range(steps):
            with observe.nvtx_range("my step"):
                layer(torch.ones(2, 4)).sum().backward()
            end_of_step()


@pytest.mark.parametrize(("steps", "expected"), [(6, 2), (4, 1)])
def test_a_trace_holds_the_steps_asked_for_or_those_that_there_were(tmp_path, steps, expected):
    path = tmp_path / "run" / "trace.json"
    run_traced(path, profile_steps=2, skip=3, steps=steps)
    spans = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "my step" and e.get("dur")]
    assert len(spans) == expected


@pytest.mark.gpu
def test_cuda_events_time_the_device_without_waiting_for_it():
    device = torch.device("cuda")
    clock = Stopwatch(device, skip=1)
    weight = nn.Parameter(torch.randn(32000, 512, device=device))
    hidden = torch.randn(4096, 512, device=device, requires_grad=True)
    labels = torch.zeros(4096, dtype=torch.long, device=device)

    def loss(h, w, labels):
        return Output(nn.functional.cross_entropy(h @ w.T, labels, reduction="sum"))

    began = time.perf_counter()
    clock.start()
    for _ in range(5):
        clock.begin("step")
        watched_loss(loss, hidden * 2, weight, labels, clock).sum_nats.backward()
        clock.end("step")
        clock.lap()
    _ = clock.seconds  # must not wait
    queued = time.perf_counter() - began
    torch.cuda.synchronize()
    assert len(clock.seconds) == 4
    step, forward, backward = (
        statistics.median(lap[name] for lap in clock.seconds) for name in ("step", "loss/forward", "loss/backward")
    )
    assert queued < 4 * step  # the host was ahead of the device
    assert all(lap["loss/forward"] + lap["loss/backward"] < lap["step"] for lap in clock.seconds)
    assert 0.5 * step < forward + backward
    assert backward > forward / 2


@pytest.mark.gpu
def test_cuda_memory_of_an_eager_loss_is_what_its_tensors_add_up_to():
    device = torch.device("cuda")
    n, d, v = 1024, 64, 32000
    weight = nn.Parameter(torch.randn(v, d, device=device))
    optimizer = torch.optim.AdamW([weight], fused=True)
    memory = MemoryByComponent(nn.ParameterList([weight]), optimizer, device)

    def loss(h, w, labels):
        return Output(nn.functional.cross_entropy(h @ w.T, labels, reduction="sum"))

    for step in range(3):
        if step == 1:
            memory.start()
        hidden = torch.randn(n, d, device=device, requires_grad=True)
        watched_loss(loss, hidden, weight, torch.zeros(n, dtype=torch.long, device=device), memory).sum_nats.backward()
        optimizer.step()
        optimizer.zero_grad()
    report = memory.report()
    matrix = n * v * 4
    assert report["parameters"] == report["gradients"] == weight.nbytes
    assert report["optimizer"] == 2 * weight.nbytes + 4
    assert report["loss_forward"] == pytest.approx(2 * matrix, rel=0.05)  # logits, log-softmax
    assert report["loss_backward"] == pytest.approx(3 * matrix, rel=0.05)  # log-softmax, two gradients
    assert report["peak"] >= 3 * weight.nbytes + report["loss_backward"]


def test_a_snapshot_that_cannot_be_written_hides_no_error_of_the_block(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
    (tmp_path / "file").touch()
    snapshot = functools.partial(memory_snapshot, tmp_path / "file/snapshot.pickle")
    with pytest.raises(StorageError, match=r"snapshot\.pickle cannot be written"), snapshot():
        pass
    with pytest.raises(KeyError), snapshot():
        raise KeyError


@pytest.mark.gpu
def test_a_memory_snapshot_is_written_even_if_the_block_fails(tmp_path):
    @memory_snapshot(tmp_path / "snapshot.pickle")
    def fail():
        torch.ones(10, device="cuda")
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (tmp_path / "snapshot.pickle").stat().st_size > 0
