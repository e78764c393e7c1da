"""steps.json.xz: a report's verdicts follow from every step's loss and times, and a file of other steps is refused."""

import json
import lzma
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linrnn.config import load_config
from linrnn.core.errors import DataError
from linrnn.study.criteria import CURVES, PERPLEXITY, VALID_LOSS
from linrnn.study.report import make_report, write
from linrnn.study.results import COMMITTED, read_committed, read_runs
from linrnn.study.steps import STEPS, TIME_DIGITS, check_steps, read_steps, write_steps
from linrnn.study.verdicts import verdicts
from linrnn.training.trainer import Trainer

RESULTS = Path(__file__).resolve().parents[2] / "results"
WITH_STEPS = sorted(path.parent for path in RESULTS.glob(f"*/*/{STEPS}"))
MADE_HERE = "made here"
OF_LOSSES = (CURVES, PERPLEXITY, VALID_LOSS)
SEEDS, STEPS_OF_RUN = range(5), 52


@pytest.fixture(scope="module")
def folder(small_of_module: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on two losses and five seeds, trained on the CPU. One run was continued by a second process."""
    common = ("model=transformer", "size=smoke", "group=tiny", f"trainer.max_steps={STEPS_OF_RUN}", "schedule.steps=52")
    common += ("trainer.seq_len=16", "trainer.batch_size=1", "trainer.valid_tokens=32", "trainer.checkpoint_every=0")
    for loss in ("standard", "cce_kahan"):
        for seed in SEEDS:
            options = small_of_module(*common, f"loss={loss}", f"seed={seed}")
            if seed == 0:
                Trainer(load_config([*options, "trainer.max_steps=20", "trainer.checkpoint_every=20"])).fit()
            Trainer(load_config(options)).fit()
    results = Path(load_config(options).results_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "_figures", lambda runs: [])
        make_report(load_config(["group=tiny", f"results_dir={results}"], "report"))
    return results / "summaries" / "tiny"


def test_the_file_holds_what_metrics_jsonl_holds(folder: Path) -> None:
    raw = {run.name: run for run in read_runs(folder.parents[1] / "tiny")}
    committed = {run.name: run for run in read_committed(folder)}
    assert committed.keys() == raw.keys()
    for name, run in raw.items():
        assert committed[name].losses == run.losses, "to the last bit"
        assert len(run.losses) == STEPS_OF_RUN
        assert committed[name].times.keys() == run.times.keys()
        for key, series in run.times.items():
            assert [step for step, _ in committed[name].times[key]] == [step for step, _ in series]
            assert all(
                abs(a[1] - b[1]) <= 10.0**-TIME_DIGITS for a, b in zip(committed[name].times[key], series, strict=True)
            )


def test_verdicts_of_the_committed_report_are_those_of_its_runs(folder: Path) -> None:
    raw = verdicts(read_runs(folder.parents[1] / "tiny"))
    assert verdicts(read_committed(folder)) == raw
    decided = [v for v in raw if v.criterion in OF_LOSSES and v.backend == "cce_kahan" and v.n == len(SEEDS)]
    assert len(decided) == 3, "each has an interval"
    assert all(v.low is not None and v.low < v.high for v in decided)


@pytest.mark.parametrize("report", [MADE_HERE, *WITH_STEPS], ids=lambda report: getattr(report, "name", report))
def test_one_command_computes_every_interval_of_a_report_again(
    report: str | Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the curves and comparisons of runs.json removed, so that steps.json.xz alone can give them."""
    directory = folder if report == MADE_HERE else Path(report)
    monkeypatch.setattr(write, "_figures", lambda runs: [])
    copy = tmp_path / directory.name
    shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("*.md", "*.html", "*.png", "*.svg"))
    rows = json.loads((copy / COMMITTED).read_text())
    (copy / COMMITTED).write_text(json.dumps({k: v for k, v in rows.items() if k not in ("losses", "comparisons")}))
    write.write_pages(read_committed(directory), tmp_path / "before", directory.name, [], [])
    make_report(load_config([f"summary={copy}"], "report"))
    assert f"logged steps from {copy / STEPS}" in capsys.readouterr().out
    before, after = (tables(path / "verdicts.md") for path in (tmp_path / "before", copy))
    assert after == before
    assert any("| **" in line for line in before)


def tables(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.startswith("|")]


def altered(folder: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the report whose steps of one run are changed."""
    shutil.copytree(folder, target)
    content = json.loads(lzma.decompress((target / STEPS).read_bytes()))
    change(content[min(content)])
    (target / STEPS).write_bytes(lzma.compress(json.dumps(content).encode()))
    return target


def test_steps_that_give_other_figures_than_the_rows_are_refused(folder: Path, tmp_path: Path) -> None:
    def other_end(series: dict[str, Any]) -> None:
        series["loss_nats"]["values"][-1] += 1e-3

    def faster(series: dict[str, Any]) -> None:
        series["wall_step_ms"]["values"] = [0.5 * ms for ms in series["wall_step_ms"]["values"]]

    def none(series: dict[str, Any]) -> None:
        series.clear()

    for number, (change, words) in enumerate(
        [(other_end, "train_loss_nats"), (faster, "wall_step_ms"), (none, "cannot be read")]
    ):
        with pytest.raises(DataError, match=words):
            read_committed(altered(folder, tmp_path / str(number), change))
    shutil.copytree(folder, tmp_path / "cut")
    (tmp_path / "cut" / STEPS).write_bytes((folder / STEPS).read_bytes()[:-40])
    with pytest.raises(DataError, match="cannot be read"):
        read_committed(tmp_path / "cut")


def test_an_altered_step_in_the_middle_alters_the_verdict_on_curves(folder: Path, tmp_path: Path) -> None:
    """The final loss does not see it: it is a mean of the last fifty steps."""

    def bump(series: dict[str, Any]) -> None:
        series["loss_nats"]["values"][1] += 8.0

    changed = verdicts(read_committed(altered(folder, tmp_path / "bump", bump)))
    [old], [new] = (
        [v.high for v in found if (v.criterion, v.backend) == (CURVES, "cce_kahan") and v.n]
        for found in (verdicts(read_committed(folder)), changed)
    )
    assert new > old + 0.05


def test_a_folder_without_the_file_gives_the_verdicts_of_its_stored_comparisons(folder: Path, tmp_path: Path) -> None:
    old = shutil.copytree(folder, tmp_path / "old", ignore=shutil.ignore_patterns(STEPS))
    for before, after in zip(verdicts(read_committed(folder)), verdicts(read_committed(old)), strict=True):
        assert (before.criterion, before.verdict, before.n) == (after.criterion, after.verdict, after.n)
        assert before.value == pytest.approx(after.value, abs=1e-4)


def test_equal_runs_make_equal_bytes_and_few_of_them(tmp_path: Path) -> None:
    """72 runs of 305 steps, as 6 losses with 12 seeds make them: 400 KB at most."""
    drawn = random.Random(0)
    runs = {}
    for number in range(72):
        losses = [
            (step, float(np.float32(5 + 5 * math.exp(-step / 80) + drawn.gauss(0, 0.05)))) for step in range(1, 306)
        ]
        measured = range(6, 306)
        times = {
            name: [(step, float(np.float32(drawn.gauss(ms, ms / 50)))) for step in measured]
            for name, ms in (("wall_step_ms", 16), ("step_ms", 15), ("loss_forward_ms", 1.9), ("loss_backward_ms", 0.7))
        }
        runs[f"run-{number}"] = losses, {**times, "measured_steps": [(step, 1) for step in measured]}
    for name in ("a", "b"):
        write_steps(dict(sorted(runs.items(), reverse=name == "b")), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").stat().st_size < 400_000
    back = read_steps(tmp_path / "a")
    assert all(back[name]["loss_nats"] == losses for name, (losses, _) in runs.items())


def test_losses_of_more_digits_and_missing_steps_are_kept_and_not_checked(tmp_path: Path) -> None:
    third = [(4, 1 / 3), (8, 2 / 3)]
    write_steps({"r": (third, {})}, tmp_path / STEPS)
    series = read_steps(tmp_path / STEPS)["r"]
    assert series == {"loss_nats": third}
    check_steps({"run_name": "r", "steps": 8, "train_loss_nats": 0.4}, series, tmp_path)
    with pytest.raises(DataError, match=r"0\.5.*0\.4"):
        check_steps(
            {"run_name": "r", "steps": 2, "train_loss_nats": 0.4}, {"loss_nats": [(1, 0.4), (2, 0.6)]}, tmp_path
        )
