"""The tables of README, the study and its appendices, from committed rows."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import read_runs
from benchmarks.steps_rows import AGAIN, BASELINE, EAGER, Row, read_rows
from linrnn.core.tables import Table, show
from linrnn.models.facts import model_in_words
from linrnn.report.runs import Run, read_committed
from linrnn.report.targets import Target, Verdict
from linrnn.report.verdicts import CONTROL, EXACT
from study.changes import changes_of_loss
from study.criteria import CRITERIA, CURVES, FINAL_LOSS, FOLDERS, MVE_LOSS, VALID_LOSS, verdicts
from study.filter_speed import filter_speeds
from study.line_ratios import line_ratios
from study.measures import CLAIMS, GIB, NAMES, RESULTS, claim, span_of
from study.searches import Search, batch_verdicts, searches_on_the_h100
from study.step_speed import HOST, host_share, names_of, step_speeds

PLAIN = {
    " mve": " 10M", " 350m": " 350M", " 1b3": " 1.3B", "cuda_graph=true": "CUDA graph", "optimizer=": "",
    "compile=blocks": "compiled layers", "float8=blocks": "float8 layers", "model.chunk_size=": "chunks of ",
    "shared_projection_rank=": "shared projections of rank ", "trainer.": "",
}  # fmt: skip
MODELS = ("gla", "gated_deltanet", "kda", "transformer")


TABLES: dict[str, Callable[[], Table]] = {}


def table(function: Callable[[], Table]) -> Callable[[], Table]:
    """Pages name a table by its function."""
    TABLES[function.__name__] = function
    return function


def plain(setting: str) -> str:
    """A setting in a reader's words."""
    for ours, theirs in PLAIN.items():
        setting = setting.replace(ours, theirs)
    return setting


def named(loss: str) -> str:
    return NAMES.get(loss, f"`{loss}`")


def rows_of(*names: str) -> list[Row]:
    """Rows of whole steps from folders of bench_steps, each named by what follows the device."""
    return [row for name in names for row in read_rows(RESULTS / "bench_steps" / f"{FOLDERS['device']}{name}")]


def runs_of(group: str) -> list[Run]:
    return read_committed(RESULTS / "summaries" / group)


def interval(found: Verdict | None, form: str = ".3f") -> str:
    """The median and the 90 % interval."""
    if found is None or found.value is None:
        return "-"
    if HOST in found.remark:
        return "CPU-bound"
    between = "" if found.low is None else f" ({found.low:{form}} to {found.high:{form}})"
    return f"{found.value:{form}}{between}"


def span(values: Sequence[float], form: str) -> str:
    """The smallest and the largest value; one value where both look alike; `-` without any."""
    if not values:
        return "-"
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


def share(value: float | None, form: str = ".1f") -> str:
    """A share in percent."""
    return "-" if value is None else f"{100 * value:{form}} %"


# -------------------------------------------------------------------------------------------------------------- README
@table
def readme() -> Table:
    """A row for each claim with words."""
    rows = []
    for name, said in CLAIMS.items():
        if "words" in said:
            found = claim(name)
            rows.append((said["words"], found["text"], found["n"], f"[more]({said['link']})"))
    return Table(
        ("`cce_kahan` against torch.compile", "measured", "n", ""), rows, ("`cce_kahan` against torch.compile", "")
    )


# --------------------------------------------------------------------------------------------------------------- setup
@table
def setup() -> Table:
    """What ran: a row for each kind of experiment."""
    rows = []
    for words, said in FOLDERS["setup"].items():
        if "group" in said:
            runs = [run for run in runs_of(said["group"]) if run.finished]
            one, gpu = runs[0].summary, runs[0].summary["device"]
            seeds = len({run.summary["seed"] for run in runs})
            size, vocabulary = f"{one['n_parameters'] / 1e6:,.0f}", f"{one['vocab_size']:,}"
            tokens = f"{one['batch_size'] * one['seq_len']:,}"
            length = f"{one['steps']:,} steps"
            repeats = f"{seeds} seeds"
        else:
            own = [row for row in rows_of(*said["steps"]) if (row.loss, row.size) == (BASELINE, said["size"])]
            size, vocabulary = (
                span([getattr(row, key) / unit for row in own], ",.0f") for key, unit in (("parameters", 1e6), ("v", 1))
            )
            tokens = f"{own[0].batch * own[0].seq:,}"
            gpu, length = (
                FOLDERS["device"].replace("_", " ").upper(),
                f"{span_of([row.steps for row in own])} a repetition",
            )
            repeats = f"{span_of([row.rounds for row in own])} repetitions"
        rows.append((words, size, tokens, vocabulary, length, repeats, gpu.split()[1]))
    columns = ("experiment", "million parameters", "tokens a step", "vocabulary", "steps", "repeated", "GPU")
    return Table(columns, rows, ("experiment", "GPU"))


# --------------------------------------------------------------------------------------------------------------- speed
@table
def speedups() -> Table:
    """By how many percent ours is faster than each baseline: a row for each size and vocabulary."""
    bases = (BASELINE, EAGER, "liger", "fla")
    rows = []
    for words, said in FOLDERS["speedups"].items():
        gains: dict[str, list[float]] = {base: [] for base in bases}
        lines = set()
        for row, base in _pairs(rows_of(*said["steps"])):
            if _about(row, said) and base.loss in gains:
                lines.add(row.line)
                gains[base.loss].append(_gain(row, base))
        rows.append((words, len(lines), *(span(gains[base], "+.1f") for base in bases)))
    return Table(("steps", "settings", *map(named, bases)), rows, ("steps",))


def _about(row: Row, said: dict[str, Any]) -> bool:
    return (
        row.loss == EXACT
        and row.size == said.get("size", row.size)
        and row.v == said.get("v", row.v)
        and ("CUDA" in said.get("as", "") or host_share(row) < 0.97)
        and (("checkpointing=" in row.line) == said.get("checkpointing", "checkpointing=" in row.line))
    )


def _pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Each row of ours beside every other loss of its process."""
    for row in rows:
        for base in rows:
            alike = (base.line, base.run, base.status) == (row.line, row.run, "ok")
            if row.loss == EXACT and base is not row and alike and row.status == "ok":
                yield row, base


def _gain(row: Row, base: Row) -> float:
    """Percent by which a row's steps are faster, for equally many tokens."""
    more = row.batch / base.batch
    return 100 * (median(of_base / own for own, of_base in zip(row.wall_ms, base.wall_ms, strict=True)) * more - 1)


@table
def steps() -> Table:
    """Tokens/s of whole steps, as a multiple of another loss's in the same process."""
    return _steps(FOLDERS["steps"])


@table
def steps_at_largest() -> Table:
    """The same, each loss at its largest batch: sequences of torch.compile / eager / ours."""
    return _steps([FOLDERS["steps_at_largest"]])


@table
def steps_repeated() -> Table:
    """Settings of the first table once more, in later processes."""
    return _steps([[name] for name in FOLDERS["steps_repeated"]], bases=((EXACT, BASELINE), (AGAIN, BASELINE)))


@table
def steps_by_length() -> Table:
    """Sequences of four lengths, equally many tokens a step."""
    return _steps([["_lengths"]], bases=((EXACT, BASELINE), (EXACT, EAGER), (AGAIN, BASELINE)))


def _steps(folders: list[list[str]], bases: Sequence[tuple[str, str]] = ()) -> Table:
    """Lines of one list of folders are named together: they differ in the vocabulary. CPU-bound ones are left out."""
    pairs = bases or ((EXACT, BASELINE), (EXACT, EAGER), ("liger", BASELINE), (AGAIN, BASELINE))
    rows = []
    for names in folders:
        own = rows_of(*names)
        found = {(one.row.line, one.verdict.backend, one.verdict.against): one.verdict for one in step_speeds(own)}
        for line, setting in names_of(own).items():
            cells = [interval(found.get((line, *pair))) for pair in pairs]
            if set(cells) - {"-", "CPU-bound"}:
                rows.append((plain(setting), *cells))
    heads = [f"{named(loss)} / {named(against)}" if loss != AGAIN else "A/A test" for loss, against in pairs]
    return Table(("setting", *heads), rows, ("setting",))


@table
def step_details() -> Table:
    """Times and memory behind the ratios, for each setting and loss."""
    return _details(FOLDERS["steps"])


@table
def float8_steps() -> Table:
    """Steps of 1.3B with float8 layers, with every loss."""
    return _details([["_float8"]], ratio=True)


@table
def fine_tuning_steps() -> Table:
    """Steps from trained weights on their own text, as CUDA graphs, on an H200."""
    rows = read_rows(RESULTS / "bench_steps" / FOLDERS["fine_tuning"]["steps"])
    return _detail_table([([row for row in rows if "cuda_graph=true" in row.line], False)], ratio=True)


def _details(folders: list[list[str]], ratio: bool = False) -> Table:
    return _detail_table([(rows_of(*names), True) for names in folders], ratio)


def _detail_table(found: Iterable[tuple[list[Row], bool]], ratio: bool = False) -> Table:
    rows = []
    for own, by_line in found:
        settings = names_of(own) if by_line else {row.line: model_in_words(row.model, row.size) for row in own}
        for row in own:
            if row.status != "ok" or host_share(row) >= 0.97:
                continue
            between = f"{row.ratio:.3f} ({row.ratio_low:.3f} to {row.ratio_high:.3f})" if row.ratio else "-"
            rows.append(
                (
                    plain(settings[row.line]), named(row.loss), show(row.step_ms, ".1f"),
                    *([between] if ratio else [f"{row.tokens_per_second:,.0f}"]),
                    show(row.loss_layer_ms, ".1f"), share(row.loss_layer_share), show(row.peak_gib, ".2f"),
                    share(host_share(row), ".0f"), row.rounds,
                )
            )  # fmt: skip
    columns = (
        "setting", "loss", "step, ms", "time / torch.compile's" if ratio else "tokens/s", "output layer, ms",
        "of the step", "peak, GiB", "CPU busy", "n",
    )  # fmt: skip
    return Table(columns, rows, ("setting", "loss"))


@table
def linear_rnn() -> Table:
    """Six rows that compare the models: what each gains from our loss."""
    own = [row for names in FOLDERS["steps"] for row in rows_of(*names) if (row.size, row.v) == ("1b3", 128256)]
    found: dict[str, dict[str, str]] = {}
    for row in own:
        full = "full" if "checkpointing=" in row.line else "no"
        if row.loss == BASELINE and full == "no":
            found.setdefault("the loss's share of a step, torch.compile", {})[row.model] = share(row.loss_layer_share)
    for row, base in _pairs(own):
        full = "full" if "checkpointing=" in row.line else "no"
        if (base.loss, full) in ((BASELINE, "no"), (EAGER, "full")):
            words = f"faster than {named(base.loss)}, {full} checkpointing"
            found.setdefault(words, {})[row.model] = f"{_gain(row, base):+.1f} %"
    for (model, kind, _), verdict in batch_verdicts(searches_on_the_h100(RESULTS)):
        if verdict.against == BASELINE:
            words = f"batch / torch.compile's, {'no' if kind == 'none' else kind} checkpointing"
            found.setdefault(words, {})[model] = f"{verdict.value:.2f}"
    rows = [(words, *(cells.get(model, "-") for model in MODELS)) for words, cells in found.items()]
    return Table(("1.3B", *map(model_in_words, MODELS)), rows, ("1.3B",))


@table
def gains_by_model() -> Table:
    """A linear RNN's gain divided by the Transformer's in the same setting, with Welch's 90 % intervals."""
    rows = []
    for words, said in FOLDERS["gains_by_model"].items():
        table = line_ratios(rows_of(*said["steps"]), said["of"])
        cells = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        for cell in cells:
            if cell["loss"] == f"`{EXACT}`" and cell["line"] in said["lines"]:
                over = [str(cell.get(f"gain over `{base}` (90 %)", "-")).replace("*", "") for base in (BASELINE, EAGER)]
                rows.append((words, plain(str(cell["line"])), *over))
    return Table(
        ("Transformer beside it", "linear RNN", "over torch.compile", "over eager"),
        rows,
        ("Transformer beside it", "linear RNN"),
    )


# -------------------------------------------------------------------------------------------------------------- memory
@table
def batches() -> Table:
    """The largest batches on an H100, by model and checkpointing."""
    found = searches_on_the_h100(RESULTS)
    losses = (EAGER, BASELINE, "liger", EXACT)
    rows = []
    for model, kind in dict.fromkeys(key[:2] for key in found):
        own = {loss: found[(model, kind, loss)] for loss in losses if (model, kind, loss) in found}
        ratios = [_ratio(own[EXACT].batch, own.get(loss)) for loss in (EAGER, BASELINE)]
        rows.append((model_in_words(model), kind, *(_sequences(own.get(loss)) for loss in losses), *ratios))
    columns = ("model of 1.3B", "checkpointing", *map(named, losses), "ours / eager", "ours / torch.compile")
    return Table(columns, rows, columns[:2])


def _sequences(search: Search | None) -> str:
    return "-" if search is None else f"{search.batch}{'' if search.exact else ' or more'}"


def _ratio(ours: int, search: Search | None) -> str:
    return f"{ours / search.batch:.2f}" if search and search.exact and search.batch else "-"


@table
def peaks() -> Table:
    """The peak of a step with each loss, all in one process."""
    losses = (EAGER, BASELINE, "liger", EXACT)
    rows = []
    for names in FOLDERS["steps"]:
        own = rows_of(*names)
        found = {(row.line, row.loss): row for row in own}
        for line, setting in names_of(own).items():
            if "mve" not in line and ("350m" not in line or "graph" in line):
                cells = [show(found[line, loss].peak_gib, ".1f") if (line, loss) in found else "-" for loss in losses]
                if (line, EAGER) in found and found[line, EAGER].status == "out_of_memory":
                    cells[0] = "out of memory"
                rows.append((plain(setting), *cells))
    return Table(("setting", *map(named, losses)), rows, ("setting",))


@table
def memory_of_the_loss() -> Table:
    """What `cce_kahan` adds to a step's memory, and the peak without any output layer."""
    rows = []
    for words, file in FOLDERS["breakdowns"].items():
        found = json.loads((RESULTS / "summaries/breakdown" / f"{file}.json").read_text())["memory"]
        own, peak, less = (found[key]["measured"] / GIB for key in ("loss_forward", "peak", "peak/without_loss_layer"))
        rows.append((words, f"{peak:.2f}", f"{own:.2f}", share(own / peak), f"{less:.2f}", share(1 - less / peak)))
    columns = (
        "1.3B, 8 x 2,048 tokens",
        "peak, GiB",
        "the output layer adds",
        "of the peak",
        "peak without it",
        "lower by",
    )
    return Table(columns, rows, columns[:1])


@table
def at_the_limit() -> Table:
    """Calls of cudaMalloc a step, and the output layer's time for a sequence, each loss at its largest batch."""
    own = rows_of(*FOLDERS["steps_at_largest"])
    settings, rows = names_of(own), []
    for row in own:
        if row.status == "ok" and row.loss != AGAIN:
            calls = (row.allocations or 0) / row.rounds / row.steps
            passes = (ms and ms / row.batch for ms in (row.loss_forward_ms, row.loss_backward_ms))
            rows.append(
                (
                    plain(settings[row.line]),
                    named(row.loss),
                    row.batch,
                    f"{calls:.0f}",
                    *(show(ms, ".2f") for ms in passes),
                )
            )
    columns = ("setting", "loss", "sequences", "cudaMalloc a step", "forward, ms a sequence", "backward, ms a sequence")
    return Table(columns, rows, columns[:2])


# ------------------------------------------------------------------------------------------------------------ training
@table
def exact_losses() -> Table:
    """How far each loss ends from torch.compile: 10M and 448M parameters."""
    small, large = (verdicts(runs_of(group)) for group in (FOLDERS["seeds"], "pretrain_filter"))
    rows = []
    for loss in (EAGER, "liger", "fla", EXACT, "cce_filter", CONTROL):
        cells = [
            interval(next((one for one in found if _is(one, target, loss)), None), "+.4f")
            for found, target in ((small, MVE_LOSS), (small, VALID_LOSS), (large, FINAL_LOSS), (large, VALID_LOSS))
        ]
        rows.append((named(loss), *cells))
    columns = ("loss", "10M: training", "10M: validation", "448M: training", "448M: validation")
    return Table(columns, rows, ("loss",))


def _is(one: Verdict, target: Target, loss: str) -> bool:
    return (one.target, one.backend, one.against) == (target, loss, BASELINE) and one.value is not None


@table
def training_losses() -> Table:
    """Every loss of every group against its baselines: final, validation, and the curves."""
    rows = []
    for group, words in FOLDERS["training"].items():
        found = [one for one in verdicts(runs_of(group)) if one.value is not None]
        for loss, against in dict.fromkeys((one.backend, one.against) for one in found):
            cells = []
            for targets in ((MVE_LOSS, FINAL_LOSS), (VALID_LOSS,), (CURVES,)):
                own = [one for one in found if one.target in targets and (one.backend, one.against) == (loss, against)]
                form = ".4f" if CURVES in targets else "+.4f"
                cells.append(f"{interval(own[0], form)}, {own[0].verdict}" if own else "-")
            if cells[0] != "-" and (against != EAGER or group == FOLDERS["seeds"]):
                rows.append((words, named(loss), named(str(against)), *cells))
    columns = ("runs", "loss", "minus", "final training loss, nats", "validation loss, nats", "curves, largest, nats")
    return Table(columns, rows, columns[:3])


@table
def seeds() -> Table:
    """The final training loss minus torch.compile's of the same seed, for each seed."""
    rows = []
    for group, words in FOLDERS["training"].items():
        runs = [run for run in runs_of(group) if run.finished and not run.mixture]
        bases = {run.summary["seed"]: run.summary["train_loss_nats"] for run in runs if run.summary["loss"] == BASELINE}
        if not bases:
            continue
        columns: dict[str, dict[int, float]] = {}
        for run in runs:
            options = " ".join(f"{key}={value}" for key, value in run.summary["loss_options"].items() if key in SHOWN)
            if run.summary["loss"] != BASELINE and run.summary["seed"] in bases:
                label = f"{named(run.summary['loss'])} {options}".strip()
                columns.setdefault(label, {})[run.summary["seed"]] = (
                    run.summary["train_loss_nats"] - bases[run.summary["seed"]]
                )
        for label, own in columns.items():
            rows.append((words, label, ", ".join(f"{own[seed]:+.4f}" for seed in sorted(own))))
    return Table(("runs", "loss", "nats above torch.compile, seed by seed"), rows, ("runs", "loss"))


SHOWN = ("accumulate", "filter_unbiased", "variant")  # options that tell the losses of one group apart


@table
def long_runs() -> Table:
    """500M tokens at 10M parameters: validation losses minus torch.compile's of the same seed."""
    runs = [run.summary for run in runs_of("pretrain_long")]
    bases = {run["seed"]: run["valid_loss_nats"] for run in runs if run["loss"] == BASELINE}
    found = {(run["loss"], run["seed"]): run["valid_loss_nats"] - bases[run["seed"]] for run in runs}
    rows = [
        (named(loss), *(f"{found[loss, seed]:+.4f}" if (loss, seed) in found else "not run yet" for seed in bases))
        for loss in dict.fromkeys(loss for loss, _ in found)
        if loss != BASELINE
    ]
    return Table(
        ("validation loss minus torch.compile's, nats", *(f"seed {seed}" for seed in bases)),
        rows,
        ("validation loss minus torch.compile's, nats",),
    )


# ------------------------------------------------------------------------------------------------------------- filters
@table
def filters() -> Table:
    """Pretraining at 10M parameters with four rules: training, validation and test loss."""
    criteria = {"apple": (MVE_LOSS, VALID_LOSS), "apple_test": (VALID_LOSS,)}
    found = {group: verdicts(runs_of(group)) for group in criteria}
    rows = []
    for loss, (words, _) in FOLDERS["filters"]["losses"].items():
        cells = [
            interval(next(one for one in found[group] if _is(one, target, loss)), "+.3f")
            for group, targets in criteria.items()
            for target in targets
        ]
        rows.append((words, *cells))
    return Table(("small gradient entries", "training", "validation", "test"), rows, ("small gradient entries",))


@table
def fine_tuning() -> Table:
    """Final training losses after 80 further steps, minus torch.compile's."""
    groups = FOLDERS["fine_tuning"]["groups"]
    found = {
        (model, one.backend): one
        for model, group in groups.items()
        for one in verdicts(runs_of(group))
        if (one.target, one.against) == (FINAL_LOSS, BASELINE)
    }
    words: dict[str, list[str]] = {}
    for backend, told in FOLDERS["fine_tuning"]["losses"].items():
        words.setdefault(told, []).append(backend)
    rows = []
    for told, backends in words.items():
        own = [next((found[model, one] for one in backends if (model, one) in found), None) for model in groups]
        rows.append((told, *(interval(one, "+.4f") for one in own)))
    return Table(("loss", *groups), rows, ("loss",))


@table
def filter_speed() -> Table:
    """The filter's backward pass against torch.compile's, on the shapes of the grid that are filtered."""
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for gpu, folder in FOLDERS["gpus"].items():
        for one in filter_speeds(RESULTS / "bench_loss" / folder):
            cells.setdefault(one.shape, {})[gpu, one.row.logits] = (
                f"{interval(one.verdict, '.2f')}, {one.verdict.verdict}"
            )
    kinds = [(gpu, logits) for gpu in FOLDERS["gpus"] for logits in ("peaked", "flat")]
    words = {"peaked": "trained-like logits", "flat": "random-init logits"}
    rows = [(shape, *(own.get(kind, "-") for kind in kinds)) for shape, own in cells.items()]
    return Table(("N x D x V", *(f"{gpu}, {words[logits]}" for gpu, logits in kinds)), rows, ("N x D x V",))


@table
def noise_by_step() -> Table:
    """The variance that sampling adds to a gradient, by step and batch."""
    _, *lines = (RESULTS / "gradient_noise/nvidia_h200.jsonl").read_text().splitlines()
    rows = [
        (f"{one['step']:,}", f"{one['tokens']:,}", one["parameters"], share(one["sample_over_batch"], ".2f"))
        for one in map(json.loads, lines)
    ]
    return Table(("step", "tokens of a batch", "parameters", "of the batch's variance"), rows, ("parameters",))


# ---------------------------------------------------------------------------------------------- the output layer alone
@table
def shapes() -> Table:
    """The output layer alone on 25 shapes, trained-like logits, an H100."""
    grid = _layer("grid")
    kinds = ((EXACT, None), (EXACT, 256), ("cce_filter", None), ("three_products_cublas", None))
    rows = []
    for size in sorted({key[:3] for key in grid}):
        base = grid[(*size, BASELINE, None)]
        own = (_time(grid.get((*size, *kind))) for kind in kinds)
        rows.append((_shape(size), f"{base['forward_backward_ms']:.2f}, {base['extra_mib']:,.0f}", *own))
    columns = ("N x D x V", "torch.compile: ms, MiB", "`cce_kahan`", "256 MiB", "`cce_filter`", "three cuBLAS products")
    return Table(columns, rows, columns[:1])


@table
def quack() -> Table:
    """The fastest of QuACK's chunk sizes beside ours, on its 22 shapes."""
    grid = _layer("rivals_grid")
    rows = []
    for size in sorted({key[:3] for key in grid}):
        others = [row for key, row in grid.items() if key[:3] == size and key[3].startswith("quack")]
        best = min(others, key=lambda row: row["forward_backward_ms"])
        rows.append((_shape(size), _time(grid.get((*size, EXACT, None))), _time(best), best["backend"]))
    return Table(("N x D x V", "`cce_kahan`", "QuACK, its fastest", "which"), rows, ("N x D x V", "which"))


def _layer(of_set: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    rows = json.loads((RESULTS / "bench_loss" / FOLDERS["device"] / "rows.json").read_text())
    return {
        (row["n"], row["d"], row["v"], row["backend"], row["workspace_mib"]): row
        for row in rows
        if row["set"] == of_set and row["logits"] == "peaked" and row["status"] == "ok"
    }


def _shape(size: tuple[Any, ...]) -> str:
    return " x ".join(f"{part:,}" for part in size)


def _time(row: dict[str, Any] | None) -> str:
    if row is None or row["ratio_to_compiled"] is None:
        return "-"
    ratio, low, high = (row[f"ratio_to_compiled{end}"] for end in ("", "_low", "_high"))
    memory = "" if row["extra_mib"] is None else f", {row['extra_mib']:,.0f}"
    return f"{ratio:.2f} ({low:.2f} to {high:.2f}){memory}"


# --------------------------------------------------------------------------------------------------- float8 and notes
@table
def float8_losses() -> Table:
    """What float8 layers change in the losses, beside compiled layers in bf16, which only round otherwise."""
    return _changes("float8=blocks", "compile=blocks")


@table
def shared_losses() -> Table:
    """What shared projections change in the losses."""
    return _changes("shared_projection_rank=")


def _changes(*changes: str) -> Table:
    rows = []
    for size, group in FOLDERS["follow_ups"].items():
        found = changes_of_loss(runs_of(group))
        for one in found:
            model, change = one.model.split(", ", 1)
            if one.target != FINAL_LOSS or one.backend != EXACT or not change.startswith(changes):
                continue
            valid = next(v for v in found if (v.target, v.model, v.backend) == (VALID_LOSS, one.model, EXACT))
            cells = (f"{interval(v, '+.4f')}, {v.verdict}" for v in (one, valid))
            rows.append((size, model_in_words(model), plain(f" {change}").strip(), *cells, one.n))
    columns = ("size", "model", "change", "final training loss, nats", "validation loss, nats", "n")
    return Table(columns, rows, columns[:3])


@table
def chunks() -> Table:
    """Steps with other chunk sizes, as a multiple of the time with the default of 64."""
    rows = []
    own = rows_of("_chunks")
    for model in dict.fromkeys(row.model for row in own):
        lines = [row for row in own if row.model == model]
        table = line_ratios(lines, f"{model_in_words(model, '1b3')}, model.chunk_size=64")
        rows += [
            (plain(str(line)), named(str(loss).strip("`")), time)
            for line, loss, time, *_ in table.rows
            if "again" not in str(loss)
        ]
    return Table(("1.3B", "loss", "step's time / that with chunks of 64"), rows, ("1.3B", "loss"))


@table
def shared_steps() -> Table:
    """Steps with shared projections, as a multiple of the time with full ones."""
    rows = []
    for model in ("GLA", "Transformer"):
        lines = [row for row in rows_of("_followups") if model_in_words(row.model).startswith(model)]
        table = line_ratios(lines, f"{model} 1b3")
        rows += [
            (plain(str(line)), named(str(loss).strip("`")), time)
            for line, loss, time, *_ in table.rows
            if "shared" in str(line) and "again" not in str(loss)
        ]
    return Table(("1.3B", "loss", "step's time / that with full projections"), rows, ("1.3B", "loss"))


@table
def first_gradients() -> Table:
    """The norm of GLA's first gradients at 1.3B, for each process."""
    rows = []
    different = ("checkpointing", "chunk_size", "compile=")  # other settings than the plain one
    for path in sorted((RESULTS / "bench_steps").glob(f"{FOLDERS['device']}*")):
        commits = {name: str(run["environment"]["git"]["commit"])[:7] for name, run in read_runs(path).items()}
        for row in read_rows(path):
            known = (row.model, row.size, row.v, row.loss) == ("gla", "1b3", 128256, BASELINE)
            if known and row.gradient_norm and not any(word in row.line for word in different):
                norm, nats = f"{row.gradient_norm:.1f}", show(row.loss_nats, ".4f")
                rows.append((commits[row.run], f"{row.batch} x {row.seq:,}", norm, nats))
    return Table(("commit", "batch", "norm", "first loss, nats"), list(dict.fromkeys(rows)), ("commit",))


# ---------------------------------------------------------------------------------------------------------- provenance
@table
def targets() -> Table:
    """What the proposal expected, as criteria.yaml holds it."""
    rows = [(f"`{name}`", target.name, target.asked) for name, target in CRITERIA.items()]
    return Table(("name", "metric", "target"), rows, ("name", "metric"))


@table
def provenance() -> Table:
    """GPU, commits, versions, clocks and hours of every folder of rows."""
    rows = []
    for path in sorted((RESULTS / "summaries").glob("*/runs.json.xz")):
        runs = read_committed(path.parent)
        clocks = [mhz for run in runs if (mhz := (run.summary.get("gpu_state") or {}).get("sm_mhz"))]
        took = sum(run.summary["wall_seconds"] or 0 for run in runs) / 3600
        rows.append(_origin(path.parent, [run.environment for run in runs], clocks, f"{len(runs)} runs, {took:.1f} h"))
    for path in sorted((RESULTS / "bench_steps").iterdir()):
        own = read_rows(path)
        found = read_runs(path)
        clocks = [mhz for row in own for mhz in row.sm_mhz]
        repeated = span_of([row.rounds for row in own if row.rounds])
        count = f"{len({row.line for row in own})} settings, {repeated} repetitions"
        rows.append(
            _origin(path, [found[name]["environment"] for name in dict.fromkeys(row.run for row in own)], clocks, count)
        )
    for path in sorted((RESULTS / "bench_loss").iterdir()):
        rows.append(_origin(path, [run["environment"] for run in read_runs(path).values()], [], "output layer alone"))
    columns = ("folder", "rows", "GPU", "commits", "torch, Triton, FLA", "driver", "clock, MHz")
    return Table(columns, rows, columns)


def _origin(path: Path, environments: Sequence[dict[str, Any]], clocks: Sequence[float], count: str) -> tuple[str, ...]:
    def of(get: Callable[[dict[str, Any]], Any]) -> str:
        return "; ".join(dict.fromkeys(str(get(one)) for one in environments if one))

    name = path.relative_to(RESULTS)
    packages = ("torch", "triton", "flash-linear-attention")
    return (
        f"[{path.name}](../../../results/{name})", count,
        of(lambda one: one["gpus"][0]["name"].split()[1] if one.get("gpus") else "-"),
        of(lambda one: str((one.get("git") or {}).get("commit") or "-")[:7]),
        of(lambda one: ", ".join(str(one["packages"].get(key)) for key in packages)),
        of(lambda one: one.get("gpu_driver")), span(clocks, ".0f"),
    )  # fmt: skip


@table
def cost() -> Table:
    """What repeating each experiment takes: runs and GPU-hours, as the committed runs took."""
    rows = []
    for words, groups in FOLDERS["cost"].items():
        runs = [run.summary for group in groups for run in runs_of(group)]
        took = sum(run["wall_seconds"] or 0 for run in runs) / 3600
        gpus = sorted({run["device"].split()[1] for run in runs if run["device"]})
        rows.append((words, len(runs), f"{took:.1f}", ", ".join(gpus)))
    return Table(("experiment", "runs", "GPU-hours", "GPU"), rows, ("experiment", "GPU"))
