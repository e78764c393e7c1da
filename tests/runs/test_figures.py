"""Speed of a run from its records: tokens/s follow from the mean step."""

import pytest

from linrnn.runs.figures import speed_of_run


def records(*milliseconds: float) -> list[dict[str, float]]:
    """One record for each step. One ms passes between two steps."""
    return [{"speed/measured_steps": 1, "speed/wall_step_ms": ms + 1, "speed/step_ms": ms} for ms in milliseconds]


def test_a_slow_step_lowers_tokens_per_second_and_leaves_the_median():
    speed = speed_of_run(records(10, 10, 10, 10, 60), tokens_per_step=21)
    assert (speed["step_time_ms_median"], speed["wall_step_ms"], speed["host_step_ms"]) == (10, 21, 1)
    assert speed["tokens_per_second"] == pytest.approx(1000)
