"""Speed of a run from its records: tokens/s follow from the mean step."""

import pytest

from linrnn.runs.figures import speed_of_run, uneven_steps


def records(*milliseconds: float) -> list[dict[str, float]]:
    """One record for each step. One ms passes between two steps."""
    return [{"speed/measured_steps": 1, "speed/wall_step_ms": ms + 1, "speed/step_ms": ms} for ms in milliseconds]


def test_a_slow_step_lowers_tokens_per_second_and_leaves_the_median():
    speed = speed_of_run(records(10, 10, 10, 10, 60), tokens_per_step=21)
    assert (speed["step_time_ms_median"], speed["wall_step_ms"], speed["host_step_ms"]) == (10, 21, 1)
    assert speed["tokens_per_second"] == pytest.approx(1000)


def test_a_mean_step_far_from_the_median_is_named():
    even = {"step_time_ms_median": 10.0, "wall_step_ms": 11.5, "host_step_ms": 0.6}
    assert uneven_steps(even) is None
    assert "2.00 times the median" in (uneven_steps(even | {"wall_step_ms": 20.6}) or "")
