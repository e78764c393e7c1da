"""The table of FLA's models with five losses in docs/models.md."""

from datetime import datetime

from blocks import ROOT
from figures import table_of

from linrnn.study.results import read_committed

LOSSES = ("standard", "compiled", "liger", "fla", "cce_kahan")


def test_the_table_of_flas_models_holds_the_runs() -> None:
    runs: dict[str, dict[str, dict]] = {}
    times: list[datetime] = []
    for run in read_committed(ROOT / "results" / "summaries" / "fla_models"):
        name, _, hybrid = run.summary["model"].removeprefix("fla:").partition(" ")
        line = f"`{name}`" + (", hybrid" if hybrid == "attention_every=2" else hybrid)
        runs.setdefault(line, {})[run.summary["loss"]] = run.summary
        times += [datetime.fromisoformat(run.summary[name]) for name in ("started", "ended")]
    expected = []
    for line, of_loss in sorted(runs.items(), key=lambda entry: entry[0].replace("`", "")):
        of_line = [of_loss[loss] for loss in LOSSES]
        assert {(run["status"], run["steps"], run["gpu_shared"]) for run in of_line} == {("finished", 3, True)}
        losses = [run["train_loss_nats"] for run in of_line]
        peaks = [f"{run['peak_memory_bytes'] / 2**20:,.0f}" for run in of_line]
        [others] = set(peaks[1:])
        apart = max(abs(loss - losses[0]) for loss in losses[1:])
        expected.append([line, f"{losses[0]:.4f}", f"{apart:.4f}", peaks[0], others])
    table = table_of("../models.md", "three steps at `size=smoke`")
    assert table == expected
    page = " ".join((ROOT / "docs" / "models.md").read_text(encoding="utf-8").split())
    assert f"{(max(times) - min(times)).total_seconds():.0f} s lie between the start" in page
    hybrids = [line for line in runs if line.endswith("hybrid")]
    assert (len(runs) - len(hybrids), len(hybrids), len(LOSSES) * len(runs)) == (26, 4, 150)
    assert (
        "26 models and four hybrids train with `standard`, `compiled`, `liger`, `fla` and `cce_kahan`: 150 runs" in page
    )
