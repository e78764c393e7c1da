"""Plots of runs: one message each, labelled axes with units, the same colour for a loss everywhere."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from linrnn.bench.loss.rows import crossovers
from linrnn.study.curves import SMOOTHED_STEPS, difference
from linrnn.study.intervals import LEAST_PAIRS
from linrnn.study.results import SETTING, WALL_CLOCK, Run, alike, backend_names, loss_time_share
from linrnn.study.verdicts import BASELINES

GIB = 2**30
DEVICE_TIME = "device time"  # of a step: what tokens/s of before come from
# Okabe and Ito's colours, readable with any colour vision; a loss with other options takes the next free one.
COLOURS = {
    "compiled": "#000000",
    "standard": "#999999",
    "cce_kahan": "#0072B2",
    "cce_filter": "#56B4E9",
    "liger": "#D55E00",
    "fla": "#E69F00",
    "torch_native": "#009E73",
    "cce_apple": "#CC79A7",
}
DASHES = ("-", "--", ":", "-.")


def save(figure: Any, path: Path) -> Path:
    """Write a PNG and let go of the figure."""
    from matplotlib import pyplot

    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def loss_curves(runs: Sequence[Run], title: str) -> Any:
    """Training losses, and each run's difference from the baseline of its seed below them, a column a model.

    Of each model the setting that most runs share is drawn: curves of others cannot be laid over each other. Seeds of a
    loss have its colour, and a dash each.
    """
    runs = _one_course(runs)
    models = list(dict.fromkeys(run.summary["model"] for run in runs))
    figure, grid = subplots(
        2, len(models), figsize=(3 + 4 * len(models), 7.5), sharex="col", height_ratios=(2, 1), squeeze=False
    )
    names, colours = backend_names([run.summary for run in runs]), _colours(runs)
    baseline = baseline_of(runs)
    bases = {(run.course, run.summary["seed"]): run for run in runs if run.summary["loss"] == baseline}
    seeds = sorted({run.summary["seed"] for run in runs})
    lines: dict[str, Any] = {}
    for run, name, colour in zip(runs, names, colours, strict=True):
        top, bottom = grid[:, models.index(run.summary["model"])]
        dash = DASHES[seeds.index(run.summary["seed"]) % len(DASHES)]
        style = {"color": colour, "linewidth": 1.2, "alpha": 0.9, "linestyle": dash}
        label = f"{name}, seed {run.summary['seed']}" if len(seeds) > 1 else name
        [lines[label]] = top.plot(*zip(*run.losses, strict=True), **style)
        base = bases.get((run.course, run.summary["seed"]))
        if base is not None and base is not run and (above := difference(run.losses, base.losses)):
            bottom.plot(*zip(*above, strict=True), **style)
    for (top, bottom), model in zip(grid.T, models, strict=True):
        top.set_title(model)
        bottom.set_xlabel("optimizer step")
        if bottom.lines:
            bottom.axhspan(-0.01, 0.01, color="0.9")
        else:
            bottom.set_yticks([])
            bottom.text(0.5, 0.5, "no two losses to compare", ha="center", va="center", transform=bottom.transAxes)
    grid[0][0].set_ylabel("training loss, nats per token")
    some = "; of a thinned curve" if any(run.thinned for run in runs) else ""
    grid[1][0].set_ylabel(f"loss - {baseline}'s, nats\n(mean of {SMOOTHED_STEPS} steps{some}; grey: ±0.01)")
    figure.suptitle(title)
    _legend_below(figure, lines)
    return figure


def dropped_mass(runs: Sequence[Run]) -> Any:
    """Softmax mass that filters drop from a token, mean and 99th percentile, by step, a panel a model; seeds of a loss
    have one colour."""
    filtered = [run for run in runs if "dropped_mass_mean" in run.statistics]
    models = list(dict.fromkeys(run.summary["model"] for run in filtered))
    figure, [panels] = subplots(1, len(models), figsize=(3.5 + 4.5 * len(models), 4.8), sharey=True, squeeze=False)
    lines = {}
    names = backend_names([run.summary for run in filtered])
    for run, label, colour in zip(filtered, names, _colours(filtered), strict=True):
        axes = panels[models.index(run.summary["model"])]
        for name, style in (("dropped_mass_mean", "-"), ("dropped_mass_p99", ":")):
            if curve := run.statistics.get(name):
                words = f"{label}, {'mean' if style == '-' else '99th percentile'}"
                [lines[words]] = axes.plot(*zip(*curve, strict=True), style, color=colour)
    for axes, model in zip(panels, models, strict=True):
        axes.set_title(model)
        axes.set_xlabel("optimizer step")
    panels[0].set_ylabel("softmax mass not kept, of 1")
    panels[0].set_ylim(0, 1.02)
    figure.suptitle("How much of the gradient's mass does a filter drop, or leave to chance?")
    _legend_below(figure, lines)
    return figure


def pareto(runs: Sequence[Run]) -> Any:
    """Tokens/s against peak memory, a panel a model: up and to the left is better."""
    return _panels(
        runs,
        x=lambda s: s["peak_memory_bytes"] / GIB,
        x_label="peak memory, GiB",
        title="Speed against memory (better: up and left)",
    )


def batch_scaling(runs: Sequence[Run]) -> Any:
    """Tokens/s against the batch, a panel a model."""
    return _panels(
        runs,
        x=lambda s: s["batch_size"],
        x_label="sequences per batch",
        title="Does a larger batch give speed?",
        along="batch_size",
    )


def length_scaling(runs: Sequence[Run]) -> Any:
    """Tokens/s against the sequences' length at equal tokens a step, a panel a model."""
    return _panels(
        runs,
        x=lambda s: s["seq_len"],
        x_label=AXES["seq_len"],
        title="What do longer sequences cost?",
        along="seq_len",
        from_zero=True,
    )


def chunk_sizes(runs: Sequence[Run]) -> Any:
    """Tokens/s against the recurrent kernel's chunk size, a panel a model; runs that leave it to FLA are not drawn."""
    return _panels(
        [run for run in runs if run.summary.get("chunk_size")],
        x=lambda s: s["chunk_size"],
        x_label="tokens per chunk",
        title="Which chunk size is fastest?",
        along="chunk_size",
    )


def vocabulary_crossover(runs: Sequence[Run]) -> Any:
    """Tokens/s relative to the baseline of the same seed by vocabulary, a panel a model: above 1 a loss pays."""
    baseline = baseline_of(runs)
    speed: dict[tuple[Any, ...], float] = {}
    for run in _measured(runs):
        if run.summary["loss"] == baseline:
            speed[run.setting, run.summary["seed"]] = run.summary["tokens_per_second"]
    return _panels(
        [run for run in runs if (run.setting, run.summary["seed"]) in speed],
        x=lambda s: s["vocab_size"],
        x_label="vocabulary, entries",
        y=lambda run: run.summary["tokens_per_second"] / speed[run.setting, run.summary["seed"]],
        y_label=f"tokens/s relative to {baseline}",
        title="From which vocabulary on does a loss pay?",
        along="vocab_size",
        level=1.0,
    )


AXES = {"seq_len": "tokens per sequence", "vocab_size": "vocabulary, entries"}


def loss_time(runs: Sequence[Run], along: str) -> Any:
    """The loss layer's share of a step's time against `along` (seq_len or vocab_size), a panel a model."""
    return _panels(
        [run for run in runs if loss_time_share(run) is not None],
        x=lambda s: s[along],
        x_label=AXES[along],
        y=lambda run: 100 * (loss_time_share(run) or 0),
        y_label="loss layer / step, %",
        title="How much of the time is the loss layer?",
        along=along,
        from_zero=True,
    )


def loss_share(runs: Sequence[Run], along: str) -> Any:
    """The loss layer's share of peak memory against `along` (seq_len or vocab_size), a panel a model."""
    return _panels(
        [run for run in runs if loss_layer_share(run) is not None],
        x=lambda s: s[along],
        x_label=AXES[along],
        y=lambda run: 100 * (loss_layer_share(run) or 0),
        y_label="loss layer / peak memory, %",
        title="How much of the memory is the loss layer?",
        along=along,
        from_zero=True,
    )


def varies(runs: Sequence[Run], along: str) -> bool:
    """Whether runs that can be joined by a line differ in `along`."""
    return bool(_family(_measured(runs), along))


def loss_layer_share(run: Run) -> float | None:
    """The most that the loss layer's passes add, gradients included, as a share of the peak; None on a CPU."""
    memory, peak = run.summary.get("memory_bytes") or {}, run.summary["peak_memory_bytes"]
    sizes = [memory[key] for key in ("loss_forward", "loss_backward") if key in memory]
    return max(sizes) / peak if sizes and peak else None


def crossover_lines(runs: Sequence[Run]) -> list[str]:
    """In words: the vocabularies at which a loss passes the baseline, between those measured: its steps, and the loss
    layer's own kernels, which a step that waits for the host hides."""
    baseline, named = baseline_of(runs), _named(_family(_measured(runs), "vocab_size"))
    times: dict[tuple[str, str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run, name in named:
        summary = run.summary
        if summary.get("activation_checkpointing") not in (None, "none"):
            continue
        own = {
            "step": 1 / summary["tokens_per_second"],
            "loss layer": sum((summary.get("loss_layer_ms") or {}).values()),
        }
        for part, time in own.items():
            if time:
                times[part, summary["model"], name][summary["vocab_size"]].append(time)
    lines: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (part, model, name), own_times in times.items():
        base = times.get((part, model, baseline), {})
        sizes = sorted(own_times.keys() & base.keys())
        if name == baseline or len(sizes) < 2:
            continue
        ratios = [median(own_times[size]) / median(base[size]) for size in sizes]
        passes = [
            f"{'faster' if found.faster_above else 'slower'} than {baseline}'s above about {found.size:,.0f}"
            for found in crossovers(sizes, ratios)
        ]
        n = min(len(side[size]) for size in sizes for side in (own_times, base))
        few = "" if n >= LEAST_PAIRS else f" (n = {n}: undecided)"
        always = f"{'faster' if ratios[0] <= 1 else 'slower'} than {baseline}'s from {sizes[0]:,} to {sizes[-1]:,}"
        lines[model, name].append(f"{part} {', '.join(passes) or always}{few}")
    return [f"* {model} x {name}: {'; '.join(parts)}" for (model, name), parts in lines.items()]


def memory_parts(runs: Sequence[Run]) -> Any:
    """Peak memory by component, a bar a run; of each loss the first seed's."""
    kinds = ("parameters", "gradients", "optimizer", "activations", "loss layer")
    shades = ("#44546A", "#8497B0", "#ADB9CA", "#F4B183", "#C00000")
    firsts = {
        (run.summary["model"], name, run.summary.get("activation_checkpointing") or "none"): run
        for run, name in _named(_measured(runs))[::-1]
    }
    entries = [
        (f"{model}, {name}" + (", checkpointing" if checkpointing == "full" else ""), run)
        for (model, name, checkpointing), run in list(firsts.items())[::-1]
    ]
    figure, axes = subplots(1, 1, figsize=(8, 1.9 + 0.35 * len(entries)))
    bars: dict[str, Any] = {}
    for row, (_, run) in enumerate(entries):
        memory, left = run.summary["memory_bytes"], 0.0
        loss = max(memory.get("loss_forward", 0), memory.get("loss_backward", 0))
        # Gradients of the parameters come into being after the loss layer's peak: they are shown beside it.
        sizes = [*(memory.get(kind, 0) for kind in kinds[:-1]), loss]
        for kind, size, shade in zip(kinds, sizes, shades, strict=True):
            bars[kind] = axes.barh(row, size / GIB, left=left, color=shade)
            left += size / GIB
    axes.set_yticks(range(len(entries)), [label for label, _ in entries])
    axes.invert_yaxis()
    axes.set_xlabel("GiB (not all of it at the same moment)")
    axes.set_title("Where the memory goes")
    _legend_below(figure, bars)
    return figure


def clock_of(runs: Sequence[Run]) -> str:
    """What the runs' tokens/s come from, in words."""
    kinds = {run.summary.get("tokens_per_second_is") == WALL_CLOCK for run in _measured(runs)}
    if kinds == {True}:
        return WALL_CLOCK
    return DEVICE_TIME if kinds <= {False} else f"{WALL_CLOCK} or {DEVICE_TIME}"


def baseline_of(runs: Sequence[Run]) -> str:
    """The loss that ratios are taken to: compiled where it was run, else eager, else our exact one."""
    losses = {run.summary["loss"] for run in runs if run.finished and not run.mixture}
    return next((name for name in (*BASELINES, "cce_kahan") if name in losses), BASELINES[0])


# -------------------------------------------------------------------------------------------------------- drawing
def _panels(
    runs: Sequence[Run],
    *,
    x: Callable[[dict[str, Any]], float],
    x_label: str,
    title: str,
    y: Callable[[Run], float] | None = None,
    y_label: str = "thousand tokens/s",
    along: str | None = None,
    level: float | None = None,
    from_zero: bool = False,
) -> Any:
    """A panel a model, a colour a loss. With `along` lines join a loss's points, medians over seeds, in settings
    that differ in that key alone; of several such families each model's largest is drawn. `from_zero`: one scale for
    all panels, so that what runs differ in by chance looks as small as it is.
    """
    value = y or (lambda run: run.summary["tokens_per_second"] / 1e3)
    measured = _named(_measured(runs) if along is None else _family(_measured(runs), along))
    models = list(dict.fromkeys(run.summary["model"] for run, _ in measured))
    columns = min(max(len(models), 1), 2)
    rows = max(-(-len(models) // columns), 1)
    size = (1 + 4.5 * columns, 0.8 + 3.8 * rows)
    figure, grid = subplots(rows, columns, figsize=size, squeeze=False, sharey=from_zero)
    for spare in grid.flat[len(models) :]:
        spare.set_axis_off()
    lines: dict[str, Any] = {}
    colours = dict(zip([name for _, name in measured], _colours([run for run, _ in measured]), strict=True))
    for axes, model in zip(grid.flat, models, strict=False):
        series: dict[tuple[str, Any], list[tuple[float, float]]] = defaultdict(list)
        for run, name in measured:
            if run.summary["model"] == model:
                checkpointing = run.summary.get("activation_checkpointing")
                series[name, checkpointing].append((x(run.summary), value(run)))
        for (name, checkpointing), points in series.items():
            label = name if checkpointing in (None, "none") else f"{name}, checkpointing {checkpointing}"
            style, face = (DASHES[0], colours[name]) if checkpointing in (None, "none") else (DASHES[1], "white")
            if along is not None:
                by_x = {one: [b for a, b in points if a == one] for one, _ in points}
                points = [(one, median(values)) for one, values in by_x.items()]
            xs, ys = zip(*sorted(points), strict=True)
            marks = {"marker": "o", "markerfacecolor": face, "linestyle": style if along else ""}
            [lines[label]] = axes.plot(xs, ys, color=colours[name], alpha=0.9, **marks)
        if level is not None:
            axes.axhline(level, color="0.6", linewidth=0.8)
        if along is not None:
            axes.set_xscale("log", base=2)
            ticks = sorted({x(run.summary) for run, _ in measured})
            axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
            axes.minorticks_off()
        else:
            axes.locator_params(axis="x", nbins=6)  # long figures close to each other would overlap
            axes.ticklabel_format(axis="x", useOffset=False)
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.set_title(model)
        axes.set_xlabel(x_label)
        axes.grid(alpha=0.25)
    for row in grid:
        row[0].set_ylabel(f"{y_label}\n({clock_of(runs)})" if "tokens/s" in y_label else y_label)
    if from_zero:  # once all points are there
        grid[0, 0].set_ylim(0, 1.05 * grid[0, 0].get_ylim()[1])
    figure.suptitle(title)
    _legend_below(figure, lines)
    return figure


def _legend_below(figure: Any, lines: dict[str, Any]) -> None:
    """The legend of all panels below them, and room for it."""
    columns = max(min(len(lines), int(figure.get_figwidth() * 12 // max(map(len, lines), default=1)), 4), 1)
    height = 0.22 * -(-len(lines) // columns) + 0.1  # inches
    figure.tight_layout(rect=(0, height / figure.get_figheight(), 1, 1))
    if lines:
        figure.legend(list(lines.values()), list(lines), loc="lower center", ncol=columns, fontsize="small")


def _one_course(runs: Sequence[Run]) -> list[Run]:
    """Of each model the runs whose curves can be laid over each other: the course that most of them took."""
    kept: list[Run] = []
    for model in dict.fromkeys(run.summary["model"] for run in runs):
        own = [run for run in runs if run.summary["model"] == model and run.losses]
        members = [[other for other in own if alike(run, other)] for run in own]
        kept += next((group for group in members if len(group) == max(map(len, members))), [])
    return kept


def _family(runs: Sequence[Run], along: str) -> list[Run]:
    """Of each model the runs whose settings differ in `along` (and what follows from it) and checkpointing alone; none
    of a model with one value of `along`.
    """
    follow = {along, "steps", "horizon", "n_parameters", "activation_checkpointing", "data_fingerprint"}
    if along == "seq_len":
        follow.add("batch_size")  # equal tokens a step

    def family(run: Run) -> tuple[Any, ...]:
        return run.values(key for key in SETTING if key not in follow)

    kept: list[Run] = []
    for model in dict.fromkeys(run.summary["model"] for run in runs):
        own = [run for run in runs if run.summary["model"] == model]
        values: dict[tuple[Any, ...], set[Any]] = defaultdict(set)
        for run in own:
            values[family(run)].add(run.summary.get(along))
        largest = max(values, key=lambda one: len(values[one]))
        if len(values[largest]) < 2:
            continue
        kept += [run for run in own if family(run) == largest]
    return kept


def subplots(*arguments: Any, **options: Any) -> Any:
    import matplotlib

    if "inline" not in matplotlib.get_backend():
        matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot.subplots(*arguments, **options)


def _measured(runs: Sequence[Run]) -> list[Run]:
    """Finished runs of one origin whose speed was measured."""
    return [run for run in runs if run.finished and not run.mixture and run.summary["tokens_per_second"]]


def _named(runs: Sequence[Run]) -> list[tuple[Run, str]]:
    return list(zip(runs, backend_names([run.summary for run in runs]), strict=True))


def _colours(runs: Sequence[Run]) -> list[str]:
    """A colour for each run's loss; the same loss with other options gets a further one."""
    names = backend_names([run.summary for run in runs])
    taken: dict[str, str] = {}
    for run, name in zip(runs, names, strict=True):
        if name not in taken:
            own = COLOURS.get(run.summary["loss"])
            taken[name] = own if own and own not in taken.values() else f"C{len(taken) % 10}"
    return [taken[name] for name in names]
