"""Draw the pictures of README and the study from committed rows into results/figures/: `python -m study.pictures`.

Each is written as a PNG and as an SVG. A title says what was found, with figures from claims.yaml.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common import devices_of, save_picture
from benchmarks.steps_rows import AGAIN, BASELINE, EAGER
from benchmarks.steps_rows import Row as StepRow
from linrnn.core.files import read_object
from linrnn.models.facts import model_in_words
from linrnn.report.curves import difference
from linrnn.report.plot_style import COLOURS, GREY, LOSSES, PALE, Look, legend_below, looks, loss_of, subplots
from linrnn.report.plots import band, named
from linrnn.report.verdicts import EXACT
from study.criteria import CONTROL, FINAL_LOSS, FOLDERS
from study.measures import GIB, RESULTS, beside_compiled, claim, rows_in, searches, told
from study.step_parts import parts_of_step
from study.step_speed import CHECKPOINTING
from study.tables import gain, pairs, rows_of, runs_of

MARGIN = FINAL_LOSS.bound  # nats
KINDS = {"none": "no activation checkpointing", "full": "full activation checkpointing"}
ORDER = ("standard", "liger", "cce_kahan")
# The drawn parts of a step: their words, the parts of a breakdown that they hold, and their colours.
PARTS = {
    "linear layers of the mixer": (("mixer/projections",), "#7C8DA0"),
    "token mixing": (("mixer/scan",), "#E0A526"),
    "MLP": (("mlp",), "#AAB7C4"),
    "output layer and loss": (("loss",), "#C03A2B"),
    "optimizer": (("optimizer",), "#DCCFA8"),
    "norms, embedding, rest": (("norms", "embedding", "the rest"), "#E4E4E4"),
}
NARROW = 0.055  # a share of a step whose label would not fit into its segment


def draw(output: Path) -> list[Path]:
    """Draw every picture. Return the paths of the PNGs."""
    pictures = step_by_loss, step, speed_by_vocabulary, largest_batch, final_loss, filters, sampled, gradient_noise
    return [save_picture(picture(), output / f"{picture.__name__}.png") for picture in pictures]


def colour_of(loss: str) -> str:
    return str(LOSSES[loss_of(loss)][0])


def step_by_loss() -> Any:
    """One step of GLA 1.3B with each loss: time and peak memory. It draws whatever losses the folder's rows hold."""
    directory = RESULTS / "bench_steps" / FOLDERS["step_by_loss"]
    rows = [row for row in rows_of(FOLDERS["step_by_loss"]) if _plain_gla(row) and row.loss != AGAIN]
    rows.sort(key=lambda row: -(row.step_ms or math.inf))
    figure, (times, memory) = subplots(1, 2, figsize=(8, 1.3 + 0.36 * len(rows)), sharey=True)
    for axes, key, form in ((times, "step_ms", "{:.0f} ms"), (memory, "peak_gib", "{:.0f} GiB")):
        values = [getattr(row, key) for row in rows]
        most = max(value for value in values if value)
        for place, (row, value) in enumerate(zip(rows, values, strict=True)):
            _bar(axes, place, value, form, colour_of(row.loss))
        axes.set_xlim(0, 1.2 * most)
        axes.grid(visible=False, axis="y")
    times.set_yticks(range(len(rows)), [told(row.loss) for row in rows])
    times.set_ylim(len(rows) - 0.5, -0.5)
    times.set_title("time of a step", loc="left")
    memory.set_title("peak memory", loc="left")
    ours = next(row for row in rows if row.loss == EXACT)
    assert ours.step_ms is not None
    ran = [row for row in rows if row.step_ms]
    more = 100 * ((ran[0].step_ms or 0) / ours.step_ms - 1)
    figure.suptitle(f"A step of GLA 1.3B takes {more:.0f} % longer with {told(ran[0].loss)} than with ours")
    batch = f"{rows[0].batch} x {rows[0].seq:,} tokens, vocabulary {rows[0].v:,}"
    note = f"{devices_of(directory)}, {batch}, bf16, no checkpointing, {ours.rounds} interleaved repetitions."
    legend_below(figure, {}, note)
    return figure


def _bar(axes: Any, place: float, value: float | None, form: str, colour: str) -> None:
    """A horizontal bar with its value; None: out of memory."""
    axes.barh(place, value or 0, color=colour, height=0.7)
    words, ink = (f" {form.format(value)}", "black") if value else ("  out of memory", "#B2182B")
    axes.text(value or 0, place, words, va="center", fontsize=9, color=ink)


def _plain_gla(row: StepRow) -> bool:
    words = ("checkpointing", "compile", "float8", "cuda_graph", "chunk_size", "shared")
    return (row.model, row.size, row.v) == ("gla", "1b3", 128256) and not any(word in row.line for word in words)


# ------------------------------------------------------------------------------------------------------------ study
def step() -> Any:
    """Where a step's time goes for each model, and GLA's peak memory with each loss."""
    directory = RESULTS / "summaries" / "breakdown"
    found = {
        words: read_object(directory / f"{name}.json", ("time", "memory"))
        for words, name in FOLDERS["breakdowns"].items()
    }
    figure, (times, memory) = subplots(1, 2, figsize=(9, 4.3), width_ratios=(1.3, 1))
    bars = draw_parts(times, {words: parts_of_step(one) for words, one in found.items()})
    times.set_xlim(0, 1.16 * times.get_xlim()[1])
    times.set_xlabel("ms of a step with cce_kahan")
    times.set_title("time: four models of 1.3B", loc="left")
    times.grid(visible=False, axis="y")
    without = found["GLA"]["memory"]["peak/without_loss_layer"]["measured"] / GIB
    _peaks(memory, rows_of(""), without)
    share = claim("loss_part")["text"]
    figure.suptitle(f"At 1.3B the loss is {share} of a step, and without checkpointing the layers set the peak")
    legend_below(figure, bars, "One H100, 8 x 2,048 tokens, vocabulary 128,256.")
    return figure


def draw_parts(axes: Any, steps: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The time of a step by part, a bar a model; returns what a legend shows. A segment's label is its share.

    Args:
        steps: a model in words -> seconds by part (:func:`study.step_parts.parts_of_step`).
    """
    bars: dict[str, Any] = {}
    for place, parts in enumerate(steps.values()):
        left, step = 0.0, sum(parts.values())
        for words, (held, colour) in PARTS.items():
            seconds = sum(parts[part] for part in held)
            bars[words] = axes.barh(place, 1e3 * seconds, left=1e3 * left, color=colour, height=0.7)
            if seconds > NARROW * step:
                style = {"ha": "center", "va": "center", "color": "white" if "loss" in held else "black"}
                axes.text(1e3 * (left + seconds / 2), place, f"{100 * seconds / step:.0f} %", fontsize=8.5, **style)
            left += seconds
        axes.text(1e3 * left, place, f"  {1e3 * step:.0f} ms", va="center", fontsize=8.5)
    axes.set_yticks(range(len(steps)), list(steps))
    axes.invert_yaxis()
    return bars


def _peaks(axes: Any, rows: Sequence[StepRow], without: float) -> None:
    """GLA's peak with each loss, without and with checkpointing, and what remains of it without any output layer."""
    own = [row for row in rows if (row.model, row.size, row.v) == ("gla", "1b3", 128256) and row.loss != AGAIN]
    order = (EAGER, BASELINE, "liger", EXACT)
    ticks, labels, place = [], [], 0.0
    for kind in ("no", "full"):
        here = [row for row in own if (CHECKPOINTING in row.line) == (kind == "full")]
        axes.text(0, place - 0.62, f"{kind} checkpointing", fontsize=9, fontweight="bold", va="bottom")
        for row in sorted(here, key=lambda row: order.index(row.loss)):
            _bar(axes, place, row.peak_gib, "{:.1f}", colour_of(row.loss))
            ticks.append(place)
            labels.append(told(row.loss))
            place += 1
        if kind == "no":
            _bar(axes, place, without, "{:.1f}", PALE)
            ticks.append(place)
            labels.append("no output layer at all")
            place += 2
    axes.set_yticks(ticks, labels)
    axes.set_ylim(place - 0.4, -1.4)
    axes.set_xlim(0, 78)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("peak of a step, GiB")
    axes.set_title("memory: GLA with each loss", loc="left")


def speed_by_vocabulary() -> Any:
    """By how much steps with ours are faster than with each baseline, by vocabulary: lowest to highest setting."""
    figure, grid = subplots(1, 2, figsize=(8, 3.9), sharey=True, width_ratios=(1.5, 1))
    noise = _gains(AGAIN, BASELINE)  # how far torch.compile is from itself
    for axes, (title, size) in zip(grid, {"350M, as CUDA graphs": "350m", "1.3B": "1b3"}.items(), strict=True):
        found = {loss: _gains(EXACT, loss, size) for loss in (EAGER, "liger", BASELINE)}
        sizes = sorted({v for gains in found.values() for v in gains})
        spread = [abs(gain) for v, gains in noise.items() for gain in gains if v in sizes]
        axes.axhspan(-max(spread), max(spread), color=PALE, zorder=0)
        for loss, gains in found.items():
            _ranges(axes, [sizes.index(v) for v in gains], list(gains.values()), loss)
        axes.axhline(0, color=GREY, linewidth=0.8, zorder=1)
        axes.set_xticks(range(len(sizes)), [f"{v:,}" for v in sizes])
        axes.set_xlim(-0.5, len(sizes) - 0.2)
        axes.set_xlabel("vocabulary")
        axes.set_title(title)
        axes.grid(visible=False, axis="x")
    most = claim("gain_compiled_350m")["text"].split(" to ")[1]
    grid[0].set_ylim(top=40)
    grid[0].set_ylabel("cce_kahan's steps are faster by, %")
    figure.suptitle(f"At most {most} faster than torch.compile; over eager and Liger the vocabulary decides")
    note = "Bars: lowest to highest of models and checkpointing. Grey: the A/A test, torch.compile built twice."
    legend_below(figure, {}, f"{note} One H100.")
    return figure


def _gains(ours: str, against: str, size: str = "") -> dict[int, list[float]]:
    """Percent by which a loss is faster than another, by vocabulary."""
    found: dict[int, list[float]] = {}
    for row, base in pairs(rows_of(*(name for names in FOLDERS["steps"] for name in names)), ours):
        cpu_bound = row.size == "350m" and "cuda_graph" not in row.line
        if base.loss == against and row.size == (size or row.size) and not cpu_bound:
            found.setdefault(row.v, []).append(gain(row, base))
    return dict(sorted(found.items()))


def _ranges(axes: Any, places: Sequence[int], values: Sequence[Sequence[float]], loss: str) -> None:
    """A bar from the lowest to the highest value at each place, a line through their means, and a name at its end."""
    colour = colour_of(loss)
    means = [fmean(own) for own in values]
    axes.plot(places, means, color=colour, linewidth=1.3, marker="o", markersize=5)
    low, high = ([pick(own) for own in values] for pick in (min, max))
    axes.vlines(places, low, high, color=colour, linewidth=5, alpha=0.45)
    if places:
        style: dict[str, Any] = {"textcoords": "offset points", "ha": "right" if len(places) > 1 else "center"}
        axes.annotate(f"than {told(loss)}", (places[-1], high[-1]), (12, 5), color=colour, fontsize=9, **style)


def largest_batch() -> Any:
    """The largest batch by model and loss, as a multiple of `compiled`'s, from searches with an exact result."""
    found = searches()
    own = {(kind, model, loss): one.batch for (model, kind, loss), one in found.items() if one.exact and one.batch}
    kinds = [kind for kind in KINDS if any(kind == one for one, _, _ in own)]
    models = list(dict.fromkeys(model for _, model, _ in own))
    figure, grid = subplots(1, len(kinds), figsize=(8, 1.7 + 0.46 * len(models)), sharey=True, squeeze=False)
    dots: dict[str, Any] = {}
    for axes, kind in zip(grid[0], kinds, strict=True):
        for (one, model, name), most in own.items():
            base = own.get((kind, model, "compiled"))
            if one == kind and base and name != "compiled":
                alone = name != "liger" or most != own.get((kind, model, "cce_kahan"))
                dots[name] = _dot(axes, models.index(model), name, most / base, f"{most}" if alone else "")
        axes.axvline(1, color=GREY, linewidth=1.2, zorder=1)
        axes.set_title(KINDS[kind])
        axes.set_xlabel("sequences / torch.compile's")
        axes.set_xlim(0, 1.12 * axes.get_xlim()[1])
        axes.grid(visible=False, axis="y")
    grid[0][0].set_yticks(range(len(models)), [model_in_words(model) for model in models])
    grid[0][0].set_ylim(len(models) - 0.5, -0.7)
    low, high = claim("batch_full")["text"].split(" to ")
    figure.suptitle(f"With full checkpointing {low} to {high} times torch.compile's batch fits; Liger's is the same")
    length = next(iter(next(iter(found.values())).probes.values()))["seq_len"]
    shown = {told(name): dots[name] for name in sorted(dots, key=ORDER.index)}
    legend_below(figure, shown, f"Sequences of {length:,} tokens, one search each.")
    return figure


def _dot(axes: Any, place: int, name: str, ratio: float, words: str) -> Any:
    """A dot at a ratio, with words above it. Liger's is a ring, because ours often fits as many."""
    colour, marker, _ = LOSSES[name]
    style: dict[str, Any] = {"markersize": 7, "color": colour, "marker": marker, "linestyle": "none"}
    if name == "liger":
        style |= {"marker": "o", "markersize": 13, "markerfacecolor": "none", "markeredgewidth": 1.8}
    [dot] = axes.plot(ratio, place, **style)
    axes.annotate(words, (ratio, place), (0, 9), textcoords="offset points", ha="center", fontsize=9, color=colour)
    return dot


def final_loss() -> Any:
    """Final training losses minus torch.compile's, a dot a seed, over the band of the noise-floor run."""
    panels = {"10M parameters, 5M tokens": FOLDERS["seeds"], "350M class, 8M tokens": "pretrain_filter"}
    figure, grid = subplots(1, 2, figsize=(8, 3.9), width_ratios=(1.5, 1))
    for axes, (title, group) in zip(grid, panels.items(), strict=True):
        found = beside_compiled(RESULTS / "summaries" / group, "train_loss_nats")
        noise = found.pop(CONTROL).values()
        axes.axhspan(min(noise), max(noise), color=PALE, zorder=0)
        axes.axhline(0, color=GREY, linewidth=0.8, zorder=1)
        order = [loss for loss in (EAGER, "liger", "fla", EXACT, "cce_filter") if loss in found]
        for place, loss in enumerate(order):
            own = [*found[loss].values()]
            spots = [place + 0.3 * (number / max(len(own) - 1, 1) - 0.5) for number in range(len(own))]
            axes.plot(spots, own, "o", color=colour_of(loss), markersize=4.5, alpha=0.75)
            axes.hlines(fmean(own), place - 0.3, place + 0.3, color=colour_of(loss), linewidth=2)
        names = [told(loss).replace(" (", "\n(").replace(" fused", "\nfused") for loss in order]
        axes.set_xticks(range(len(order)), names)
        axes.set_xlim(-0.6, len(order) - 0.4)
        axes.grid(visible=False, axis="x")
        axes.set_title(title)
    grid[0].set_ylabel("final loss minus torch.compile's, nats")
    figure.suptitle("Losses end about as far from torch.compile as rounding alone moves them")
    note = "A dot is a seed, a line their mean. Grey: the noise-floor run, torch.compile with its last bits moved."
    legend_below(figure, {}, note)
    return figure


def filters() -> Any:
    """Pretraining with filters that drop entries or tiles, or sample entries: distances from torch.compile's losses."""
    words_of = {loss: said for loss, said in FOLDERS["filters"]["losses"].items() if loss != EXACT}
    runs = named(runs_of(FOLDERS["filters"]["group"]))
    bases = {run.summary["seed"]: run for run, name in runs if name == BASELINE}
    found = looks([look for _, look in words_of.values()])
    figure, (steps, ends) = subplots(1, 2, figsize=(8, 4.2), width_ratios=(1.9, 1))
    short = {"paper": "dropped", "cce_filter": "\nsampled", "cce_apple": "Apple's", CONTROL: "\nnoise floor"}
    heights = {"paper": 0.17, "cce_apple": -0.075, "cce_filter": 0.035}  # of the curves' names
    for place, (loss, (words, look)) in enumerate(words_of.items()):
        pairs = [(run, bases[run.summary["seed"]]) for run, name in runs if name == loss]
        curves = [difference(run.losses, base.losses) for run, base in pairs]
        band(steps, curves, Look(found[look].colour, "", "full", "-"))
        if look in heights:
            steps.text(305, heights[look], words.replace("`", ""), ha="right", color=found[look].colour, fontsize=9)
        above = [run.summary["valid_loss_nats"] - base.summary["valid_loss_nats"] for run, base in pairs]
        ends.plot([place] * len(above), above, "o", color=found[look].colour, markersize=4.5, alpha=0.7)
    for axes, text in ((steps, "training loss"), (ends, "validation loss, WikiText-103")):
        axes.axhspan(-MARGIN, MARGIN, color=PALE, zorder=0)
        axes.set_title(text, loc="left")
    steps.set_xlabel("optimizer step")
    steps.set_ylabel("nats above torch.compile")
    ends.set_xlim(-0.6, len(words_of) - 0.4)
    steps.set_ylim(bottom=-0.09)
    ends.set_xticks(range(len(words_of)), [short[look] for _, look in words_of.values()])
    figure.suptitle(
        f"Dropping small gradients costs {claim('dropped_loss')['text']} nats; sampling them costs nothing measurable"
    )
    note = f"GLA, 10M parameters, 5M tokens, 12 seeds. Bands: lowest to highest seed. Grey: ±{MARGIN} nats."
    legend_below(figure, {}, note)
    return figure


def sampled() -> Any:
    """The Transformer of 447M with sampled gradients: its loss by time, and minus torch.compile's by step."""
    import pandas

    runs = named(runs_of("pretrain_transformer"))
    bases = {run.summary["seed"]: run for run, name in runs if name == BASELINE}
    names = {BASELINE: "torch.compile", "cce_filter": "sampled gradients", CONTROL: "noise-floor run"}
    colours = {BASELINE: "black", "cce_filter": colour_of("cce_filter"), CONTROL: GREY}
    figure, (times, steps) = subplots(1, 2, figsize=(8, 4))
    drawn = {}
    for name, words in names.items():
        own = [run for run, of in runs if of == name]
        if name != CONTROL:
            losses = pandas.DataFrame([dict(run.losses) for run in own]).mean().rolling(10).mean()  # 100 steps
            minutes = fmean(run.summary["tokens"] / run.summary["tokens_per_second"] / 60 for run in own)
            [drawn[words]] = times.plot(minutes * losses.index / losses.index[-1], losses, color=colours[name])
            beside = losses.iloc[-1] + (0.14 if name == BASELINE else -0.16)
            times.text(minutes, beside, f"{minutes:.1f} min", color=colours[name], ha="center")
        if name != BASELINE:
            curves = [difference(run.losses, bases[run.summary["seed"]].losses) for run in own]
            drawn[words] = band(steps, curves, Look(colours[name], "", "full", "-"))
    steps.axhspan(-MARGIN, MARGIN, color=PALE, zorder=0)
    times.set_ylim(1.5, 5)
    times.set_xlim(0, 7)
    steps.set_ylim(-0.09, 0.09)
    times.set_xlabel("minutes on one H200")
    steps.set_xlabel("optimizer step")
    times.set_title("training loss, nats", loc="left")
    steps.set_title("training loss, nats above torch.compile's", loc="left")
    faster, ends = claim("transformer_speed")["text"], claim("transformer_filter")["text"]
    figure.suptitle(f"Sampled gradients: {faster} faster, validation loss differs by {ends} nats")
    about = "Transformer of 447M, 50M tokens, V = 131,072, three seeds; each run its own process, on one of two H200s."
    note = f"Title: 90 % interval. Blue: lowest to highest seed. Grey band: ±{MARGIN}."
    legend_below(figure, drawn, f"{about}\n{note}")
    return figure


def gradient_noise() -> Any:
    """The share of sampling in a batch's noise, by step: 10M parameters with two batch sizes, and 448M."""
    gpu = FOLDERS["gpus"]["H200"]
    rows, large = (rows_in(f"gradient_noise/{name}.jsonl")[1:] for name in (gpu, f"{gpu}_448m"))
    figure, axes = subplots(1, 1, figsize=(7.2, 3.8))
    lines = [("10M", sequences, rows, "sample_over_batch", "o-") for sequences in (8, 2)]
    lines += [("448M", 8, large, "sample_over_batch", "s-")]
    lines += [("448M, torch.compile's rounding", 8, large, "rounding_over_batch", "x:")]
    for (size, sequences, of, key, style), colour in zip(lines, COLOURS[:4], strict=True):
        own = sorted(
            (row["step"], 100 * row[key], row["tokens"])
            for row in of
            if (row["sequences"], row["parameters"]) == (sequences, "all")
        )
        label = f"{size}, batches of {own[0][2]:,} tokens" if of is rows else size
        axes.plot([step for step, _, _ in own], [share for _, share, _ in own], style, color=colour, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("optimizer step of 16,384 tokens")
    axes.set_ylabel("variance, % of the batch's own")
    axes.legend(fontsize=8)
    most = max(100 * row["sample_over_batch"] for row in rows + large if row["parameters"] == "all")
    figure.suptitle(f"Sampling adds at most {most:.1f} % to the noise that a batch has anyway")
    return figure


if __name__ == "__main__":
    for path in draw(RESULTS / "figures"):
        print(f"wrote {path.relative_to(RESULTS.parent)}")
