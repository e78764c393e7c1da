"""The study's pictures are those of the committed rows, with every verdict drawn and counted."""

from pathlib import Path

import pytest

from benchmarks.steps_rows import AGAIN
from linrnn.report.verdicts import CONTROL
from linrnn.runs.intervals import Estimate
from linrnn.runs.step_parts import parts_of_step, shares_of_step
from study import pictures
from study.points import panels_of
from study.step_parts import step_parts

ROOT = Path(__file__).resolve().parents[2]


def test_the_overview_draws_every_point_and_counts_the_answers() -> None:
    figure, points = pictures.at_a_glance(ROOT / "results"), pictures.study_points(ROOT / "results")
    panels = panels_of(points)
    assert len(figure.axes) == len(panels) > 9
    for axes, own in zip(figure.axes, panels, strict=True):
        markers = [line for line in axes.lines if len(line.get_xdata()) == 1]
        assert sorted(line.get_xdata()[0] for line in markers) == sorted(row.verdict.value or 0 for row in own)
        hollow = [line for line in markers if line.get_markerfacecolor() == "white"]
        assert len(hollow) == sum(row.verdict.verdict == "inconclusive" for row in own)
        question, *counts = [text.get_text() for text in axes.texts]
        assert f"{own[0].verdict.target.bound:g}" in question
        judged = [row.verdict for row in own if row.verdict.backend not in (AGAIN, CONTROL)]
        by_base = {base: [v for v in judged if v.against == base] for base in ("compiled", "standard")}
        told = []
        for base, found in by_base.items():
            met, open_ones = (sum(v.verdict == answer for v in found) for answer in ("reached", "inconclusive"))
            words = f"{met} of {len(found)} reached" + (f", {open_ones} inconclusive" if open_ones else "")
            head = {"compiled": "against compiled: ", "standard": "against eager: "}[base]
            told += [head * own[0].verdict.target.metric.ratio + words] if found else []
        assert counts == told, question


def test_every_committed_picture_is_drawn_from_committed_rows(tmp_path: Path) -> None:
    committed = ROOT / "results" / "figures"
    drawn = pictures.draw(ROOT / "results", tmp_path)
    assert {path.name for path in drawn} == {path.name for path in committed.glob("*.png")}


def test_the_parts_of_a_step_fill_it_and_the_mixer_counts_once() -> None:
    breakdown = {
        "time": {
            "mixer": {"forward": 3.0, "backward": 5.0},
            "mixer/projections": {"forward": 1.0, "backward": 2.0},
            "mixer/scan": {"forward": 2.0, "backward": 3.0},
            "embedding": {"forward": 0.5, "backward": None},
            "norms": {"forward": 0.5, "backward": 1.0},
            "mlp": {"forward": 1.0, "backward": 2.0},
            "loss": {"forward": 1.0, "backward": 1.0},
            "optimizer": {"total": 1.0},
            "step": {"total": 20.0},
            "host": {"total": 15.0},
        },
        "steps": [],
    }
    parts = parts_of_step(breakdown)
    assert "mixer" not in parts
    assert "host" not in parts
    assert (parts["mixer/projections"], parts["mixer/scan"], parts["the rest"]) == (3.0, 5.0, 4.0)
    assert sum(parts.values()) == 20.0
    whole = {"time": {name: row for name, row in breakdown["time"].items() if "/" not in name}, "steps": []}
    assert parts_of_step(whole)["mixer"] == 8.0
    assert shares_of_step(whole)["mixer"] == Estimate(1, 0.4, None, None)
    [axes] = step_parts({"a model": parts, "another": parts}, "a title").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a model", "another"]
    widths = sum(bar.get_width() for bar in axes.patches)
    assert widths == pytest.approx(2 * 20_000), "ms of both steps"
    assert "25 %" in [text.get_text() for text in axes.texts], "of the scan"
