"""How a program arranges memory, and what it refuses to repeat."""

import gc
import os
import weakref

import pytest
import torch

pytest.importorskip("triton")

from cce_kernels.runtime import program
from cce_kernels.runtime.launch import RECORDING
from cce_kernels.runtime.program import ALIGNMENT, Passes, Program, Tape, arranged, kind_of
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="launches are stand-ins here")

pieces = st.tuples(st.integers(1, 5000), st.integers(0, 9), st.integers(0, 9)).map(
    lambda piece: (piece[0], min(piece[1:]), max(piece[1:]))
)


@given(st.lists(pieces, max_size=12))
def test_pieces_of_memory_that_live_at_the_same_time_do_not_overlap(lives):
    offsets, size = arranged(dict(enumerate(lives)))
    at_once = max(sum(-(-n // ALIGNMENT) for n, first, last in lives if first <= t <= last) for t in range(10))
    assert size >= at_once * ALIGNMENT
    assert size <= sum(-(-n // ALIGNMENT) * ALIGNMENT for n, _, _ in lives)
    for one, (n, first, last) in enumerate(lives):
        assert offsets[one] % ALIGNMENT == 0
        assert offsets[one] + n <= size
        for other, (its_n, its_first, its_last) in enumerate(lives[:one]):
            if first <= its_last and its_first <= last:
                assert offsets[one] + n <= offsets[other] or offsets[other] + its_n <= offsets[one]


class Launch:
    """A stand-in for an open launch. Once it has addresses, it writes them down."""

    def __init__(self, log: list) -> None:
        self.log = log

    def at(self, addresses):
        return lambda *rest: self.log.append(addresses), (1, 1, 1), ()


def recorded(x: torch.Tensor, log: list, foreign: bool = False) -> tuple[Tape, torch.Tensor, torch.Tensor]:
    """A pass of two launches: from x to a temporary, and from there to its result."""
    with Tape() as tape:
        assert RECORDING.tape is tape
        temporary, result = x.new_empty(100), torch.empty_like(x)
        tape.add((Launch(log), [x, temporary[10:]]))
        tape.add((Launch(log), [temporary[10:], result]))
        if foreign:
            result.zero_()
    assert RECORDING.tape is None
    return tape, temporary, result


def test_a_program_follows_the_addresses_of_its_inputs_and_keeps_no_tensor():
    log: list = []
    x = torch.zeros(50)
    tape, temporary, result = recorded(x, log)
    found = Program(tape, [x, None], [result], [result])
    gone = [weakref.ref(tensor) for tensor in (x, temporary, result)]
    del x, tape, temporary, result
    gc.collect()
    assert not any(tensor() is not None for tensor in gone)

    y = torch.zeros(60)[10:]
    made = found.run([y, None], y)
    (read, wrote), (read_again, wrote_result) = log
    assert read == y.data_ptr()
    assert wrote == read_again
    assert wrote_result == found.result(0, made).data_ptr()
    assert found.result(0, made).shape == (50,)
    assert len(made) == 1, "the result; no arena, because it would be empty"


def test_a_pass_that_computes_with_torch_is_never_repeated(monkeypatch):
    monkeypatch.setattr(program, "MOST_TRIES", 3)
    passes, log = Passes(), []
    x = torch.zeros(50)
    kind = kind_of(x)
    for _ in range(8):
        with passes.tape(kind) as tape:
            pass
        if tape is not None:
            spoiled, _, result = recorded(x, log, foreign=True)
            assert spoiled.foreign == [torch.ops.aten.zero_.default]
            passes.keep(kind, spoiled, [x], [result], [result])
        assert passes.find(kind) is None
    assert tape is None, "no more tries"


def test_a_pass_that_reads_unknown_memory_is_never_repeated():
    passes, x = Passes(), torch.zeros(50)
    tape, _, result = recorded(x, [])
    passes.keep("kind", tape, [], [result], [result])
    assert passes.find("kind") is None


def test_of_several_inputs_in_one_memory_the_one_at_the_address_is_meant():
    whole, log = torch.zeros(128), []
    first, second = whole[:64], whole[64:]
    tape, _, result = recorded(second, log)
    found = Program(tape, [first, second], [result], [result])
    one, other = torch.zeros(64), torch.zeros(64)
    found.run([one, other], one)
    assert log[0][0] == other.data_ptr()


def test_no_pass_is_repeated_while_launches_are_watched(monkeypatch):
    passes, x = Passes(), torch.zeros(50)
    tape, _, result = recorded(x, [])
    passes.keep("kind", tape, [x], [result], [result])
    assert passes.find("kind") is not None
    monkeypatch.setattr(program, "watched", lambda: True)
    assert passes.find("kind") is None


def test_the_kind_of_a_pass_is_all_that_its_launches_depend_on():
    x = torch.zeros(8, 8)
    same = torch.ones(8, 8)
    assert kind_of(x, 1, [True]) == kind_of(same, 1, [True])
    others = (x.bfloat16(), x.T, x[:4], torch.zeros(100)[1:65].view(8, 8), None)
    assert len({kind_of(x), *map(kind_of, others)}) == 1 + len(others)
