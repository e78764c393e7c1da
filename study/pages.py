"""Fill the marked places of README and docs from committed rows: `make pages`.

A place is `<!-- rows: NAME --> … <!-- end -->`. NAME is a claim of claims.yaml, or a table of TABLES. The command also
lists the figures that stand outside of such places in README and the study, for whoever reads a change.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.steps_rows import AGAIN, read_rows
from linrnn.core.errors import ConfigError
from linrnn.core.tables import Table
from linrnn.models.facts import model_in_words
from linrnn.report.runs import read_committed
from linrnn.report.targets import Verdict
from study.criteria import CRITERIA, FINAL_LOSS, FOLDERS, verdicts
from study.searches import Search, batch_verdicts, searches_on_the_h100
from study.step_speed import StepSpeed, names_of, step_speeds

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
CLAIMS: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "claims.yaml").read_text())
PLACE = re.compile(r"(<!-- rows: (\w+) -->)(\n?).*?(<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"(?<![\w./#-])[+-]?\d[\d,]*\.\d+(?![\w.])(?: ?%)?")
KAHAN = "cce_kahan"


# ------------------------------------------------------------------------------------------------------------ values
def loss_layer(folder: str, where: dict[str, Any], field: str, of: str | None = None) -> list[dict[str, Any]]:
    """A field of the rows of benchmarks/loss.py; `of`: divided by that backend's on the same problem."""
    rows = json.loads((RESULTS / folder / "rows.json").read_text())
    bases = {_problem(row): row[field] for row in rows if row["set"] == where["set"] and row["backend"] == of}
    return [
        {"value": row[field] / (bases[_problem(row)] if of else 1), "n": row["rounds"]}
        for row in rows
        if all(row[key] == value for key, value in where.items()) and row[field] is not None
    ]


def _problem(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("shape", "dtype", "gradients", "logits"))


def speeds_of(*folders: str) -> list[StepSpeed]:
    """Verdicts on tokens/s of whole steps."""
    return step_speeds([row for folder in folders for row in read_rows(RESULTS / folder)])


def step_speed(folders: str | list[str], where: dict[str, Any], against: str) -> list[dict[str, Any]]:
    """Tokens/s of a loss as a multiple of another's, for every model line."""
    found = speeds_of(*([folders] if isinstance(folders, str) else folders))
    return [
        {"value": one.verdict.value, "n": one.verdict.n}
        for one in found
        if one.verdict.against == against and all(getattr(one.row, key) == value for key, value in where.items())
    ]


def step_time(folder: str, where: dict[str, Any], of: str) -> list[dict[str, Any]]:
    """The time of a step with a loss, as a multiple of another's in the same rounds."""
    times = {(row.line, row.loss): row.wall_ms for row in read_rows(RESULTS / folder)}
    return [
        {"value": median(own / base for own, base in zip(wall, times[line, of], strict=True)), "n": len(wall)}
        for (line, loss), wall in times.items()
        if loss == where["loss"]
    ]


def largest_batch(_: str, where: dict[str, Any], against: str) -> list[dict[str, Any]]:
    """Sequences that fit with our exact loss, as a multiple of another's."""
    return [
        {"value": verdict.value, "n": verdict.n}
        for (_, kind, _), verdict in batch_verdicts(searches_on_the_h100(RESULTS))
        if (kind, verdict.against) == (where["checkpointing"], against)
    ]


def verdict(group: str, where: dict[str, Any], criterion: str, against: str) -> list[dict[str, Any]]:
    """The value and the 90 % interval of one verdict on a group of runs: min and max are the interval."""
    [found] = [
        one
        for one in verdicts(read_committed(RESULTS / group))
        if (one.target, one.backend, one.against) == (CRITERIA[criterion], where["loss"], against)
    ]
    return [{"value": value, "n": found.n} for value in (found.value, found.low, found.high)]


def percent(file: str, where: dict[str, Any], field: str) -> list[dict[str, Any]]:
    """A field of a file of rows, in percent."""
    rows = [json.loads(line) for line in (RESULTS / file).read_text().splitlines()[1:]]
    return [
        {"value": 100 * row[field], "n": row["batches"]}
        for row in rows
        if all(row[key] == value for key, value in where.items())
    ]


MEASURES: dict[str, Callable[..., list[dict[str, Any]]]] = {
    function.__name__: function for function in (loss_layer, step_speed, step_time, largest_batch, verdict, percent)
}


def claim(name: str) -> dict[str, Any]:
    """A claim's figure as it is shown, and n.

    Raises:
        ConfigError: no row answers it.
    """
    said = CLAIMS[name]
    (measure, first), *options = said["measure"].items()
    found = MEASURES[measure](said["rows"], said.get("where", {}), first, **dict(options))
    if not found:
        raise ConfigError(f"study/claims.yaml: no row answers {name}", "correct its rows or its where")
    values, counts = [one["value"] for one in found], sorted({one["n"] for one in found})
    figures = {"value": values[0], "median": median(values), "min": min(values), "max": max(values)}
    n = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return {"text": said["show"].format(**figures), "n": n}


# ------------------------------------------------------------------------------------------------------------ tables
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


def batches() -> Table:
    """The largest batches on an H100, by model and checkpointing."""
    found = searches_on_the_h100(RESULTS)
    losses = {"standard": "eager", "compiled": "torch.compile", "liger": "Liger", KAHAN: "`cce_kahan`"}
    rows = []
    for model, kind in dict.fromkeys(key[:2] for key in found):
        own = {loss: found[(model, kind, loss)] for loss in losses if (model, kind, loss) in found}
        ours = own[KAHAN].batch
        ratios = [_ratio(ours, own.get(loss)) for loss in ("standard", "compiled")]
        rows.append((model_in_words(model), kind, *(_sequences(own.get(loss)) for loss in losses), *ratios))
    columns = ("model of 1.3B", "checkpointing", *losses.values(), "ours / eager", "ours / torch.compile")
    return Table(columns, rows, columns[:2])


def _sequences(search: Search | None) -> str:
    return "-" if search is None else f"{search.batch}{'' if search.exact else ' or more'}"


def _ratio(ours: int, search: Search | None) -> str:
    return f"{ours / search.batch:.2f}" if search and search.exact and search.batch else "-"


def steps() -> Table:
    """Tokens/s of whole steps, as a multiple of another loss's in the same process."""
    return _steps(FOLDERS["steps"])


def steps_at_largest() -> Table:
    """The same, each loss at its largest batch: sequences of compiled / eager / ours."""
    return _steps([FOLDERS["steps_at_largest"]])


def _steps(folders: list[list[str]]) -> Table:
    """Lines of one list of folders are named together: they differ in the vocabulary."""
    pairs = ((KAHAN, "compiled"), (KAHAN, "standard"), ("liger", "compiled"), (AGAIN, "compiled"))
    rows = []
    for names in folders:
        own = [row for name in names for row in read_rows(RESULTS / "bench_steps" / f"{FOLDERS['device']}{name}")]
        found = {(one.row.line, one.verdict.backend, one.verdict.against): one.verdict for one in step_speeds(own)}
        for line, setting in names_of(own).items():
            rows.append((setting, *(_interval(found.get((line, *pair))) for pair in pairs)))
    heads = ("ours / torch.compile", "ours / eager", "Liger / torch.compile", "torch.compile built twice")
    return Table(("setting", *heads), rows, ("setting",))


def _interval(found: Verdict | None, form: str = ".3f") -> str:
    if found is None or found.value is None:
        return "-"
    interval = "" if found.low is None else f" ({found.low:{form}} to {found.high:{form}})"
    return f"{found.value:{form}}{interval}"


def fine_tuning() -> Table:
    """Final training losses after fine-tuning, minus compiled's."""
    groups = FOLDERS["fine_tuning"]["groups"]
    found = {
        (model, one.backend): one
        for model, group in groups.items()
        for one in verdicts(read_committed(RESULTS / "summaries" / group))
        if (one.target, one.against) == (FINAL_LOSS, "compiled")
    }
    words: dict[str, list[str]] = {}
    for backend, (told, _) in FOLDERS["fine_tuning"]["losses"].items():
        words.setdefault(told, []).append(backend)
    rows = [
        (
            told,
            *(
                _interval(next((found[model, one] for one in backends if (model, one) in found), None), "+.4f")
                for model in groups
            ),
        )
        for told, backends in words.items()
    ]
    return Table(("loss", *groups), rows, ("loss",))


def pretraining() -> Table:
    """Final and validation losses of pretraining, minus compiled's, with their verdicts."""
    rows = []
    for panel in FOLDERS["panels"]:
        target = CRITERIA[panel["criterion"]]
        for group, losses in panel["groups"].items():
            found = verdicts(read_committed(RESULTS / "summaries" / group))
            for backend, words in losses.items():
                for one in found:
                    if (one.target, one.backend, one.against) == (target, backend, "compiled"):
                        rows.append(
                            (
                                panel["title"].split(",")[0],
                                target.name.split(",")[0],
                                words,
                                _interval(one, "+.4f"),
                                one.n,
                                one.verdict,
                            )
                        )
    columns = ("runs", "what", "loss", "nats above compiled's, 90 % interval", "n", "within ±0.01")
    return Table(columns, rows, ("runs", "what", "loss", "within ±0.01"))


def shapes() -> Table:
    """The loss layer alone on 25 shapes, peaked logits, an H100."""
    rows = json.loads((RESULTS / "bench_loss" / FOLDERS["device"] / "rows.json").read_text())
    grid = {
        (row["n"], row["d"], row["v"], row["backend"], row["workspace_mib"]): row
        for row in rows
        if row["set"] == "grid" and row["logits"] == "peaked" and row["status"] == "ok"
    }
    kinds = ((KAHAN, None), (KAHAN, 256), ("cce_filter", None), ("three_products_cublas", None))
    cells = []
    for size in sorted({key[:3] for key in grid}):
        own = [grid.get((*size, *kind)) for kind in kinds]
        compiled = grid[(*size, "compiled", None)]
        cells.append(
            (
                " x ".join(f"{part:,}" for part in size),
                f"{compiled['forward_backward_ms']:.2f}, {compiled['extra_mib']:,.0f}",
                *map(_time, own),
            )
        )
    columns = ("N x D x V", "torch.compile: ms, MiB", "`cce_kahan`", "256 MiB", "`cce_filter`", "three cuBLAS products")
    return Table(columns, cells, columns[:1])


def _time(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    ratio, low, high = (row[f"ratio_to_compiled{end}"] for end in ("", "_low", "_high"))
    memory = "" if row["extra_mib"] is None else f", {row['extra_mib']:,.0f}"
    return f"{ratio:.2f} ({low:.2f} to {high:.2f}){memory}"


TABLES: dict[str, Callable[[], Table]] = {
    function.__name__: function
    for function in (readme, batches, steps, steps_at_largest, fine_tuning, pretraining, shapes)
}


# ------------------------------------------------------------------------------------------------------------- pages
def filled(text: str, page: Path) -> str:
    """A page with every marked place filled anew.

    Raises:
        ConfigError: a place names neither a claim nor a table.
    """

    def content(match: re.Match[str]) -> str:
        name = match[2]
        if name in TABLES:
            return "\n".join([match[1], "", *TABLES[name]().markdown(), "", match[4]])
        if name in CLAIMS:
            return f"{match[1]}{claim(name)['text']}{match[4]}"
        raise ConfigError(
            f"{page}: {name} is neither a claim nor a table",
            f"claims: {', '.join(CLAIMS)}; tables: {', '.join(TABLES)}",
        )

    return PLACE.sub(content, text)


def pages() -> list[Path]:
    """README and docs that have a marked place."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if PLACE.search(page.read_text(encoding="utf-8"))]


def outside(page: Path) -> Iterator[tuple[int, str]]:
    """The lines of a page with figures outside of marked places, and these figures."""
    text = PLACE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text(encoding="utf-8"))
    for number, line in enumerate(text.splitlines(), start=1):
        if figures := FIGURE.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)):
            yield number, ", ".join(figures)


def main() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = filled(text, page)
        if new != text:
            page.write_text(new, encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: {'written anew' if new != text else 'as its rows say'}")
    print("\nfigures that no row stands behind here:")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs/study").glob("*.md"))]:
        lines = list(outside(page))
        print(f"  {page.relative_to(ROOT)}: {len(lines)} lines")
        if "-v" in sys.argv[1:]:
            print(*(f"    {number}: {figures}" for number, figures in lines), sep="\n")


if __name__ == "__main__":
    main()
