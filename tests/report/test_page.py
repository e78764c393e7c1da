"""Reports on runs or rows: three sentences, a picture, what was asked; report.html needs no other file."""

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import FIVE_SEEDS, HERE, answer, five, run

from linrnn.config import load_config
from linrnn.core.errors import ConfigError, DataError
from linrnn.report.metrics import Sample
from linrnn.report.runs import COMMITTED, Run, read_committed, read_max_batches
from linrnn.report.tables import of_verdicts
from linrnn.report.targets import judge, parse_target, store_targets
from linrnn.report.verdicts import baseline_of
from linrnn.report.write import make_report, write_report

MEMORY = parse_target({"metric": "peak_memory_bytes", "at_most": 0.6, "of": "compiled"})
LOSS = {"metric": "valid_loss_nats", "within": 0.01, "of": "compiled"}


class Page(HTMLParser):
    """Every (tag, attribute, value) of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """report.html of runs of three losses and five seeds, with pictures and one target."""
    directory = tmp_path_factory.mktemp("report")
    times = {"loss_layer_ms": {"forward": 0.1, "backward": 0.2}}
    runs = [one for loss in ("compiled", "cce_kahan", "liger") for one in five(loss, **times)]
    return write_report(runs, directory, "g", [MEMORY])[1]


def write_runs(group: Path, runs: list[Run]) -> None:
    for one in runs:
        (group / one.name).mkdir(parents=True, exist_ok=True)
        (group / one.name / "summary.json").write_text(json.dumps(one.summary))
        processes = [{**one.environment, "from_step": 0, "to_step": 60}]
        (group / one.name / "environment.json").write_text(json.dumps({"processes": processes}))


def test_without_compiled_and_eager_runs_are_compared_with_our_exact_loss():
    assert baseline_of([run("cce_filter"), run("cce_kahan")]) == "cce_kahan"
    assert baseline_of([run("cce_filter"), run("standard"), run("cce_kahan")]) == "standard"
    assert baseline_of([run("cce_filter")]) == "compiled"


# -------------------------------------------------------------------------------------------------------- the targets
@pytest.mark.usefixtures("text_alone")
def test_runs_are_judged_by_the_targets_of_their_sweep_and_by_no_others(tmp_path):
    """What was asked travels with the rows: from the sweep beside the runs, and from there beside the report."""
    group = tmp_path / "g"
    write_runs(group, FIVE_SEEDS)
    plain, _, *_ = make_report(load_config(["group=g", f"results_dir={tmp_path}"], "report"))
    assert not [word for word in ("reached", "target", "Targets") if word in plain.read_text()]
    store_targets([LOSS, {"metric": "peak_memory_bytes", "at_most": 0.5, "of": "compiled"}], group)
    for _ in ("runs", "rows"):
        asked, *_ = make_report(load_config(["group=g", f"results_dir={tmp_path}"], "report"))
        text = asked.read_text()
        assert "| **reached** | validation loss, difference, nats | +0.0040 | +0.0040 to +0.0040 | 5 |" in text
        assert (
            "| **inconclusive** | peak memory, ratio | 0.520 | 0.500 to 0.550 | 5 | ≤ 0.500 | gla | cce_kahan |" in text
        )
        assert (
            "| **not reached** | peak memory, ratio | 2.000 | 2.000 to 2.000 | 5 | ≤ 0.500 | gla | standard |" in text
        )
        assert "## Targets: 2 reached, 1 not reached, 1 inconclusive\n" in text
        shutil.rmtree(group, ignore_errors=True)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"metric": "valid_los", "within": 0.1}, "nearest: valid_loss_nats"),
        ({"metric": "valid_loss_nats"}, "give a number to one of at_most, at_least and within"),
        ({"metric": "valid_loss_nats", "within": 0.1, "of": "compild"}, "nearest: compiled"),
        ({"metric": "valid_loss_nats", "within": 0.1, "model": "gla"}, "a target has metric, at_most"),
        ({"metric": "valid_loss_nats", "within": 0.1, "pairs": 1}, "use 2 or more"),
    ],
)
def test_a_wrong_target_is_refused_with_what_is_right(entry, words):
    with pytest.raises(ConfigError) as refused:
        parse_target(entry)
    assert words in refused.value.remedy


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.60031, "0.60031"), (0.59996, "0.59996"), (0.6, "0.600"), (0.52, "0.520"), (0.599999999, "0.6")],
)
def test_a_value_that_misses_its_target_does_not_look_like_it(value, shown):
    table = of_verdicts([judge(MEMORY, "gla", "cce_kahan", "compiled", Sample([value]))])
    assert table.rows[0][table.columns.index("value")] == shown


# -------------------------------------------------------------------------------------------------------- the origins
CODE = {"linrnn": "a" * 12, "cce_kernels": "b" * 12}


def made(loss: str, code: dict[str, str] | None = None, commit: str = "c" * 40, **more: Any) -> list[Run]:
    environment = {**HERE, "code": CODE | (code or {}), "git": {"commit": commit, "dirty": False}}
    return [replace(one, environments=[environment]) for one in five(loss, **more)]


@pytest.mark.usefixtures("text_alone")
def test_runs_of_other_code_are_named_in_one_line_and_a_commit_in_between_is_no_warning(tmp_path, capsys):
    """At one commit, too: what was not committed differs."""
    others = [*made("cce_kahan", {"linrnn": "e" * 12}, gib=5), *made("liger", {"linrnn": "e" * 12}, gib=5)]
    write_runs(tmp_path / "code", [*made("compiled"), *others])
    write_runs(tmp_path / "commit", [*made("compiled"), *made("cce_kahan", commit="d" * 40)])
    report, *_ = make_report(load_config(["group=code", f"results_dir={tmp_path}"], "report"))
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert "differ in code of linrnn. A (commit ccccccccc): gla-cce_kahan-8-s0" in line
    assert "; B (commit ccccccccc): gla-co" in line
    assert line.removeprefix("warning: ") in report.read_text(), "the report says the same"
    assert {one.environment["code"]["linrnn"][0] for one in read_committed(report.parent)} == {"a", "e"}
    report, *_ = make_report(load_config(["group=commit", f"results_dir={tmp_path}"], "report"))
    assert "arning" not in capsys.readouterr().out + report.read_text()


# ----------------------------------------------------------------------------------------------------- groups, files
@pytest.mark.usefixtures("text_alone")
def test_a_report_is_made_again_from_its_rows_alone(tmp_path, capsys):
    summary, runs = tmp_path / "summaries" / "pair", [run("compiled"), run("cce_kahan", gib=5)]
    stranger = {**answer("compiled", 3, 10), "size": "1b3"}
    write_report(runs, summary, "pair", max_batches=[answer("compiled", 12, 1000), stranger])
    assert [entry["max_sequences"] for entry in read_max_batches(summary)] == [12], "of the runs' sizes alone"
    before = {name: (summary / name).read_bytes() for name in ("report.md", COMMITTED)}
    (summary / "report.md").unlink()
    paths = make_report(load_config(["group=pair", f"results_dir={tmp_path}"], "report"))
    assert f"read 2 committed runs of {summary}" in capsys.readouterr().out
    assert paths[0] == summary / "report.md"
    assert {name: (summary / name).read_bytes() for name in before} == before


@pytest.mark.usefixtures("text_alone")
def test_the_report_of_other_runs_is_not_overwritten(tmp_path):
    runs, options = FIVE_SEEDS[:3], ["group=g", f"results_dir={tmp_path}"]
    write_report(runs, tmp_path / "summaries" / "g", "g")
    write_runs(tmp_path / "g", runs[:1])
    for _ in range(2):  # its own report is
        assert make_report(load_config(options, "report"))[0] == tmp_path / "g" / "report" / "report.md"
        assert len(read_committed(tmp_path / "summaries" / "g")) == 3
    write_runs(tmp_path / "g", runs)
    assert make_report(load_config(options, "report"))[0] == tmp_path / "summaries" / "g" / "report.md"


def test_a_group_that_is_not_there_is_refused_with_the_groups_that_are(tmp_path):
    write_runs(tmp_path / "mine", FIVE_SEEDS[:1])
    with pytest.raises(DataError, match=r"(?s)group=other.*With runs: mine; 0 committed in"):
        make_report(load_config(["group=other", f"results_dir={tmp_path}"], "report"))


def test_the_plots_are_those_that_the_runs_allow(tmp_path):
    times = {"loss_layer_ms": {"forward": 0.1, "backward": 0.2}, "steps": 20}
    lengths = [run("cce_kahan", seq_len=t, batch_size=16384 // t, **times) for t in (512, 2048)]
    chunks = [run("cce_kahan", seed=1, chunk_size=c, **times) for c in (64, 128)]
    batches = [run("cce_kahan", batch_size=b, **times) for b in (8, 16)]
    for number, (runs, expected) in enumerate(
        (
            (lengths, set()),
            (chunks, {"memory.png"}),
            (batches, {"memory.png", "speed_by_batch.png"}),
            (FIVE_SEEDS, {"loss_curves.png", "pareto.png", "memory.png"}),
        )
    ):
        paths = write_report(runs, tmp_path / str(number), "g")
        assert {path.name for path in paths if path.suffix == ".png"} == expected


# ----------------------------------------------------------------------------------------------------------- the page
def test_the_page_needs_no_other_file_and_no_network(page):
    text = page.read_text()
    attributes = Page(text).attributes
    assert not {"link", "iframe", "object", "embed"} & {tag for tag, _, _ in attributes}
    assert not {"href", "srcset", "data", "action", "poster"} & {name for _, name, _ in attributes}
    assert not [words for words in ("url(", "@import") if words in text]
    assert [v for _, name, v in attributes if name == "content" and "default-src 'none'" in v], (
        "the browser refuses, too"
    )
    sources = [(tag, value.partition(",")[0]) for tag, name, value in attributes if name == "src"]
    assert sources == [("img", "data:image/png;base64")] * len(list(page.parent.glob("*.png"))) != []


@pytest.mark.usefixtures("text_alone")
def test_text_of_a_run_cannot_become_part_of_the_page(tmp_path):
    hostile = run("compiled", command="python train.py a='<script>alert(1)</script>' & b")
    text = write_report([hostile], tmp_path, "<i>")[1].read_text()
    assert len(re.findall("<script>", text)) == 1
    assert "<i>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
