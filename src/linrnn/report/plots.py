"""Plots of runs. Each has one message and axes with units. A loss has the same colour in all of them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from linrnn.core.machine import GIB
from linrnn.models.facts import model_in_words
from linrnn.report.curves import SMOOTHED_STEPS, Curve, difference, smoothed
from linrnn.report.plot_style import (
    GREY,
    LOSSES,
    PALE,
    TARGET,
    WIDTH,
    Look,
    close_bars,
    in_words,
    legend_below,
    looks,
    loss_of,
    subplots,
)
from linrnn.report.runs import SETTING, Run, alike, backend_names
from linrnn.report.targets import Target, Verdict
from linrnn.report.verdicts import baseline_of
from linrnn.runs.figures import NOT_MEASURED, WALL_CLOCK, by_wall_clock
from linrnn.runs.intervals import WITHIN, estimate

DEVICE_TIME = "device time"  # earlier tokens/s come from the device time of a step
NO_SPEED = "not measured"  # no run came past its warm-up


# ------------------------------------------------------------------------------------- which runs belong into one plot
def clock_of(runs: Sequence[Run]) -> str:
    """How the runs' tokens/s were measured, in words. Runs that did not finish count: tables show their speeds, too."""
    kinds = {by_wall_clock(run.summary) for run in runs if run.summary["tokens_per_second"]}
    if not kinds:
        return NOT_MEASURED if any(run.gpu_shared for run in runs) else NO_SPEED
    return WALL_CLOCK if all(kinds) else DEVICE_TIME


def heading(runs: Sequence[Run], separator: str = " ") -> str:
    """The model of a panel's runs, with size and number of parameters if all runs share them."""
    sizes = {(run.summary["size"], run.summary["n_parameters"]) for run in runs}
    size, n_parameters = sizes.pop() if len(sizes) == 1 else ("", None)
    return model_in_words(runs[0].summary["model"], size, n_parameters).replace(" (", f"{separator}(")


def varies(runs: Sequence[Run], along: str) -> bool:
    """Whether some runs of one model and loss differ only in `along`, so that a line can join them."""
    values: dict[tuple[str, str], set[Any]] = defaultdict(set)
    for run, name in named(family(measured(runs), along)):
        values[run.summary["model"], name].add(run.summary.get(along))
    return any(len(own) > 1 for own in values.values())


def measured(runs: Sequence[Run]) -> list[Run]:
    """Finished runs of one origin whose speed was measured."""
    return [run for run in runs if run.finished and not run.mixture and run.summary["tokens_per_second"]]


def named(runs: Sequence[Run]) -> list[tuple[Run, str]]:
    return list(zip(runs, backend_names([run.summary for run in runs]), strict=True))


def family(runs: Sequence[Run], along: str) -> list[Run]:
    """For each model the runs that differ only in `along`, in what follows from it, and in checkpointing.

    A model with only one value of `along` has none.
    """
    follow = {along, "steps", "horizon", "n_parameters", "activation_checkpointing", "data_fingerprint"}
    follow |= {"batch_size"} if along == "seq_len" else set()  # steps have equal tokens
    families: dict[str, dict[tuple[Any, ...], list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        families[run.summary["model"]][run.values(key for key in SETTING if key not in follow)].append(run)

    def spread(own: Sequence[Run]) -> int:
        return len({run.summary.get(along) for run in own})

    largest = [max(of_model.values(), key=spread) for of_model in families.values()]
    return [run for own in largest if spread(own) > 1 for run in own]


def one_course(runs: Sequence[Run]) -> list[Run]:
    """For each model the largest set of runs whose curves can be compared."""
    kept: list[Run] = []
    for model in dict.fromkeys(run.summary["model"] for run in runs):
        own = [run for run in runs if run.summary["model"] == model and run.losses]
        members = [[other for other in own if alike(run, other)] for run in own]
        kept += next((group for group in members if len(group) == max(map(len, members))), [])
    return kept


# ------------------------------------------------------------------------------------------ each loss and the baseline
PANELS = {  # the metrics that are drawn, with the words for their axes
    "peak_memory_bytes": "peak memory, ratio to",
    "tokens_per_second": "tokens/s, ratio to",
    "valid_loss_nats": "validation loss, nats above",
    "train_loss_nats": "training loss, nats above",
}
MOST = 3  # panels


def overview(compared: Sequence[Verdict], targets: Sequence[Target] = ()) -> Any | None:
    """A line per model and loss, a panel per metric, with 90 % intervals and what targets ask; None without values."""
    drawn = [v for v in compared if v.value is not None and v.target.metric.name in PANELS]
    metrics = [name for name in PANELS if any(v.target.metric.name == name for v in drawn)][:MOST]
    if not metrics:
        return None
    several = len({v.model for v in drawn}) > 1
    rows = list(dict.fromkeys(_name(v, several) for v in drawn))
    found = looks(v.backend for v in drawn)
    size = (min(2.6 + 2.7 * len(metrics), WIDTH), 0.42 * len(rows) + 1.5)
    figure, grid = subplots(1, len(metrics), figsize=size, sharey=True, squeeze=False)
    lines: dict[str, Any] = {}
    for axes, metric in zip(grid[0], metrics, strict=True):
        own = [v for v in drawn if v.target.metric.name == metric]
        for v in own:
            _point(axes, v, rows.index(_name(v, several)), found[v.backend])
        axes.axvline(1 if own[0].target.metric.ratio else 0, color=GREY, linewidth=0.8, zorder=1)
        for target in targets:
            if target.metric.name == metric:
                for bound in {target.bound, -target.bound if target.rule == WITHIN else target.bound}:
                    lines["target"] = axes.axvline(bound, **TARGET, zorder=2)
        axes.set_xlabel(f"{PANELS[metric]} {own[0].against}")
        axes.margins(x=0.15)
        axes.locator_params(axis="x", nbins=5)
        axes.grid(visible=False, axis="y")
    grid[0][0].set_yticks(range(len(rows)), rows)
    grid[0][0].set_ylim(len(rows) - 0.4, -0.6)
    figure.suptitle("Each loss beside the baseline")
    legend_below(figure, lines, "Bars: 90 % interval of the pairs.")
    return figure


def _name(v: Verdict, several: bool) -> str:
    words = [*([model_in_words(v.model)] if several else []), v.backend]
    return ", ".join([*words, *([v.setting] if v.setting else [])])


def _point(axes: Any, v: Verdict, place: float, look: Any) -> None:
    """A value with its interval and its figure."""
    if v.low is not None and v.high is not None and v.low < v.high:
        axes.plot([v.low, v.high], [place] * 2, color=look.colour, linewidth=1.6, solid_capstyle="butt")
    axes.plot(v.value, place, **look.point)
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    where: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 8, "bbox": white}
    axes.annotate(f"{v.value:{v.target.form}}", (v.value, place), (0, 8), **where)


# --------------------------------------------------------------------------------------------------------- loss curves
MOST_LINES = 6  # in one panel
STEEP = 0.1  # share of steps at the start in which all losses fall alike; the axis leaves their values out


def loss_curves(
    runs: Sequence[Run], title: str = "Do the losses train the same model?", margin: float | None = None
) -> Any:
    """Training losses; below them each loss's difference from the baseline of the same seed. One column per model.

    For each model only the setting that most runs share is drawn, because curves of different settings cannot be
    compared. A model with one loss is left out, if another model has several. A line is the mean over seeds; a band
    reaches from the lowest to the highest seed. At most six losses are drawn, the baseline among them.

    Args:
        margin: half the height of a grey band around no difference, in nats; None: no band.
    """
    runs = one_course(runs)
    baseline = baseline_of(runs)
    labels = _first_six([name for _, name in named(runs)], baseline)
    own = [(run, name) for run, name in named(runs) if name in labels]
    models = list(dict.fromkeys(run.summary["model"] for run, _ in own))
    several = [model for model in models if len({name for run, name in own if run.summary["model"] == model}) > 1]
    models = several or models
    size = (min(3 + 3.6 * len(models), 10), 6.6)
    figure, grid = subplots(2, max(len(models), 1), figsize=size, sharex="col", height_ratios=(2, 1.2), squeeze=False)
    bases = {(run.course, run.summary["seed"]): run for run, _ in own if run.summary["loss"] == baseline}
    found, lines = looks(labels), dict[str, Any]()
    for (top, bottom), model in zip(grid.T, models, strict=False):
        of_model = [(run, name) for run, name in own if run.summary["model"] == model]
        lines |= _draw_losses(top, of_model, found)
        _draw_differences(bottom, of_model, bases, found, margin)
        words = heading([run for run, _ in of_model], "\n" if len(models) > 2 else " ")
        top.set_title(words.replace(" shared_projection_rank=", "\nshared_projection_rank=\n"))
        bottom.set_xlabel("optimizer step")
    grid[0][0].set_ylabel("training loss, nats per token")
    grid[1][0].set_ylabel(f"difference from\n{baseline}, nats")
    figure.suptitle(title)
    seeds = "Bands: lowest to highest seed. " if len({run.summary["seed"] for run in runs}) > 1 else ""
    grey = "" if margin is None else f"Grey: ±{margin:g} nats."
    legend_below(figure, lines, f"Means over {SMOOTHED_STEPS} steps. {seeds}{grey}".strip())
    return figure


def _draw_losses(axes: Any, own: Sequence[tuple[Run, str]], found: Mapping[str, Look]) -> dict[str, Any]:
    """Draw a band for each loss; returns what the legend shows."""
    curves: dict[str, list[Curve]] = defaultdict(list)
    for run, name in own:
        curves[name].append(smoothed(run.losses))
    lines = {in_words(name): band(axes, of_loss, found[name]) for name, of_loss in curves.items()}
    _begin_below_the_start(axes, [curve for of_loss in curves.values() for curve in of_loss])
    return lines


def _draw_differences(
    axes: Any,
    own: Sequence[tuple[Run, str]],
    bases: Mapping[tuple[Any, int], Run],
    found: Mapping[str, Look],
    margin: float | None,
) -> None:
    """Draw a band for each loss's differences from the run of `bases` with the same course and seed."""
    above: dict[str, list[Curve]] = defaultdict(list)
    for run, name in own:
        base = bases.get((run.course, run.summary["seed"]))
        if base is not None and base is not run and (values := difference(run.losses, base.losses)):
            above[name].append(values)
    for name, of_loss in above.items():
        band(axes, of_loss, found[name])
    if axes.lines and margin is not None:
        axes.axhspan(-margin, margin, color=PALE, zorder=0)
    elif axes.lines:
        axes.axhline(0, color=PALE, linewidth=1, zorder=0)
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no two losses to compare", ha="center", va="center", transform=axes.transAxes)


def band(axes: Any, curves: Sequence[Curve], look: Look) -> Any:
    """The mean of several curves over their common steps, and a band from the lowest to the highest."""
    common = set.intersection(*({step for step, _ in curve} for curve in curves))
    values: dict[int, list[float]] = defaultdict(list)
    for curve in curves:
        for step, value in curve:
            if step in common:
                values[step].append(value)
    steps = sorted(values)
    means = [fmean(values[step]) for step in steps]
    if len(curves) > 1:
        low, high = ([bound(values[step]) for step in steps] for bound in (min, max))
        # Outlines stay apart where bands lie on each other.
        faint = {"facecolor": (look.colour, 0.08), "edgecolor": (look.colour, 0.8), "linewidth": 0.6}
        axes.fill_between(steps, low, high, **faint)
    [line] = axes.plot(steps, means, color=look.colour, linestyle=look.dash, linewidth=1.3, alpha=0.9)
    return line


def _begin_below_the_start(axes: Any, curves: Sequence[Curve]) -> None:
    """Limit the axis to values after the steep start, so that the losses' differences are visible."""
    last = max(step for curve in curves for step, _ in curve)
    rest = [value for curve in curves for step, value in curve if step >= STEEP * last]
    low, high = min(rest), max(rest)
    if high > low:
        axes.set_ylim(low - 0.03 * (high - low), high + 0.03 * (high - low))


def _first_six(names: Sequence[str], baseline: str) -> list[str]:
    """The baseline, and as many other losses as fit in a panel."""
    labels = list(dict.fromkeys(names))
    return [label for label in labels if label in sorted(labels, key=lambda label: label != baseline)[:MOST_LINES]]


# ------------------------------------------------------------------------------------------------ memory by component
IN_WORDS = {
    "none": "without checkpointing",
    "selective": "with selective activation checkpointing",
    "full": "with activation checkpointing",
}
# The components of memory while the output layer runs, with their colours.
PARTS = {
    "parameters": "#AAB7C4",
    "optimizer": "#7C8DA0",
    "activations": "#DCCFA8",
    "output layer": "#C03A2B",
}


def memory_parts(runs: Sequence[Run]) -> Any:
    """Memory by component while the output layer runs, one bar per loss, and the measured peak of the whole step.

    Each loss is drawn from its first seed's run. If the peak lies beyond the bar, it occurs elsewhere: in the layers'
    backward pass, after the output layer has released its memory.
    """
    firsts: dict[tuple[str, str, str, int], Run] = {}
    for run, name in named(measured(runs)):
        s = run.summary
        firsts.setdefault((s["model"], s["activation_checkpointing"], name, s["batch_size"]), run)
    several = len({batch for *_, batch in firsts}) > 1
    entries = sorted(firsts.items(), key=lambda entry: _place(*entry[0]))
    groups = list(dict.fromkeys(key[:2] for key, _ in entries))
    figure, axes = subplots(1, 1, figsize=(9, 1.5 + 0.3 * len(entries) + 0.42 * len(groups)))
    bars: dict[str, Any] = {}
    ticks: list[float] = []
    labels: list[str] = []
    place, group = 0.0, None
    for (model, checkpointing, name, batch), run in entries:
        if (model, checkpointing) != group:
            group = model, checkpointing
            place += 0.9 if ticks else 0.0
            words = IN_WORDS[checkpointing]
            axes.text(0, place - 0.55, f"{heading([run])}, {words}", fontsize=9, fontweight="bold", va="bottom")
        bars |= _bar(axes, place, run)
        ticks.append(place)
        labels.append(in_words(name) + (f", {batch} sequences" if several else ""))
        place += 1.0
    axes.set_yticks(ticks, labels)
    axes.set_ylim(place - 0.4, -1.1)
    drawn = [run for _, run in entries]
    gpus = sorted({gpu["name"] for run in drawn for gpu in run.environment.get("gpus", [])})
    commits = sorted({((run.environment.get("git") or {}).get("commit") or "unknown")[:7] for run in drawn})
    batches = sorted({f"{batch} x {run.summary['seq_len']:,} tokens" for (*_, batch), run in entries})
    note = "; ".join([*gpus, *batches, f"commit {', '.join(commits)}", "n = 1 a bar"])
    close_bars(figure, axes, bars, "Where the memory of a training step goes", "GiB while the output layer runs", note)
    return figure


def _place(model: str, checkpointing: str, name: str, batch: int) -> tuple[Any, ...]:
    """What bars are sorted by."""
    order, loss = list(LOSSES), loss_of(name)
    return model, checkpointing != "none", batch, order.index(loss) if loss in order else len(order)


def _bar(axes: Any, place: float, run: Run) -> dict[str, Any]:
    """Draw the bar of a run and its peak; returns what the legend shows."""
    drawn, left = {}, 0.0
    for kind, size in _held(run).items():
        drawn[kind] = axes.barh(place, size / GIB, left=left, color=PARTS[kind], height=0.72)
        left += size / GIB
    if peak := run.summary["peak_memory_bytes"]:
        ends = [place - 0.42, place + 0.42]
        [line] = axes.plot([peak / GIB] * 2, ends, color="black", linewidth=2, solid_capstyle="butt")
        drawn["peak of the step"] = line
        axes.text(max(peak / GIB, left), place, f"  {_gib(peak)}", va="center", fontsize=8.5)
    return drawn


def _held(run: Run) -> dict[str, float]:
    """Bytes by component; for the output layer the larger of its two passes. Gradients of parameters come later."""
    memory = run.summary.get("memory_bytes") or {}
    of_loss = max(memory.get("loss_forward", 0), memory.get("loss_backward", 0))
    return {**{kind: memory.get(kind, 0) for kind in list(PARTS)[:-1]}, "output layer": of_loss}


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


# ------------------------------------------------------------------------------------------------ speed against others
# What tokens/s are drawn against: the words of the axis, and the question.
AXES = {
    "batch_size": ("sequences per batch", "Does a larger batch give speed?"),
    "chunk_size": ("tokens per chunk", "Which chunk size is fastest?"),
    "seq_len": ("tokens per sequence", "What do longer sequences cost?"),
    "vocab_size": ("vocabulary size", "What does a larger vocabulary cost?"),
}


def pareto(runs: Sequence[Run]) -> Any:
    """Tokens/s against peak memory, one panel per model. Up and to the left is better."""
    own = [(run, name, run.summary["peak_memory_bytes"] / GIB) for run, name in named(measured(runs))]
    figure, drawn = _speeds(own, "peak memory, GiB", "Speed against memory (better: up and left)")
    for axes in drawn:
        axes.set_xlim(0, 1.1 * axes.get_xlim()[1])
        axes.locator_params(axis="x", nbins=6)  # more long numbers would overlap
        axes.ticklabel_format(axis="x", useOffset=False)
    return figure


def scaling(runs: Sequence[Run], along: str) -> Any:
    """Tokens/s against `along`, a key of AXES, one panel per model. Runs without a value of it are left out.

    A line joins the settings that differ only in that key. If a model has several such families of settings, its
    largest is drawn. A loss with one value of that key has no line, and is left out.
    """
    own = named(family(measured([run for run in runs if run.summary.get(along)]), along))
    values: dict[tuple[object, str], set[Any]] = defaultdict(set)
    for run, name in own:
        values[_panel(run), name].add(run.summary[along])
    joined = [(run, name, run.summary[along]) for run, name in own if len(values[_panel(run), name]) > 1]
    figure, drawn = _speeds(joined, *AXES[along])
    ticks = sorted({x for *_, x in joined})
    for axes in drawn:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axes.minorticks_off()
    return figure


def _speeds(own: Sequence[tuple[Run, str, float]], x_label: str, title: str) -> tuple[Any, list[Any]]:
    """Tokens/s of (run, loss, x): one panel per model and kind of checkpointing. Returns the figure and its axes.

    A point is the median over seeds, with the 90 % interval if there are several; single seeds are pale. A line joins a
    loss's points. Tokens/s start at zero, so that chance differences look as small as they are.
    """
    panels = list(dict.fromkeys(_panel(run) for run, *_ in own))
    columns = min(max(len(panels), 1), 2)
    rows = max(-(-len(panels) // columns), 1)
    size = (min(1.6 + 4.2 * columns, WIDTH), 1.3 + 3.1 * rows)
    figure, grid = subplots(rows, columns, figsize=size, squeeze=False)
    drawn = list(grid.flat[: len(panels)])
    for spare in grid.flat[len(panels) :]:
        spare.set_axis_off()
    found, lines, several = looks(name for _, name, _ in own), dict[str, Any](), False
    for axes, panel in zip(drawn, panels, strict=True):
        runs = [run for run, *_ in own if _panel(run) == panel]
        points: dict[str, dict[Any, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        for run, name, x in own:
            if _panel(run) == panel:
                points[name][run.setting].append((x, run.summary["tokens_per_second"] / 1e3))
        for name, by_setting in points.items():
            lines[in_words(name)] = _draw(axes, list(by_setting.values()), found[name])
            several |= any(len(seeds) > 1 for seeds in by_setting.values())
        checkpointing = "" if panel[1] == "none" else f", {panel[1]} checkpointing"
        axes.set_title(f"{heading(runs)}{checkpointing}")
        axes.set_xlabel(x_label)
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # after all points are drawn
        axes.yaxis.set_major_formatter("{x:,.10g}")  # a tick at 2.5 is not 2
    for row in grid:
        row[0].set_ylabel(f"thousand tokens/s\n({clock_of([run for run, *_ in own])})")
    figure.suptitle(title)
    legend_below(figure, lines, "Bars: 90 % interval over seeds. Pale: single seeds." if several else "")
    return figure, drawn


def _draw(axes: Any, settings: Sequence[Sequence[tuple[float, float]]], look: Look) -> Any:
    """Draw a loss's points (medians over a setting's seeds), their line and intervals, and pale single seeds."""
    points = []  # x, y, how far the interval reaches down and up
    for seeds in settings:
        found = estimate([y for _, y in seeds], ratios=False)
        y, low, high = found.value, found.low, found.high
        down, up = (0.0 if low is None else max(y - low, 0.0)), (0.0 if high is None else max(high - y, 0.0))
        points.append((median(x for x, _ in seeds), y, down, up))
        if len(seeds) > 1:
            pale = {**look.point, "markersize": 4, "alpha": 0.4, "markeredgewidth": 0}
            axes.plot(*zip(*seeds, strict=True), **pale)
    xs, ys, *reach = zip(*sorted(points), strict=True)
    if any(map(any, reach)):
        axes.errorbar(xs, ys, reach, fmt="none", ecolor=look.colour, elinewidth=1.1, capsize=2.5, alpha=0.8)
    [line] = axes.plot(xs, ys, **look.line, linewidth=1.2, alpha=0.9)
    return line


def _panel(run: Run) -> tuple[str, str]:
    return run.summary["model"], run.summary["activation_checkpointing"]
