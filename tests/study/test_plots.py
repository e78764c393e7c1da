"""Plots: one look per loss, no crowded labels, no hash in a title. The committed pictures match the committed rows."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.steps_rows import AGAIN, read_rows
from linrnn.core.plot_style import LOSSES, in_words, looks
from linrnn.losses import loss_names
from linrnn.models.facts import model_in_words
from linrnn.runs.intervals import Estimate
from linrnn.runs.step_parts import parts_of_step, shares_of_step
from linrnn.study import figures, plots
from linrnn.study.benchmarks.largest_batch import batch_verdicts, searches_on_the_h100
from linrnn.study.benchmarks.step_speed import HOST, step_peaks, step_speeds
from linrnn.study.plots.forest import panels_of
from linrnn.study.results import read_committed
from linrnn.study.verdicts import CONTROL

ROOT = Path(__file__).resolve().parents[2]
SUMMARIES = ROOT / "results" / "summaries"


def test_every_loss_has_a_colour_and_a_marker_of_its_own_and_compiled_is_grey() -> None:
    assert set(loss_names()) <= LOSSES.keys()
    for kind in (0, 1):
        assert len({look[kind] for look in LOSSES.values()}) == len(LOSSES)
    red, green, blue = (int(LOSSES["compiled"][0][i : i + 2], 16) for i in (1, 3, 5))
    assert red == green == blue


def test_a_loss_with_other_options_keeps_its_colour_and_marker() -> None:
    found = looks(["cce_kahan accumulate=bf16", "cce_kahan", "liger", "unknown"])
    plain, variant = found["cce_kahan"], found["cce_kahan accumulate=bf16"]
    assert (plain.colour, plain.marker) == (variant.colour, variant.marker)
    assert (plain.filling, plain.dash) == ("full", "-")
    assert (plain.filling, plain.dash) != (variant.filling, variant.dash)
    assert next(iter(found)) == "cce_kahan accumulate=bf16", "legends keep the order"
    many = looks(["cce_kahan", *(f"cce_kahan workspace_mib={2**k}" for k in range(11))]).values()
    assert len({(look.colour, look.filling) for look in many}) == len({(look.colour, look.dash) for look in many}) == 12


def test_losses_and_models_are_named_in_words() -> None:
    assert in_words("compiled") == "compiled (torch.compile)"
    assert in_words("cce_kahan accumulate=bf16") == "cce_kahan (ours, exact) accumulate=bf16"
    assert in_words("liger") == "liger"
    assert model_in_words("gla", "1b3", 1_740_000_000) == "GLA 1b3 (1.7 B parameters)"
    assert model_in_words("kda", "mve", 10_291_200) == "KDA mve (10 M parameters)"
    assert model_in_words("gla", "smoke", 461_696) == "GLA smoke (0.46 M parameters)"


def test_seeds_are_one_line_with_a_band_and_a_panel_has_six_lines_at_most() -> None:
    runs = read_committed(SUMMARIES / "mve")
    names = {"compiled", "standard", "liger", "cce_kahan"}
    assert names <= {run.summary["loss"] for run in runs}
    figure = plots.loss_curves(runs)
    top, bottom = figure.axes
    assert len(top.lines) == 5, "four losses, one of them with two options"
    assert len(bottom.lines) == 4, "all but the baseline"
    assert len(top.collections) == 4, "bands of those with several seeds"
    many = [
        replace(run, summary={**run.summary, "loss": f"loss{i}", "run_name": f"{i}"})
        for i in range(9)
        for run in runs[:1]
    ]
    crowded = plots.loss_curves([*many, *[run for run in runs if run.summary["loss"] == "compiled"]])
    assert len(crowded.axes[0].lines) == 6
    assert any("compiled" in text.get_text() for text in crowded.legends[0].get_texts())
    pyplot.close("all")


def test_speeds_of_several_seeds_have_an_interval() -> None:
    figure = plots.pareto(read_committed(SUMMARIES / "mve"))
    assert figure.axes[0].containers, "error bars"
    assert figure.axes[0].get_ylim()[0] == 0
    tick = figure.axes[0].yaxis.get_major_formatter()
    assert [tick(value) for value in (2.5, 1200.0)] == ["2.5", "1,200"]
    pyplot.close(figure)


def test_bars_of_memory_end_at_the_peak_where_the_loss_layer_is_the_peak() -> None:
    runs = [run for run in read_committed(SUMMARIES / "phase2_expandable") if run.summary["loss"] == "standard"]
    figure = plots.memory_parts(runs)
    peaks = sorted(run.summary["peak_memory_bytes"] / 2**30 for run in runs)
    ends = sorted(patch.get_x() + patch.get_width() for patch in figure.axes[0].patches)
    assert ends[-1] == pytest.approx(peaks[-1], rel=1e-3)
    pyplot.close(figure)


def test_the_overview_draws_every_point_of_the_forest_plot_and_counts_the_answers() -> None:
    figure, points = figures.at_a_glance(ROOT / "results"), figures.study_points(ROOT / "results")
    panels = panels_of(points)
    assert len(figure.axes) == len(panels) == len(figures.study(ROOT / "results").axes) > 9
    for axes, own in zip(figure.axes, panels, strict=True):
        markers = [line for line in axes.lines if len(line.get_xdata()) == 1]
        assert sorted(line.get_xdata()[0] for line in markers) == sorted(row.verdict.value or 0 for row in own)
        hollow = [line for line in markers if line.get_markerfacecolor() == "white"]
        assert len(hollow) == sum(row.verdict.verdict == "undecided" for row in own)
        question, *counts = [text.get_text() for text in axes.texts]
        assert f"{own[0].verdict.criterion.target:g}" in question
        judged = [row.verdict for row in own if row.verdict.backend not in (AGAIN, CONTROL)]
        by_base = {base: [v for v in judged if v.against == base] for base in ("compiled", "standard")}
        told = []
        for base, found in by_base.items():
            met, undecided = (sum(v.verdict == answer for v in found) for answer in ("met", "undecided"))
            words = f"{met} of {len(found)} met" + (f", {undecided} undecided" if undecided else "")
            head = {"compiled": "against compiled: ", "standard": "against eager: "}[base]
            told += [head * own[0].verdict.criterion.ratio + words] if found else []
        assert counts == told, question


def test_the_studys_pictures_draw_undecided_points_hollow_and_names_steps_that_wait_for_the_host() -> None:
    of_speed, figure = figures.study_speed(ROOT / "results"), figures.study(ROOT / "results")
    speed, mve, liger, batch, at_largest, memory, loss, curves, *filters = figure.axes
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [axes.get_title(loc="left") for axes in of_speed.axes] == [*titles[:3], titles[4]]
    assert titles[0] == "Tokens/s, same batch: ratio ≥ 1.08 asked (more is better; n = 6 to 8)"
    assert titles[6] == "Final training loss minus compiled's, MVE: within ±0.01 nats asked (left: lower; n = 12)"

    def faces(axes: Axes) -> list[str]:
        return [str(line.get_markerfacecolor()) for line in axes.lines if len(line.get_xdata()) == 1]

    def names(axes: Axes) -> list[str]:
        return [label.get_text() for label in axes.get_yticklabels()]

    rows = [
        [row for name in own for row in read_rows(ROOT / "results" / "bench_steps" / f"{figures.DEVICE}{name}")]
        for own in figures.STEPS
    ]
    speeds = [one.verdict for together in rows for one in step_speeds(together)]
    of_mve = [v for v in speeds if " mve" in v.setting]
    assert len(faces(mve)) == len(of_mve) - 4 == 6, "without eager's and compiled's own verdicts"
    assert len(names(mve)) == 2
    drawn = [v for v in speeds if v.backend in ("cce_kahan", AGAIN) and v not in of_mve]
    assert faces(speed).count("white") == sum(v.verdict == "undecided" for v in drawn) > 0
    assert len(faces(speed)) == len(drawn) > faces(speed).count("white")
    assert len(names(speed)) == len({v.setting for v in drawn}) == sum(v.backend == AGAIN for v in drawn)
    waiting = {v.setting.split(",")[0] for v in drawn if HOST in v.remark}
    assert {name.split(",")[0] for name in names(speed) if name.endswith("(host)")} == waiting == {"GLA 350m"}
    peaks = [v for together in rows[:3] for v in step_peaks(together) if v.value]
    shown = [text.get_text() for text in memory.texts]
    today = [f"{v.value:.3f}" for v in peaks if v.backend == "cce_kahan" and "1b3" in v.setting]
    assert len(today) == 15
    assert all(shown.count(value) >= today.count(value) for value in today), "today's kernels, not older ones"
    assert "white" not in faces(memory) + faces(batch), "they do not scatter"
    ratios = [verdict.value for _, verdict in batch_verdicts(searches_on_the_h100(ROOT / "results"))]
    assert len(names(batch)) == 12, "four models, three kinds of checkpointing"
    largest = read_rows(ROOT / "results" / "bench_steps" / f"{figures.DEVICE}{figures.AT_LARGEST[0]}")
    own = [one.verdict for one in step_speeds(largest) if one.verdict.backend in ("cce_kahan", AGAIN)]
    assert len(faces(at_largest)) == len(own) == 36
    assert faces(at_largest).count("white") == sum(v.verdict == "undecided" for v in own) == 3
    assert set(names(at_largest)) == set(names(batch)), "without the batches"
    assert not at_largest.patches, "a loss layer without cost would have the same batch"
    assert sorted(text.get_text() for text in batch.texts) == sorted(f"{ratio:.2f}" for ratio in ratios)
    assert all(bar.get_width() < 0 for bar in memory.patches)
    assert all(bar.get_width() > 0 for bar in speed.patches)
    assert names(loss)[-1] == names(curves)[-1] == "control (compiled_nudged)"
    assert "white" not in faces(loss), "all met"
    assert set(faces(curves)) == {"white"}, "all undecided"
    targets = [line.get_xdata()[0] for line in loss.lines if line.get_color() == "#B2182B"]
    assert sorted(targets) == [-0.01, 0.01], "equal within the margin, to either side"
    of_liger = [v for v in speeds if (v.backend, v.against) == ("liger", "compiled") and "1b3" in v.setting]
    assert len(names(liger)) == len(faces(liger)) == len(of_liger) == 10
    told = dict(zip((title.split(":")[0] for title in titles[8:]), filters, strict=True))
    assert list(told) == [*(panel for panel, _, _ in figures.PANELS), figures.FINE_TUNED_LOSS]
    for (panel, _, groups), axes in zip(figures.PANELS, filters[:3], strict=True):
        lines = [line for words in groups.values() for line in words.values()]
        assert set(names(axes)) == set(lines), panel
    training, test, large, tuned = filters
    assert faces(training).count("white") == 1, "Apple's kernels"
    assert faces(test).count("white") == 2, "a sample and the control"
    assert set(faces(large)) == {"white"}
    assert [name.split(",")[0] for name in names(tuned)] == [name for name in figures.FINE_TUNED for _ in range(2)]
    assert "asked of ours" in titles[2]
    assert "white" not in faces(tuned)
    assert of_speed.get_size_inches()[1] < 30, "two or three screens"
    pyplot.close(of_speed)
    pyplot.close(figure)


def test_the_filters_picture_shows_every_seed_in_training_and_in_validation() -> None:
    figure = figures.filters(ROOT / "results")
    training, validation = figure.axes
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == [words for words, _ in figures.FILTERS.values()]
    assert [len(line.get_xdata()) for line in training.lines] == [305] * 4
    seeds = [list(map(float, line.get_ydata())) for line in validation.lines]
    assert [len(values) for values in seeds] == [12] * 4
    dropped, sampled, apple, control = seeds
    assert min(dropped) > max(apple) > min(apple) > max(*sampled, *control)
    pyplot.close(figure)


def test_every_committed_picture_is_drawn_from_committed_rows(tmp_path: Path) -> None:
    committed = ROOT / "results" / "figures"
    drawn = figures.draw(ROOT / "results", tmp_path)
    assert {path.name for path in drawn} == {path.name for path in committed.glob("*.png")}


def test_no_title_of_a_committed_group_holds_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Figure, "tight_layout", lambda *_, **__: None)  # places titles, which only are read here
    for directory in sorted(SUMMARIES.glob("*/runs.json.xz")):
        runs = read_committed(directory.parent)
        figure = plots.pareto(runs)
        titles = " ".join(axes.get_title() for axes in figure.axes)
        assert not re.search(r"\b[0-9a-f]{8}\b|-s\d", titles)
        pyplot.close(figure)


def test_a_plot_over_batches_leaves_out_losses_with_one_batch_and_panels_without_a_line() -> None:
    runs = read_committed(SUMMARIES / "largest_h100_gated_deltanet")
    figure = plots.batch_scaling([run for run in runs if run.finished])
    [axes] = [axes for axes in figure.axes if axes.axison]
    assert axes.get_title() == "Gated DeltaNet 1b3 (1.7 B parameters), full checkpointing"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["cce_kahan (ours, exact)"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["75", "84"]
    pyplot.close(figure)


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
    [axes] = plots.step_parts({"a model": parts, "another": parts}, "a title").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a model", "another"]
    widths = sum(bar.get_width() for bar in axes.patches)
    assert widths == pytest.approx(2 * 20_000), "ms of both steps"
    assert "25 %" in [text.get_text() for text in axes.texts], "of the scan"
