"""Plots of runs: one look per loss, seeds as bands and intervals, no crowded labels."""

from dataclasses import replace
from pathlib import Path

from matplotlib import pyplot

from linrnn.losses import loss_names
from linrnn.report import plots
from linrnn.report.plot_style import LOSSES, looks
from linrnn.report.runs import read_committed

ROOT = Path(__file__).resolve().parents[2]
SUMMARIES = ROOT / "results" / "summaries"


def test_every_loss_has_a_colour_and_a_marker_of_its_own_and_compiled_is_grey():
    assert set(loss_names()) <= LOSSES.keys()
    for kind in (0, 1):
        assert len({look[kind] for look in LOSSES.values()}) == len(LOSSES)
    red, green, blue = (int(LOSSES["compiled"][0][i : i + 2], 16) for i in (1, 3, 5))
    assert red == green == blue


def test_a_loss_with_other_options_keeps_its_colour_and_marker():
    found = looks(["cce_kahan accumulate=bf16", "cce_kahan", "liger", "unknown"])
    plain, variant = found["cce_kahan"], found["cce_kahan accumulate=bf16"]
    assert (plain.colour, plain.marker) == (variant.colour, variant.marker)
    assert (plain.filling, plain.dash) == ("full", "-")
    assert (plain.filling, plain.dash) != (variant.filling, variant.dash)
    assert next(iter(found)) == "cce_kahan accumulate=bf16", "legends keep the order"


def test_seeds_are_one_line_with_a_band_and_a_panel_has_six_lines_at_most():
    runs = read_committed(SUMMARIES / "mve")
    names = {"compiled", "standard", "liger", "cce_kahan"}
    assert names <= {run.summary["loss"] for run in runs}
    figure = plots.loss_curves(runs, margin=0.01)
    top, bottom = figure.axes
    assert len(top.lines) == 5, "four losses, one of them with two options"
    assert len(bottom.lines) == 4, "all but the baseline"
    assert len(top.collections) == 4, "bands of those with several seeds"
    named = [{"loss": f"loss{i}", "run_name": f"{i}"} for i in range(9)]
    many = [replace(runs[0], summary=runs[0].summary | names) for names in named]
    crowded = plots.loss_curves([*many, *[run for run in runs if run.summary["loss"] == "compiled"]])
    assert len(crowded.axes[0].lines) == 6
    assert any("compiled" in text.get_text() for text in crowded.legends[0].get_texts())
    pyplot.close("all")


def test_speeds_of_several_seeds_have_an_interval():
    figure = plots.pareto(read_committed(SUMMARIES / "mve"))
    assert figure.axes[0].containers, "error bars"
    assert figure.axes[0].get_ylim()[0] == 0
    tick = figure.axes[0].yaxis.get_major_formatter()
    assert [tick(value) for value in (2.5, 1200.0)] == ["2.5", "1,200"]
    pyplot.close(figure)
