"""runs.json.xz holds every logged step, from which a report's verdicts and its rows' figures follow."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from made_up_runs import ELSEWHERE, HERE

from linrnn.config import load_config
from linrnn.report import write
from linrnn.report.runs import COMMITTED, LOSS, TIME_DIGITS, TIMES, Run, read_committed, read_runs, write_committed
from linrnn.report.targets import store_targets
from linrnn.report.write import make_report
from linrnn.runs.measurements import speed_of_run
from linrnn.runs.summary import MEAN_OF_LAST
from linrnn.training.trainer import Trainer
from study.criteria import CURVES, PERPLEXITY, VALID_LOSS, verdicts

RESULTS = Path(__file__).resolve().parents[2] / "results"
REPORTS = sorted(path.parent for path in RESULTS.glob(f"*/*/{COMMITTED}"))
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
    store_targets([{"metric": "valid_loss_nats", "within": 0.01, "of": "standard"}], results / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "_figures", lambda *given: [])
        make_report(load_config(["group=tiny", f"results_dir={results}"], "report"))
    return results / "summaries" / "tiny"


def test_runs_that_were_trained_here_become_a_page(folder):
    text = (folder / "report.md").read_text()
    first, second = [line for line in text.splitlines() if line.startswith("* ")][:2]
    assert first == "* 10 runs of Transformer (smoke) on cpu: 10 finished."
    assert second == "* They differ in loss (cce_kahan, standard); seed (5 values)."
    assert "## Targets: 1 reached\n" in text
    assert text.count("| transformer | smoke |") == text.count("\npython ") == 10
    assert (folder / "targets.json").exists()
    assert read_committed(folder)[0].environment["code"].keys() == {"linrnn", "cce_kernels"}


def test_the_file_holds_what_metrics_jsonl_holds_and_gives_the_same_verdicts(folder):
    raw, committed = read_runs(folder.parents[1] / "tiny"), read_committed(folder)
    for run, back in zip(raw, committed, strict=True):
        assert (back.name, back.losses) == (run.name, run.losses), "to the last bit"
        assert len(run.losses) == STEPS_OF_RUN
        assert back.curves.keys() == run.curves.keys()
        for key in run.curves.keys() & set(TIMES):
            both = zip(back.curves[key], run.curves[key], strict=True)
            assert all(a[0] == b[0] and abs(a[1] - b[1]) <= 10.0**-TIME_DIGITS for a, b in both)
    found = verdicts(raw)
    assert verdicts(committed) == found
    decided = [v for v in found if v.target in OF_LOSSES and v.backend == "cce_kahan" and v.n == len(SEEDS)]
    assert len(decided) == 3, "each has an interval"
    assert all(v.low is not None and v.low < v.high for v in decided)


@pytest.mark.parametrize("directory", REPORTS, ids=lambda path: path.name)
def test_committed_steps_give_the_final_loss_and_the_times_of_their_row(directory):
    for run in read_committed(directory):
        summary, losses = run.summary, dict(run.losses)
        last = [losses.get(step) for step in range(max(summary["steps"] - MEAN_OF_LAST, 0) + 1, summary["steps"] + 1)]
        if last and None not in last and summary["status"] == "finished":
            exact = last == np.float32(last).tolist()  # some runs kept six digits
            assert fmean(last) == pytest.approx(summary["train_loss_nats"], rel=0, abs=1e-9 if exact else 1e-5)
        records: dict[int, dict[str, float]] = {}
        for name in TIMES:
            for step, value in run.curves.get(name, ()):
                records.setdefault(step, {})[f"speed/{name}"] = value
        speed = speed_of_run(list(records.values()), tokens_per_step=1) if records else {}
        for key in ("wall_step_ms", "step_time_ms_median", "loss_layer_ms"):
            assert speed.get(key) is None or speed[key] == pytest.approx(summary[key], rel=0, abs=10.0**-TIME_DIGITS)


def test_values_of_any_digits_and_every_environment_come_back_and_times_to_a_tenth_of_a_microsecond(tmp_path):
    """Not the times of a run that shared its GPU: an earlier process of it may have had its own."""
    curves = {LOSS: [(4, 1 / 3), (8, float(np.float32(2 / 3)))], "loss/share": [(8, float(np.float32(0.1)))]}
    timed = {**curves, "wall_step_ms": [(8, 1.23456789)]}
    runs = [
        Run({"run_name": "alone"}, [HERE], timed),
        Run({"run_name": "shared", "gpu_shared": True}, [HERE, ELSEWHERE], timed),  # continued on another GPU
        Run({"run_name": "idle"}, [ELSEWHERE]),
    ]
    write_committed(runs, tmp_path)
    alone, shared, idle = read_committed(tmp_path)
    assert alone == replace(runs[0], curves={**curves, "wall_step_ms": [(8, 1.2346)]})
    assert shared == replace(runs[1], curves=curves)
    assert idle == runs[2]
