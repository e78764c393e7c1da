"""`linrnn.models.deferred`: what is recorded on tensors without memory has the same values when it is played."""

import itertools
import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from linrnn.config import load_config
from linrnn.costs import memory_of_drawing
from linrnn.models import BlankModel, build_model, cpu_ops
from linrnn.models.architecture import resolve
from linrnn.models.build import initialised
from linrnn.models.deferred import Part, tape
from linrnn.models.deferred.generator import generator_after
from linrnn.models.deferred.tape import Tape, place_of
from linrnn.models.layers.rwkv7 import FLAS_OWN


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("name", ["gated_deltanet", "gla", "kda", "mamba2", "mesa_net", "rwkv6", "rwkv7"])
def test_fla_s_own_ways_to_initialise_are_replayed_bit_for_bit(
    name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logarithms of random numbers, constants, rescaled and orthogonal matrices. These models have no CPU form."""
    monkeypatch.setattr(cpu_ops, "check_model", lambda kind: None)
    config = load_config(["model=fla", f"model.config={name}", "size.tie_embeddings=false"])
    arch = resolve(config.model, config.size, 512)
    blank = BlankModel(arch, device=torch.device("cpu"), seed=3)
    blank.draw(threads)
    plain = build_model(arch, device="cpu", seed=3)
    for ours, theirs in (
        (dict(blank.model.named_parameters()), dict(plain.named_parameters())),
        (dict(blank.model.named_buffers()), dict(plain.named_buffers())),
    ):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("name", ["rwkv6", "rwkv7"])
def test_orthogonal_matrices_do_not_depend_on_the_number_of_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "check_model", lambda kind: None)
    config = load_config(["model=fla", f"model.config={name}", "size.num_layers=2", "size.hidden_size=1024"])
    arch, weights, before = resolve(config.model, config.size, 4096), [], torch.get_num_threads()
    try:
        for threads, drawing in ((1, 1), (2, 1), (2, 2)):
            torch.set_num_threads(threads)
            blank = BlankModel(arch, device=torch.device("cpu"), seed=3)
            blank.draw(drawing)
            weights += [build_model(arch, device="cpu", seed=3).state_dict(), blank.model.state_dict()]
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for other in weights[1:]:
        assert all(torch.equal(tensor, other[key]) for key, tensor in weights[0].items())


def test_rwkv7_s_vectors_and_low_rank_layers_are_fla_s_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["size.num_layers=3", "size.hidden_size=320", "model.options.head_dim=64"]
    config = load_config(["model=fla", "model.config=rwkv7", *options])
    arch = resolve(config.model, config.size, 64)

    def weights() -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        return dict(initialised(arch).named_parameters())

    ours = weights()
    assert len(FLAS_OWN) == 3
    for layer, own in FLAS_OWN.items():
        monkeypatch.setattr(layer, "_initialize_weights", own)
    theirs = weights()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def made() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A tensor drawn twice, one made from random numbers and a view of another, and one without random numbers."""
    drawn = torch.empty(3, 4).uniform_()
    base = torch.rand(5, 4)
    drawn.normal_()
    mixed = torch.zeros(4)
    mixed[1:] = base[2, 1:].log() + torch.tensor([1.0, 2.0, 3.0])
    base.fill_(7)
    steps = torch.arange(4) * 2
    return drawn, mixed, steps


def test_a_tape_gives_the_values_in_the_order_in_which_they_are_complete() -> None:
    recorded = Tape()
    with recorded.recording():
        places = [place_of(tensor) for tensor in made()]
    got: dict[int, torch.Tensor] = {}

    def play(*numbers: int) -> list[int]:
        got.clear()
        torch.manual_seed(5)
        recorded.play(
            [(places[number], lambda tensor, number=number: got.update({number: tensor.clone()})) for number in numbers]
        )
        return list(got)

    torch.manual_seed(5)
    expected, after = made(), torch.get_rng_state()
    assert play(2, 1, 0) == [0, 1, 2]
    assert all(torch.equal(got[number], expected[number]) for number in range(3))
    assert torch.equal(torch.get_rng_state(), after)
    assert play(1) == [1], "the others' numbers are drawn and thrown away"
    assert torch.equal(got[1], expected[1])
    assert torch.equal(torch.get_rng_state(), after)
    play(2)
    assert torch.equal(got[2], expected[2])
    assert not torch.equal(torch.get_rng_state(), after), "no random numbers are needed, and none are drawn"


@pytest.mark.parametrize("model", ["gated_deltanet", "gla", "kda", "transformer"])
def test_the_matched_models_are_drawn_in_as_many_parts_as_threads(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config([f"model={model}", "size=mve"])
    arch = resolve(config.model, config.size, 1024)
    blank = BlankModel(arch, device=torch.device("cpu"), seed=3)
    asked = []
    monkeypatch.setattr(
        tape, "generator_after", lambda seed, draws: asked.append(draws) or generator_after(seed, draws)
    )
    blank.draw(threads=4)
    assert len(asked) == 4
    parts, total = sorted(asked), arch.n_parameters
    assert all(abs(draws - number * total / 4) < 0.15 * total for number, draws in enumerate(parts)), (parts, total)
    plain = build_model(arch, device="cpu", seed=3)
    for (name, ours), theirs in zip(blank.model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("seed", [0, 2**40 + 1])
@pytest.mark.parametrize("draws", [0, 1, 15, 623, 624, 625, 2**14 - 1, 3 * 2**14 + 5, 5_000_011])
def test_a_generator_after_draws_is_the_one_that_drew(draws: int, seed: int) -> None:
    drew = torch.Generator().manual_seed(seed)
    if draws:
        torch.empty(draws).uniform_(generator=drew)
    ours = generator_after(seed, draws)
    for size in (1, 16, 1000):
        assert torch.equal(torch.empty(size).normal_(generator=ours), torch.empty(size).normal_(generator=drew))


def test_the_draws_of_operations_are_those_that_torch_takes() -> None:
    def drawn() -> list[torch.Tensor]:
        return [
            torch.empty(7).uniform_(2, 3),
            torch.rand(5, 3),
            torch.empty(4, 4).normal_(),
            torch.empty(33).normal_(1, 2),
            torch.empty(8, 3).t().uniform_(),
        ]

    recorded = Tape()
    with recorded.recording():
        drawn()
        torch.empty(3).normal_()
        torch.empty(8, 4).t().normal_()
        torch.empty(9, dtype=torch.float64).uniform_()
    draws = [tape.draws_of(operation) for operation in recorded._operations if operation.random]
    assert draws == [7, 15, 16, 49, 24, None, None, None]
    torch.manual_seed(4)
    drawn()
    expected = torch.rand(9)
    assert torch.equal(torch.rand(9, generator=generator_after(4, 7 + 15 + 16 + 49 + 24)), expected)


def test_a_thread_draws_beside_others_that_draw_and_train() -> None:
    """The numbers come from a generator of their own; a backward pass does not notice that weights change."""
    config = load_config(["model=kda", "size=smoke"])
    arch = resolve(config.model, config.size, 512)
    blank = BlankModel(arch, device=torch.device("cpu"), seed=3)
    for parameter in blank.model.parameters():
        parameter.data.zero_()
    state, ids = torch.get_rng_state(), torch.arange(32)[None]
    output = blank.model(ids).sum()
    thread = threading.Thread(target=blank.draw)
    thread.start()
    while thread.is_alive():
        torch.rand(7)
    torch.set_rng_state(state)
    output.backward()
    plain = build_model(arch, device="cpu", seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, ours), theirs in zip(blank.model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("option", ["seed=0", "model.shared_projection_rank=128"])
@pytest.mark.parametrize("model", ["gla", "transformer"])
def test_drawing_holds_one_matrix_of_each_size(model: str, option: str) -> None:
    """torch's CPU allocator reports every block that it gives and takes back."""
    config = load_config([f"model={model}", "size=mve", option])
    arch = resolve(config.model, config.size, 4096)
    blank = BlankModel(arch, device=torch.device("cpu"), seed=3)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        blank.draw()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    foreseen = memory_of_drawing(arch)
    assert foreseen <= max(itertools.accumulate(sizes)) < 1.05 * foreseen
    assert foreseen < 0.6 * 4 * arch.n_parameters


@pytest.mark.parametrize("rows", [1, 3, 8, 9])
def test_parts_are_cut_like_torch_chunk(rows: int) -> None:
    whole = torch.arange(2 * rows).view(rows, 2)
    chunks = [*torch.chunk(whole, 4), *[whole[:0]] * 4][:4]
    assert all(torch.equal(Part(index, 4).of(whole), chunk) for index, chunk in enumerate(chunks))
