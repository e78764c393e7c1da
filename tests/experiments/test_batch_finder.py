"""The search for the largest batch: few probes if the model is nearly right, honest if it did not end exactly."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linrnn.experiments.max_batch import Answer, Probe, report, search

GIB = 2**30


def probing(truth, budget: float, log: list[int]):
    def probe(batch: int) -> Probe:
        log.append(batch)
        fits = truth(batch) <= budget
        return Probe(batch, fits, int(truth(batch)) if fits else None, 100.0 if fits else None, 0)

    return probe


def line(fixed: float, slope: float):
    return lambda batch: (fixed + slope * batch) * GIB


def test_a_right_model_needs_two_probes_the_batch_and_one_more() -> None:
    log: list[int] = []
    answer = search(probing(line(27, 4.6), 80 * GIB, log), line(27, 4.6), 80 * GIB, 6)
    assert log == [11, 12]
    assert (answer.batch, answer.too_large, answer.foreseen, answer.exact) == (11, 12, 11, True)


def test_a_model_one_sequence_too_high_needs_two_probes() -> None:
    log: list[int] = []
    answer = search(probing(line(20.7, 0.7), 78 * GIB, log), line(20, 0.7), 78 * GIB, 6)
    assert log == [82, 81]
    assert (answer.batch, answer.exact) == (81, True)


def test_a_probe_that_ends_above_the_budget_corrects_the_model() -> None:
    """As on a CPU, whose memory the formulas of a GPU do not foresee."""
    log: list[int] = []
    truth = line(0.45, 0.018)

    def probe(batch: int) -> Probe:
        log.append(batch)
        return Probe(batch, truth(batch) <= 1.2 * GIB, int(truth(batch)), None, 0, finished=True)

    answer = search(probe, line(0.05, 0.0095), 1.2 * GIB, 6)
    assert (answer.batch, answer.exact) == (41, True)
    assert log[0] == 121
    assert len(log) <= 5


@pytest.mark.parametrize("expected", range(60, 83))
def test_a_model_a_quarter_too_high_ends_exact_within_seven_probes(expected: int) -> None:
    """The default of max_probes."""
    log: list[int] = []
    slope = 58 / 82.9
    truth = line(78 - slope * (expected + 0.5), slope)
    answer = search(probing(truth, 78 * GIB, log), line(20, slope), 78 * GIB, 7)
    assert log[0] == 82
    assert (answer.batch, answer.exact) == (expected, True)


def test_a_model_far_too_high_goes_back_by_growing_parts() -> None:
    log: list[int] = []
    answer = search(probing(line(70, 1), 80 * GIB, log), line(0, 1), 80 * GIB, 9)
    assert log[:5] == [80, 79, 69, 49, 9]
    assert (answer.batch, answer.exact) == (10, True)


@pytest.mark.parametrize("error", [0.8, 0.9, 0.97, 1.03, 1.1, 1.25])
@pytest.mark.parametrize(("fixed", "slope"), [(27, 4.6), (30, 0.35), (20, 1.2)])
def test_a_model_wrong_by_up_to_a_quarter_ends_exact_within_six_probes(
    error: float, fixed: float, slope: float
) -> None:
    log: list[int] = []
    truth, model = line(fixed, slope), line(fixed * error, slope * error)
    answer = search(probing(truth, 80 * GIB, log), model, 80 * GIB, 6)
    expected = int((80 - fixed) / slope)
    assert answer.batch <= expected
    assert answer.too_large is None or answer.too_large > expected
    assert answer.exact or slope < 1
    assert expected - answer.batch <= 0.03 * expected


@settings(max_examples=200, deadline=None)
@given(
    fixed=st.floats(0.5, 60),
    slope=st.floats(0.01, 10),
    error=st.floats(0.3, 3),
    offset=st.floats(0, 20),
    n=st.integers(1, 9),
)
def test_whatever_the_model_says_the_answer_is_what_was_seen(fixed, slope, error, offset, n) -> None:
    log: list[int] = []
    truth = line(fixed + offset, slope)
    answer = search(probing(truth, 80 * GIB, log), line(fixed * error, slope * error), 80 * GIB, n)
    assert len(log) <= n
    assert len(set(log)) == len(log), "no batch is probed twice"
    assert min(log) >= 1
    assert answer.batch == max([batch for batch in log if truth(batch) <= 80 * GIB], default=0)
    assert answer.too_large == min([batch for batch in log if truth(batch) > 80 * GIB], default=None)


@pytest.mark.parametrize("model", [None, line(0.1, 0.02)])
@pytest.mark.parametrize("step", [0.0, -0.004, 0.0008])
def test_peaks_that_do_not_rise_send_the_search_nowhere_far(model, step: float) -> None:
    """As a CPU's resident memory, which also holds what has nothing to do with the batch, and is noisy."""
    log: list[int] = []
    answer = search(probing(lambda batch: (0.5 + step * len(log)) * GIB, 2 * GIB, log), model, 2 * GIB, 7)
    assert answer.batch == max(log) == log[-1]
    assert all(later <= 5 * earlier for earlier, later in itertools.pairwise(log)), log


def test_a_batch_is_at_most_sixteen_times_the_largest_that_fitted() -> None:
    log: list[int] = []
    search(probing(line(10, 0.2), 80 * GIB, log), None, 80 * GIB, 4)
    assert log == [1, 7, 112, 350]
    log.clear()
    search(probing(line(0.01, 0.01), 80 * GIB, log), None, 80 * GIB, 3)
    assert log == [1, 16, 256]


def test_not_even_one_sequence_is_an_answer() -> None:
    log: list[int] = []
    answer = search(probing(line(90, 1), 80 * GIB, log), line(90, 1), 80 * GIB, 6)
    assert log == [1]
    assert (answer.batch, answer.exact, answer.foreseen) == (0, True, 0)
    assert "largest batch: 0 sequences" in report(answer, on_gpu=True)[0]
    assert "not even one fits" in report(answer, on_gpu=True)[1]


def test_a_search_without_a_fitting_batch_does_not_say_that_one_sequence_is_too_many() -> None:
    log: list[int] = []
    answer = search(probing(line(70, 1), 40 * GIB, log), line(0, 1), 40 * GIB, 2)
    assert (log, answer.batch, answer.too_large, answer.exact) == ([40, 39], 0, 39, False)
    assert "raise max_probes" in report(answer, on_gpu=True)[1]


def test_an_answer_that_is_not_exact_says_so() -> None:
    probes = (Probe(8, True, 60 * GIB, 1000.0, 50 * GIB),)
    lines = report(Answer(8, None, 9, probes), on_gpu=True)
    assert "at least; none is the smallest seen not to fit" in lines[0]
    assert "60.00 GiB (estimated 50.00), 1,000 tokens/s" in lines[1]


@pytest.mark.parametrize(("fixed", "slope"), [(27, 4.6), (30, 0.35), (20, 1.2), (79.5, 1)])
def test_without_a_memory_model_what_is_measured_takes_its_place(fixed: float, slope: float) -> None:
    log: list[int] = []
    answer = search(probing(line(fixed, slope), 80 * GIB, log), None, 80 * GIB, 6)
    assert log[0] == 1, "nothing is foreseen"
    assert (answer.batch, answer.foreseen, answer.exact) == (int((80 - fixed) / slope), None, True)
    assert "estimated unknown" in report(answer, on_gpu=True)[0]
