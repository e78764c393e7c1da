"""The figures of whole models in the README, and those of the study's index."""

import re
from pathlib import Path

import pytest
from blocks import ROOT
from figures import FIRST_SCREEN, MEASURED, README, STEPS, UNITS, index_rows, linked, span, steps

from linrnn.bench.steps.rows import read_rows
from linrnn.study.benchmarks.largest_batch import batch_verdicts, searches_on_the_h100
from linrnn.study.benchmarks.step_speed import step_speeds
from linrnn.study.criteria import MVE_LOSS, Verdict
from linrnn.study.results import read_committed
from linrnn.study.verdicts import verdicts


@pytest.mark.parametrize(
    ("label", "checkpointing"),
    [(f"{kind} checkpointing", kind.replace("no", "none")) for kind in ("full", "selective", "no")],
)
def test_the_largest_batches(label: str, checkpointing: str) -> None:
    found = batch_verdicts(searches_on_the_h100(ROOT / "results"))
    ratios = [v.value or 0 for key, v in found if v.against == "compiled" and key[1] == checkpointing]
    assert len(ratios) == 4
    width = f"{min(ratios):.2f} to {max(ratios):.2f}"
    assert MEASURED[f"sequences of four 1.3B models on 80 GB, {label}"][1] == width
    assert FIRST_SCREEN.count(f"{width} times") == (checkpointing != "selective"), (
        "the least and the most are told in words"
    )


def test_the_final_losses_of_the_mve() -> None:
    measured = "final loss of GLA, 10 M parameters: difference in nats"
    _, interval, seeds, _ = MEASURED[measured]
    found = verdicts(read_committed(linked(measured).parent))
    found = [v for v in found if v.criterion == MVE_LOSS and v.against == "compiled"]
    assert [v.criterion.bound for v in found] == ["within ±0.0100"] * 5, "four losses and the control"
    assert {(v.verdict, f"{v.n} seeds") for v in found} == {("met", seeds)}
    [ours] = [v for v in found if v.backend == "cce_kahan"]
    assert f"{ours.low:+.4f} to {ours.high:+.4f}" == interval


def speeds_at_1b3() -> list[Verdict]:
    folders = STEPS, steps("_kda"), steps("_gated_deltanet")
    found = [one.verdict for folder in folders for one in step_speeds(read_rows(folder))]
    return [verdict for verdict in found if "1b3" in verdict.setting]


def test_the_speed_of_whole_steps() -> None:
    ours = [v for v in speeds_at_1b3() if v.backend == "cce_kahan"]
    assert len({v.setting for v in ours}) == 8
    rounds = f"{min(v.n for v in ours)} to {max(v.n for v in ours)} rounds"
    for measured, against in (
        ("1.3B steps of four models: speed", "compiled"),
        ("1.3B steps: speed against eager", "standard"),
    ):
        values = [v.value for v in ours if v.against == against and v.value is not None]
        assert MEASURED[measured][1:3] == [f"{min(values):.3f} to {max(values):.3f}", rounds]


def test_every_range_has_its_unit() -> None:
    for measured, unit in UNITS.items():
        figures = MEASURED[measured][1]
        form = {"ratio": r"\d\.\d+ to \d\.\d+", "nats": r"[-+]\S+ to [-+]\S+"}[unit]
        assert re.fullmatch(form, figures), f"{measured}: {figures} {unit}"


def test_the_sizes_of_the_models() -> None:
    table = Path(ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    bold = {
        (size, model): figure
        for size, model, figure in re.findall(r"^\| (\w+) \| (\w+) \|.*\*\*([\d.,]+ M)\*\*", table, re.MULTILINE)
    }
    stated = re.findall(r"^\| `(\w+)` \|[^|]+\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", README, re.MULTILINE)
    assert len(stated) == 4
    for model, *figures in stated:
        assert figures == [bold[size, model] for size in ("smoke", "mve", "350m", "1b3")]


def test_the_study_s_index_holds_the_h100_s_rows() -> None:
    speeds = speeds_at_1b3()
    ours, liger = (
        span([v.value for v in speeds if v.backend == loss and v.against == "compiled" and v.value is not None])
        for loss in ("cce_kahan", "liger")
    )
    told = ["1.3B, eight settings of four models", "torch.compile", "1.08", ours, "**missed**", "6 or 8"]
    assert told in index_rows("Faster steps")
    answer = "**no** in five of eight, **undecided** in three"
    told = ["speed of 1.3B steps in bf16, 8 sequences", "torch.compile", liger, ours, answer, "6 or 8"]
    assert told in index_rows("Liger")
    found = verdicts(read_committed(ROOT / "results" / "summaries" / "same_loss"))
    for against, name in (("compiled", "torch.compile"), ("standard", "eager")):
        [v] = [v for v in found if (v.backend, v.criterion, v.against) == ("cce_kahan", MVE_LOSS, against)]
        told = [f"{v.value:+.4f} ({v.low:+.4f} to {v.high:+.4f})", f"**{v.verdict}**", f"{v.n}"]
        assert ["final loss", name, "±0.01", *told] in index_rows("The same loss")
