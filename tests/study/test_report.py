"""Reports on a group's runs or its committed rows: answered verdicts come first; report.html needs no other file."""

import dataclasses
import json
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from linrnn.config import load_config
from linrnn.core.errors import ConfigError, DataError
from linrnn.study.criteria import MEMORY, OPEN, judge
from linrnn.study.report import make_report, verdict_table, write
from linrnn.study.report.page import Pictures, inline, to_html
from linrnn.study.report.remarks import ON_DROPPED, on_figures, on_origin, on_runs
from linrnn.study.report.sections import sections
from linrnn.study.report.settings import changes_of_loss
from linrnn.study.report.tables import of_runs, of_verdicts
from linrnn.study.results import Run, read_committed
from linrnn.study.verdicts import CONTROL, verdicts

ROOT = Path(__file__).resolve().parents[2]
REPORTS = sorted(path.parent for path in ROOT.glob("results/*/*/runs.json.xz"))
REPORT = next((path for path in REPORTS if path.name == "mve"), REPORTS[0])
# HTML elements that have no end tag.
VOID = {"meta", "img", "link", "br", "hr", "input"}


class Page(HTMLParser):
    """Tables, attributes and text of a page. Tags that do not match are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute stands twice: {tag} {attrs}"
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results directory of a fresh clone: one committed report with its rows, and no runs."""
    results = tmp_path_factory.mktemp("clone") / "results"
    copy = results / "summaries" / REPORT.name
    copy.mkdir(parents=True)
    shutil.copy(REPORT / "runs.json.xz", copy)
    return results


@pytest.fixture(scope="module")
def page(clone: Path) -> Path:
    """report.html of the committed report, with its pictures."""
    paths = make_report(load_config([f"group={REPORT.name}", f"results_dir={clone}"], "report"))
    return next(path for path in paths if path.name == "report.html")


def test_a_fresh_clone_gets_the_report_of_a_committed_group(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, rows = read_committed(REPORT), (REPORT / "runs.json.xz").read_bytes()
    paths = make_report(load_config([f"group={REPORT.name}", f"results_dir={clone}"], "report"))
    directory = clone / "summaries" / REPORT.name
    assert [path.name for path in paths[:3]] == ["report.md", "verdicts.md", "report.html"]
    assert all(path.parent == directory and path.stat().st_size for path in paths)
    assert f"read {len(runs)} committed runs of {directory}" in capsys.readouterr().out
    assert (directory / "runs.json.xz").read_bytes() == rows, "the rows stay as they are"


def test_runs_made_here_come_before_committed_rows(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = read_committed(REPORT)[0]
    directory = clone / REPORT.name / first.name
    directory.mkdir(parents=True)
    (directory / "summary.json").write_text(json.dumps(first.summary))
    output = clone.parent / "output"
    options = [f"group={REPORT.name}", f"results_dir={clone}", f"output_dir={output}"]
    make_report(load_config(options, "report"))
    shutil.rmtree(clone / REPORT.name)
    assert f"read 1 runs of {clone / REPORT.name}" in capsys.readouterr().out
    assert (output / "runs.json.xz").exists()
    page = (output / "report.html").read_text()
    assert f"Made again by <code>python scripts/report.py {' '.join(options)}</code>" in page


def test_the_report_of_other_runs_is_not_overwritten(clone: Path, tmp_path: Path) -> None:
    shutil.copytree(clone, tmp_path / "results")
    own, rows = tmp_path / "results" / REPORT.name, (REPORT / "runs.json.xz").read_bytes()
    committed = read_committed(REPORT)
    options = [f"group={REPORT.name}", f"results_dir={tmp_path / 'results'}"]

    def write_runs(runs: list[Run]) -> None:
        for run in runs:
            (own / run.name).mkdir(parents=True, exist_ok=True)
            (own / run.name / "summary.json").write_text(json.dumps(run.summary))

    write_runs(committed[:1])
    with pytest.raises(ConfigError, match=f"a report of {len(committed) - 1} runs that are not here") as refusal:
        make_report(load_config(options, "report"))
    assert "output_dir=" in refusal.value.remedy
    again = dataclasses.replace(committed[0], summary={**committed[0].summary, "started": "another day"})
    write_runs([again, *committed[1:]])
    with pytest.raises(ConfigError, match="a report of 1 runs"):
        make_report(load_config(options, "report"))
    target = tmp_path / "results" / "summaries" / REPORT.name / "runs.json.xz"
    assert target.read_bytes() == rows
    write_runs(committed)
    make_report(load_config(options, "report"))  # of the same runs


def test_a_report_holds_the_largest_batches_that_were_searched_in_its_own_group(clone: Path) -> None:
    first = read_committed(REPORT)[0]
    found = {"model": first.summary["model"], "size": first.summary["size"], "max_sequences": 7}
    files = {f"{REPORT.name}/{first.name}/summary.json": first.summary}
    files |= {f"{REPORT.name}/answers/a/max_batch.json": found}
    files |= {"max_batch/answers/a/max_batch.json": {**found, "max_sequences": 8}}
    for name, content in files.items():
        (clone / name).parent.mkdir(parents=True)
        (clone / name).write_text(json.dumps(content))
    written: list[list[int]] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            write, "write_report", lambda *arguments, **said: written.append([a["max_sequences"] for a in arguments[3]])
        )
        for group in (REPORT.name, "max_batch"):
            options = [f"group={REPORT.name}", f"results_dir={clone}", f"max_batch_group={group}", "output_dir=unused"]
            make_report(load_config(options, "report"))
    for name in (REPORT.name, "max_batch"):
        shutil.rmtree(clone / name)
    assert written == [[7], [7, 8]]


def test_a_group_that_is_not_there_is_refused_with_the_groups_that_are(clone: Path) -> None:
    (clone / "mine" / "a").mkdir(parents=True)
    (clone / "mine" / "a" / "summary.json").write_text("{}")
    with pytest.raises(DataError, match="group=other") as refused:
        make_report(load_config(["group=other", f"results_dir={clone}"], "report"))
    with pytest.raises(DataError, match="mine holds runs, and no report") as no_report:
        make_report(load_config([f"summary={clone / 'mine'}"], "report"))
    assert f"results_dir={clone} group=mine" in no_report.value.remedy
    shutil.rmtree(clone / "mine")
    assert f"With runs: mine. Committed: {REPORT.name}" in refused.value.remedy


def test_verdicts_with_an_answer_lead_and_what_was_not_measured_has_no_row() -> None:
    found = verdicts(read_committed(REPORT))
    lines = verdict_table(found)
    words = [line.split("**")[1] for line in lines if line.startswith("| **")]
    measured = Counter(verdict.verdict for verdict in found if verdict.verdict != OPEN)
    assert Counter(words) == measured
    answered = measured["met"] + measured["missed"]
    assert set(words[:answered]) <= {"met", "missed"}
    assert set(words[answered:]) == {"undecided"}
    below = lines[lines.index("Not measured:") + 2 :]
    assert below[0] == "| what is missing | criteria | losses |"
    assert {name for line in below[2:] for name in line.split(" | ")[1].split("; ")} == {
        verdict.criterion.name for verdict in found if verdict.verdict == OPEN
    }


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.60031, "0.6003"), (0.59996, "0.59996"), (0.6, "0.600"), (0.52, "0.520"), (0.599999999, "0.600")],
)
def test_a_value_that_misses_its_target_does_not_look_like_it(value: float, shown: str) -> None:
    table = of_verdicts([judge(MEMORY, "gla", "cce_kahan", "compiled", [value])])
    assert table.rows[0][2] == shown


def test_the_page_needs_no_other_file_and_no_network(page: Path) -> None:
    text = page.read_text()
    read = Page(text)
    assert not {"link", "iframe", "object", "embed"} & {tag for tag, _, _ in read.attributes}
    for tag, name, value in read.attributes:
        if name in ("src", "srcset", "data", "action", "poster"):
            assert value.startswith("data:image/png;base64,"), (tag, name)
        if name == "href":
            assert value.startswith("#")
    style, [policy] = "".join(read.texts["style"]), [v for _, n, v in read.attributes if n == "content" and "src" in v]
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in policy, "the browser refuses every request as well"
    pictures = [value for tag, name, value in read.attributes if (tag, name) == ("img", "src")]
    assert len(pictures) == len(list(page.parent.glob("*.png"))) > 0
    anchors = [value for _, name, value in read.attributes if name == "id"]
    assert len(set(anchors)) == len(anchors)
    assert {value[1:] for _, name, value in read.attributes if name == "href"} <= set(anchors)


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.name)
def test_the_page_of_every_committed_report_holds_every_run_command_and_verdict(report: Path) -> None:
    runs = read_committed(report)
    found = verdicts(runs)
    read = Page(to_html(report.name, sections(runs, found, [], Pictures([]), every_loss=True), "here", "so"))
    [of_runs] = [table for table in read.tables if "status↕" in "".join(table[0]) or "status" in table[0]]
    assert len(of_runs) == 1 + len(runs)
    rows = [
        dict(zip((cell.strip("↕") for cell in table[0]), row, strict=True))
        for table in read.tables
        if table[0][0].startswith("verdict")
        for row in table[1:]
    ]
    judged, controls = ([row for row in rows if (row["loss"] == CONTROL) == of_control] for of_control in (False, True))
    answered = [verdict for verdict in [*found, *changes_of_loss(runs)] if verdict.verdict != OPEN]
    words = Counter(row["verdict"].split()[1] for row in judged)
    assert words == Counter(verdict.verdict for verdict in answered if verdict.backend != CONTROL)
    of_control = {(verdict.criterion.name, verdict.verdict) for verdict in answered if verdict.backend == CONTROL}
    assert {(row["criterion"], row["verdict"].split()[1]) for row in controls} == of_control, "it may stand in several"
    assert {row["verdict"] for row in rows} <= {"✓ met", "✗ missed", "? undecided"}, "readable without colour"
    [commands] = [text for text in read.texts["pre"] if text.strip()]
    assert commands.splitlines() == [run.summary["command"] for run in runs]
    missing = [row for table in read.tables if "what is missing" in table[0][0] for row in table[1:]]
    for verdict in found:
        if verdict.verdict == OPEN:
            reason, loss = verdict.remark.removeprefix("not measured: needs "), f"{verdict.model} x {verdict.backend}"
            losses = [row[2] for row in missing if row[0] == reason and verdict.criterion.name in row[1].split("; ")]
            assert any(loss in of_row and (verdict.against or "") in of_row for of_row in losses)


def test_a_report_says_if_the_filter_of_its_runs_is_biased(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "_figures", lambda runs: [])
    of_every = {path: [run.summary.get("loss_options") or {} for run in read_committed(path)] for path in REPORTS}
    kinds = {
        path: {own["filter_unbiased"] for own in every if "filter_unbiased" in own} for path, every in of_every.items()
    }
    assert {frozenset(kind) for kind in kinds.values()} == {frozenset(own) for own in ((), (True,), (False, True))}
    [both] = [path for path, kind in kinds.items() if kind == {False, True} and path.name == "apple"]
    dropping = [run for run in read_committed(both) if not run.summary["loss_options"].get("filter_unbiased")]
    short, whole, _ = write.write_pages(dropping, tmp_path, "dropping", [], [])
    assert ON_DROPPED in short.read_text()
    assert ON_DROPPED in whole.read_text()


def test_a_remark_on_a_failure_names_the_run_where_model_loss_and_batch_are_those_of_several() -> None:
    first, *_ = read_committed(REPORT)
    diverged = {**first.summary, "status": "diverged", "reason": "the loss is nan at step 9"}
    seeds = [Run({**diverged, "run_name": f"a-s{seed}", "seed": seed}, {}) for seed in (0, 1)]
    other = Run({**diverged, "run_name": "b-s0", "batch_size": 7}, {})
    lines = [line.partition(": diverged")[0] for line in on_runs([*seeds, other]) if "diverged" in line]
    kind = lines[2].removesuffix("B = 7")
    assert lines == [f"{kind}B = {diverged['batch_size']}, a-s{seed}" for seed in (0, 1)] + [f"{kind}B = 7"]


def test_the_speed_of_runs_that_did_not_finish_is_labelled_by_their_own_clock() -> None:
    first, *_ = read_committed(REPORT)
    nothing = dict.fromkeys(("tokens_per_second", "tokens_per_second_is", "step_time_ms_median", "device"))
    failed = Run({**first.summary, **nothing, "status": "failed", "run_name": "a-s0"}, {})
    on_cpu = {"tokens_per_second": 948.0, "tokens_per_second_is": "wall clock", "device": "cpu"}
    interrupted = Run({**first.summary, **on_cpu, "status": "interrupted", "run_name": "b-s0"}, {})
    for runs, speed, sentence in (
        ([failed], "tokens/s, not measured", "Tokens/s are not measured"),
        ([failed, interrupted], "tokens/s, wall clock", "Tokens/s are by wall clock"),
    ):
        columns = of_runs(runs).columns
        assert (speed in columns, "step, ms" in columns, sentence in on_figures(runs)) == (True, True, True)
        assert "device time" not in on_figures(runs)


def test_a_report_of_runs_that_never_started_says_so_and_prints_no_none() -> None:
    first, *_ = read_committed(REPORT)
    failed = Run({**first.summary, "status": "failed"}, {})
    assert on_origin([failed])[0] == "device, commit and versions are not recorded, because no run started"
    assert "None" not in " ".join(on_origin([failed]))


def test_text_of_a_run_cannot_become_part_of_the_page() -> None:
    runs = read_committed(REPORT)
    runs[0].summary.update(command="python train.py a='<script>alert(1)</script>' & b")
    text = to_html("<i>", sections(runs, verdicts(runs), [], Pictures([]), every_loss=True), "<b>", "<u>")
    assert len(re.findall("<script>", text)) == 1
    assert not re.findall("<[ibu]>", text)
    assert str(inline("**a** <b> `c`")) == "<strong>a</strong> &lt;b&gt; <code>c</code>"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_a_heading_sorts_its_table(page: Path, tmp_path: Path) -> None:
    """Node runs the page's own script on a table of plain objects that behave like a browser's."""
    read = Page(page.read_text())
    [script] = [text for text in read.texts["script"] if text.strip()]
    program = tmp_path / "sort.js"
    program.write_text(
        script
        + """
const cells = (texts) => texts.map((textContent) => ({ textContent }));
const heading = (isNumber) => ({
  attributes: { "aria-sort": "none" },
  classList: { contains: () => isNumber },
  addEventListener(_, act) { this.click = act; },
  getAttribute(name) { return this.attributes[name]; },
  setAttribute(name, value) { this.attributes[name] = value; },
});
const heads = [heading(false), heading(true)];
const body = { rows: [["b10", "1,200"], ["b9", "-"], ["a", "-3.5%"], ["c", "0.97 to 1.1"], ["d", "1.5e3"]]
  .map((texts) => ({ cells: cells(texts) })), append(...rows) { this.rows = rows; } };
makeSortable({ tHead: { rows: [{ cells: heads }] }, tBodies: [body] });
const seen = [];
for (const column of [1, 1, 0, 1]) {
  heads[column].click();
  seen.push([body.rows.map((row) => row.cells[0].textContent), heads.map((one) => one.attributes["aria-sort"])]);
}
console.log(JSON.stringify(seen));
""",
        encoding="utf-8",
    )
    done = subprocess.run(["node", str(program)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    up = ["a", "c", "b10", "d", "b9"]
    assert json.loads(done.stdout) == [
        [up, ["none", "ascending"]],
        [["d", "b10", "c", "a", "b9"], ["none", "descending"]],
        [["a", "b9", "b10", "c", "d"], ["ascending", "none"]],
        [up, ["none", "ascending"]],
    ]
