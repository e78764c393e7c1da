"""The tables of README, the study and its appendices, from committed rows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import loss_rows
from benchmarks.common import read_runs
from benchmarks.loss_pictures import LIBRARIES, beside_ours, fastest_of_libraries
from benchmarks.steps_rows import AGAIN, BASELINE, EAGER, Row, read_rows
from linrnn.core.tables import Table, show
from linrnn.models.facts import model_in_words
from linrnn.report.runs import Run
from linrnn.report.targets import Target, Verdict
from linrnn.report.verdicts import EXACT
from study.criteria import CONTROL, CRITERIA, CURVES, FINAL_LOSS, FOLDERS, MVE_LOSS, VALID_LOSS
from study.measures import (
    NAMES,
    RESULTS,
    beside_compiled,
    committed,
    memory_of_steps,
    rows_in,
    searches,
    span_of,
    verdicts_of,
)
from study.searches import batch_ratios
from study.step_speed import CPU_BOUND, CPU_BOUND_SHARE, filter_speeds, host_share, names_of, speed_of, speeds

Rows = Iterable[Sequence[object]]
MODELS = ("gla", "gated_deltanet", "kda", "transformer")
LOSSES = (EAGER, BASELINE, "liger", EXACT)
PLAIN = {
    " mve": " 10M", " 350m": " 350M", " 1b3": " 1.3B", "V = ": "vocabulary ", "cuda_graph=true": "CUDA graph",
    "compile=blocks": "compiled layers", "float8=blocks": "float8 layers", "model.chunk_size=": "chunks of ",
    "shared_projection_rank=": "shared projections of rank ",
}  # fmt: skip
TABLES: dict[str, Callable[[], Table]] = {}


def table(*columns: str, words: Sequence[str] = ()) -> Callable[[Callable[[], Rows]], Callable[[], Rows]]:
    """Pages name a table by the function that gives its rows.

    Args:
        words: the columns that hold words; without any, the first one.
    """

    def named_table(rows: Callable[[], Rows]) -> Callable[[], Rows]:
        TABLES[rows.__name__] = lambda: Table(columns, list(rows()), words or columns[:1])
        return rows

    return named_table


def plain(setting: str) -> str:
    """A setting in a reader's words."""
    for ours, theirs in PLAIN.items():
        setting = setting.replace(ours, theirs)
    return setting


def named(loss: str) -> str:
    return NAMES.get(loss, f"`{loss}`")


def rows_of(*names: str) -> list[Row]:
    """Rows of whole steps from folders of bench_steps: a folder, or what follows the device in its name."""
    folders = (name if name.startswith("nvidia") else f"{FOLDERS['device']}{name}" for name in names)
    return [row for folder in folders for row in read_rows(RESULTS / "bench_steps" / folder)]


def runs_of(group: str) -> list[Run]:
    return committed(RESULTS / "summaries" / group)


def interval(found: Verdict | None, form: str = ".3f") -> str:
    """The median and the 90 % interval."""
    if found is None or found.value is None:
        return "-"
    return between(found.value, found.low, found.high, form)


def between(value: float | None, low: float | None, high: float | None, form: str = ".3f") -> str:
    """A value and the ends of its interval, if it has any."""
    if value is None:
        return "-"
    return f"{value:{form}}" + ("" if low is None else f" ({low:{form}} to {high:{form}})")


def judged(found: Verdict, form: str = "+.4f") -> str:
    return f"{interval(found, form)}, {found.verdict}"


def span(values: Sequence[float], form: str) -> str:
    """The smallest and the largest value; one value where both look alike; `-` without any."""
    if not values:
        return "-"
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


def share(value: float | None, form: str = ".1f") -> str:
    """A share in percent."""
    return "-" if value is None else f"{100 * value:{form}} %"


def pairs(rows: Sequence[Row], ours: str = EXACT) -> Iterator[tuple[Row, Row]]:
    """Each row of a loss beside every other loss of its process."""
    for row in rows:
        for base in rows if (row.loss, row.status) == (ours, "ok") else ():
            if (base.line, base.run, base.status) == (row.line, row.run, "ok") and base is not row:
                yield row, base


def gain(row: Row, base: Row) -> float:
    """Percent by which a row's steps are faster, for equally many tokens."""
    return 100 * (median(speeds(row, base)) - 1)


def ending(group: str, target: Target, *losses: str, form: str = "+.4f") -> str:
    """The verdict of a group on the first of `losses` that it has, against torch.compile."""
    found = {(one.target, one.backend, one.against): one for one in verdicts_of(RESULTS / "summaries" / group)}
    own = (found.get((target, loss, BASELINE)) for loss in losses)
    return interval(next((one for one in own if one is not None and one.value is not None), None), form)


# --------------------------------------------------------------------------------------------------------------- setup
@table("experiment", "million parameters", "tokens a step", "vocabulary", "steps", "repeated", "GPU")
def setup() -> Rows:
    """What ran: a row for each kind of experiment."""
    for words, said in FOLDERS["setup"].items():
        if "group" in said:
            runs = [run.summary for run in runs_of(said["group"]) if run.finished]
            one, seeds = runs[0], len({run["seed"] for run in runs})
            sizes, vocabularies, tokens = [one["n_parameters"]], [one["vocab_size"]], one["batch_size"] * one["seq_len"]
            length, repeats, gpu = f"{one['steps']:,}", f"{seeds} seed" + "s" * (seeds > 1), one["device"].split()[1]
        else:
            own = [row for row in rows_of(*said["steps"]) if (row.loss, row.size) == (BASELINE, said["size"])]
            sizes, vocabularies = [row.parameters for row in own], [row.v for row in own]
            tokens, length = own[0].batch * own[0].seq, f"{span_of([row.steps for row in own])} a repetition"
            repeats, gpu = f"{span_of([row.rounds for row in own])} repetitions", "H100"
        millions = span([size / 1e6 for size in sizes], ",.0f")
        yield words, millions, f"{tokens:,}", span(vocabularies, ",.0f"), length, repeats, gpu


# --------------------------------------------------------------------------------------------------------------- speed
BASES = (BASELINE, EAGER, "liger", "fla", "fla fuse_linear=false")


@table("steps", "settings", *map(named, BASES))
def speedups() -> Rows:
    """By how many percent ours is faster than each baseline: a row for each size and vocabulary."""
    for words, said in FOLDERS["speedups"].items():
        gains: dict[str, dict[str, float]] = {}
        for row, base in pairs(rows_of(*said["steps"])):
            recomputes = "checkpointing=" in row.line
            alike = (row.size, row.v) == (said.get("size", row.size), said.get("v", row.v))
            if alike and recomputes == said.get("checkpointing", recomputes):
                gains.setdefault(base.loss, {})[row.line] = gain(row, base)
        cells = [list(gains.get(base, {}).values()) for base in BASES]
        yield words, max(map(len, cells)), *(span(own, "+.1f") for own in cells)


RATIOS = ((EXACT, BASELINE), (EXACT, EAGER), ("liger", BASELINE), (AGAIN, BASELINE))
HEADS = ("setting", "`cce_kahan` / torch.compile", "`cce_kahan` / eager", "Liger / torch.compile", "A/A test")


@table(*HEADS)
def steps() -> Rows:
    """Tokens/s of whole steps, as a multiple of another loss's in the same process."""
    return ratios(FOLDERS["steps"], RATIOS)


@table(*HEADS[:3], HEADS[4])
def steps_at_largest() -> Rows:
    """The same, each loss at its largest batch: sequences of torch.compile / eager / ours."""
    return ratios([FOLDERS["steps_at_largest"]], (*RATIOS[:2], RATIOS[3]))


@table(*HEADS[:2], HEADS[4])
def steps_repeated() -> Rows:
    """Settings of the first table once more, in later processes."""
    return ratios([[name] for name in FOLDERS["steps_repeated"]], (RATIOS[0], RATIOS[3]))


def ratios(folders: list[list[str]], of: Sequence[tuple[str, str]]) -> Rows:
    """Lines of one list of folders are named together: they differ in the vocabulary. CPU-bound ones are left out."""
    for names in folders:
        own = rows_of(*names)
        found = {(row.line, row.loss): row for row in own}
        for line, setting in names_of(own).items():
            cells = [times_as_fast(*(found.get((line, loss)) for loss in pair)) for pair in of]
            if set(cells) - {"-", CPU_BOUND}:
                yield plain(setting), *cells


def times_as_fast(row: Row | None, base: Row | None) -> str:
    speed = speed_of(row, base)
    if row is None or base is None or speed is None:
        return "-"
    cpu_bound = max(host_share(row), host_share(base)) >= CPU_BOUND_SHARE
    return CPU_BOUND if cpu_bound else between(speed.value, speed.low, speed.high)


@table(
    "setting", "loss", "step, ms", "tokens/s", "output layer, ms", "of the step", "peak, GiB", "CPU busy", "n",
    words=("setting", "loss"),
)  # fmt: skip
def step_details() -> Rows:
    """Times and memory behind the ratios, for each setting and loss."""
    for names in FOLDERS["steps"]:
        own = rows_of(*names)
        settings = names_of(own)
        for row in (row for row in own if row.loss != AGAIN and row.status == "ok"):
            if host_share(row) < CPU_BOUND_SHARE:
                step = show(row.step_ms, ".1f"), show(row.tokens_per_second, ",.0f"), show(row.loss_layer_ms, ".1f")
                memory = share(row.loss_layer_share), show(row.peak_gib, ".2f")
                cpu = share(host_share(row), ".0f")
                yield plain(settings[row.line]), named(row.loss), *step, *memory, cpu, row.rounds


@table("1.3B", *map(model_in_words, MODELS))
def linear_rnn() -> Rows:
    """Six rows that compare the models: what each gains from our loss."""
    own = [row for names in FOLDERS["steps"] for row in rows_of(*names) if (row.size, row.v) == ("1b3", 128256)]
    found: dict[str, dict[str, str]] = {}
    for row in own:
        if row.loss == BASELINE and "checkpointing=" not in row.line:
            found.setdefault("the loss's share of a step, torch.compile", {})[row.model] = share(row.loss_layer_share)
    for row, base in pairs(own):
        full = "full" if "checkpointing=" in row.line else "no"
        if (base.loss, full) in ((BASELINE, "no"), (EAGER, "full")):
            words = f"faster than {named(base.loss)}, {full} checkpointing"
            found.setdefault(words, {})[row.model] = f"{gain(row, base):+.1f} %"
    for (model, kind, against), ratio in batch_ratios(searches()).items():
        if against == BASELINE:
            words = f"batch / torch.compile's, {'no' if kind == 'none' else kind} checkpointing"
            found.setdefault(words, {})[model] = f"{ratio:.2f}"
    for words, cells in found.items():
        yield words, *(cells.get(model, "-") for model in MODELS)


# -------------------------------------------------------------------------------------------------------------- memory
@table(
    "model of 1.3B", "checkpointing", *map(named, LOSSES), "ours / eager", "ours / torch.compile",
    words=("model of 1.3B", "checkpointing"),
)  # fmt: skip
def batches() -> Rows:
    """The largest batches on an H100, by model and checkpointing."""
    found = searches()
    ratios = batch_ratios(found)
    for model, kind in dict.fromkeys(key[:2] for key in found):
        own = {loss: found.get((model, kind, loss)) for loss in LOSSES}
        sequences = ("-" if one is None else f"{one.batch}{'' if one.exact else ' or more'}" for one in own.values())
        over = (show(ratios.get((model, kind, loss)), ".2f") for loss in (EAGER, BASELINE))
        yield model_in_words(model), kind, *sequences, *over


@table("1.3B, 8 x 2,048 tokens", "peak, GiB", "the output layer adds", "of the peak", "peak without it", "lower by")
def memory_of_the_loss() -> Rows:
    """What `cce_kahan` adds to a step's memory, and the peak without any output layer."""
    for words, (own, peak, less) in memory_of_steps().items():
        yield words, f"{peak:.2f}", f"{own:.2f}", share(own / peak), f"{less:.2f}", share(1 - less / peak)


# ------------------------------------------------------------------------------------------------------------ training
@table("loss", "10M: training", "10M: validation", "350M class: training", "350M class: validation")
def exact_losses() -> Rows:
    """How far each loss ends from torch.compile: 10M parameters and the 350M class."""
    small, large = FOLDERS["seeds"], "pretrain_filter"
    columns = ((small, MVE_LOSS), (small, VALID_LOSS), (large, FINAL_LOSS), (large, VALID_LOSS))
    for loss in (EAGER, "liger", "fla", EXACT, "cce_filter", CONTROL):
        yield named(loss), *(ending(group, target, loss) for group, target in columns)


@table(
    "runs", "loss", "minus", "final training loss, nats", "validation loss, nats", "curves, largest, nats",
    words=("runs", "loss", "minus"),
)  # fmt: skip
def training_losses() -> Rows:
    """Every loss of every group against its baselines: final, validation, and the curves."""
    for group, words in FOLDERS["training"].items():
        found = [one for one in verdicts_of(RESULTS / "summaries" / group) if one.value is not None]
        for loss, against in dict.fromkeys((one.backend, one.against) for one in found):
            own = {one.target: one for one in found if (one.backend, one.against) == (loss, against)}
            final = own.get(MVE_LOSS) or own.get(FINAL_LOSS)
            if final and (against != EAGER or group == FOLDERS["seeds"]):
                others = ((own.get(VALID_LOSS), "+.4f"), (own.get(CURVES), ".4f"))
                cells = (judged(one, form) if one else "-" for one, form in ((final, "+.4f"), *others))
                yield words, named(loss), named(str(against)), *cells


@table("run", "`cce_filter`, seed by seed", "noise-floor run")
def long_runs() -> Rows:
    """Longer and larger runs with sampled gradients: validation losses minus torch.compile's of the same seed."""
    for group, words in FOLDERS["sampled"].items():
        found = beside_compiled(RESULTS / "summaries" / group, "valid_loss_nats")
        by_loss = (sorted(found.get(loss, {}).items()) for loss in ("cce_filter", CONTROL))
        yield words, *(", ".join(f"{value:+.4f}" for _, value in seeds) or "-" for seeds in by_loss)


# ------------------------------------------------------------------------------------------------------------- filters
@table("small gradient entries", "training", "validation", "test")
def filters() -> Rows:
    """Pretraining at 10M parameters with each rule: training, validation and test loss."""
    columns = (("apple", MVE_LOSS), ("apple", VALID_LOSS), ("apple_test", VALID_LOSS))
    for loss, (words, _) in FOLDERS["filters"]["losses"].items():
        yield words, *(ending(group, target, loss, form="+.3f") for group, target in columns)


@table("loss", *FOLDERS["fine_tuning"]["groups"])
def fine_tuning() -> Rows:
    """Final training losses after 80 further steps, minus torch.compile's."""
    words: dict[str, list[str]] = {}
    for loss, told in FOLDERS["fine_tuning"]["losses"].items():
        words.setdefault(told, []).append(loss)
    for told, losses in words.items():
        yield told, *(ending(group, FINAL_LOSS, *losses) for group in FOLDERS["fine_tuning"]["groups"].values())


LOGITS = {"peaked": "trained-like logits", "flat": "random-init logits"}


@table("N x D x V", *(f"{gpu}, {words}" for gpu in FOLDERS["gpus"] for words in LOGITS.values()))
def filter_speed() -> Rows:
    """The filter's backward pass against torch.compile's, on the shapes of the grid that are filtered."""
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for gpu, folder in FOLDERS["gpus"].items():
        for verdict, row in filter_speeds(RESULTS / "bench_loss" / folder):
            cells.setdefault(_shape((row.n, row.d, row.v)), {})[gpu, row.logits] = judged(verdict, ".2f")
    for shape, own in cells.items():
        yield shape, *(own.get((gpu, logits), "-") for gpu in FOLDERS["gpus"] for logits in LOGITS)


@table(
    "parameters of the model",
    "step",
    "tokens of a batch",
    "sampling",
    "torch.compile's rounding",
)
def noise_by_step() -> Rows:
    """The variance that sampling adds to the gradient, by step and batch, as a share of the batch's own."""
    for size, name in (("10M", "nvidia_h200"), ("448M", "nvidia_h200_448m")):
        for one in rows_in(f"gradient_noise/{name}.jsonl")[1:]:
            if one["parameters"] == "all":
                shares = (share(one.get(key), ".3f") for key in ("sample_over_batch", "rounding_over_batch"))
                yield size, f"{one['step']:,}", f"{one['tokens']:,}", *shares


# ------------------------------------------------------------------------------------------------- Hugging Face models
@table("step, ms (of transformers'), GiB", "transformers", "Liger", "`cce_kahan`")
def hugging_face() -> Rows:
    """Steps of benchmarks/models.py with three losses."""
    models: dict[str, dict[str, str]] = {}
    for row in rows_in(f"{FOLDERS['hugging_face']}/rows.jsonl"):
        cell = f"{row['step_ms']:.0f} ({row['ratio']:.2f}), {row['peak_gib']:.1f}" if row["status"] == "ok" else "-"
        models.setdefault(f"`{row['model']}`, {row['batch']} x {row['seq']:,}", {})[row["loss"]] = cell
    for model, own in models.items():
        yield model, *(own.get(loss, "-") for loss in (EAGER, "liger", EXACT))


# ---------------------------------------------------------------------------------------------- the output layer alone
@table("N x D x V", "torch.compile: ms, MiB", "`cce_kahan`", "256 MiB", "`cce_filter`", "three cuBLAS products")
def shapes() -> Rows:
    """The output layer alone on 25 shapes, trained-like logits, an H100."""
    grid = layer_rows()
    kinds = ((EXACT, None), (EXACT, 256), ("cce_filter", None), ("three_products_cublas", None))
    for size in sorted({key[:3] for key in grid}):
        base = grid[(*size, BASELINE, None)]
        times = (_time(grid.get((*size, *kind))) for kind in kinds)
        yield _shape(size), f"{base.forward_backward_ms:.2f}, {base.extra_mib:,.0f}", *times


@table(
    "head of", "N x D x V", "torch.compile", "`cce_kahan`", "256 MiB", "`cce_filter`", words=("head of", "N x D x V")
)
def output_layer() -> Rows:
    """The same at the shapes of well-known models, without intervals."""
    grid = layer_rows()
    kinds = ((BASELINE, None), (EXACT, None), (EXACT, 256), ("cce_filter", None))
    for model, shape in FOLDERS["output_layer"].items():
        own = (grid[(*shape, *kind)] for kind in kinds)
        yield model, _shape(shape), *(f"{row.ratio_to_compiled or 1:.2f}, {row.extra_mib:,.0f}" for row in own)


@table("N x D x V", *LIBRARIES, "MiB: ours", "QuACK")
def libraries() -> Rows:
    """The fastest loss of each library in units of our time, and the memory of ours and of QuACK's."""
    rows = loss_rows.read_rows(RESULTS / "bench_loss" / FOLDERS["libraries"])
    for own in fastest_of_libraries([row for row in rows if row.set == "every_rival"]).values():
        ours, quack = own["ours"], own.get("QuACK")
        times = (f"{beside_ours(own[name], ours):.2f}" if name in own else "refused" for name in LIBRARIES)
        mib = f"{quack.extra_mib:,.0f}" if quack else "refused"
        yield _shape((ours.n, ours.d, ours.v)), *times, f"{ours.extra_mib:,.0f}", mib


def layer_rows() -> dict[tuple[Any, ...], loss_rows.Row]:
    """Rows of the grid with trained-like logits by N, D, V, backend and workspace."""
    rows, wanted = loss_rows.read_rows(RESULTS / "bench_loss" / FOLDERS["device"]), ("grid", "peaked", "ok")
    own = (row for row in rows if (row.set, row.logits, row.status) == wanted)
    return {(row.n, row.d, row.v, row.backend, row.workspace_mib): row for row in own}


def _shape(size: tuple[Any, ...]) -> str:
    return " x ".join(f"{part:,}" for part in size)


def _time(row: loss_rows.Row | None) -> str:
    if row is None:
        return "-"
    memory = "" if row.extra_mib is None else f", {row.extra_mib:,.0f}"
    return between(row.ratio_to_compiled, row.ratio_to_compiled_low, row.ratio_to_compiled_high, ".2f") + memory


# ---------------------------------------------------------------------------------------------------------- provenance
@table("name", "metric", "target", words=("name", "metric"))
def targets() -> Rows:
    """What the proposal expected, as criteria.yaml holds it."""
    return [(f"`{name}`", target.name, target.asked) for name, target in CRITERIA.items()]


PACKAGES = ("torch", "triton", "flash-linear-attention")
ORIGIN = ("folder", "rows", "GPU", "commits", "torch, Triton, FLA", "clock, MHz")


@table(*ORIGIN, words=ORIGIN)
def provenance() -> Rows:
    """GPU, commits, versions, clocks and hours of every folder of rows."""
    for path in sorted((RESULTS / "summaries").glob("*/runs.json.xz")):
        runs = committed(path.parent)
        clocks = [mhz for run in runs if (mhz := (run.summary.get("gpu_state") or {}).get("sm_mhz"))]
        count = f"{len(runs)} runs, {hours([run.summary for run in runs])} h"
        yield _origin(path.parent, [run.environment for run in runs], clocks, count)
    for path in sorted((RESULTS / "bench_steps").iterdir()):
        own, found = read_rows(path), read_runs(path)
        repeated = span_of([row.rounds for row in own if row.rounds])
        count = f"{len({row.line for row in own})} settings, {repeated} repetitions"
        environments = [found[name]["environment"] for name in dict.fromkeys(row.run for row in own)]
        yield _origin(path, environments, [mhz for row in own for mhz in row.sm_mhz], count)
    for path in sorted((RESULTS / "bench_loss").iterdir()):
        yield _origin(path, [run["environment"] for run in read_runs(path).values()], [], "output layer alone")


def _origin(path: Path, environments: Sequence[dict[str, Any]], clocks: Sequence[float], count: str) -> Sequence[str]:
    def of(get: Callable[[dict[str, Any]], Any]) -> str:
        return "; ".join(dict.fromkeys(str(get(one)) for one in environments if one))

    return (
        f"[{path.name}](../../../results/{path.relative_to(RESULTS)})", count,
        of(lambda one: one["gpus"][0]["name"].split()[1] if one.get("gpus") else "-"),
        of(lambda one: str((one.get("git") or {}).get("commit") or "-")[:7]),
        of(lambda one: ", ".join(str(one["packages"].get(key)) for key in PACKAGES)),
        span(clocks, ".0f"),
    )  # fmt: skip


@table("experiment", "runs", "GPU-hours", "GPU")
def cost() -> Rows:
    """What repeating each experiment takes: runs and GPU-hours, as the committed runs took."""
    for words, groups in FOLDERS["cost"].items():
        runs = [run.summary for group in groups for run in runs_of(group)]
        gpus = {run["device"].split()[1] for run in runs if run["device"]}
        yield words, len(runs), hours(runs), ", ".join(sorted(gpus))


def hours(summaries: Iterable[dict[str, Any]]) -> str:
    return f"{sum(run['wall_seconds'] or 0 for run in summaries) / 3600:.1f}"
