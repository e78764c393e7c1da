"""The figures of what runs cost beside their loss: docs/first_step.md and docs/multi_gpu.md."""

from blocks import ROOT

from linrnn.bench.parallel.rows import read
from linrnn.runs.intervals import AT_LEAST, AT_MOST, answer, estimate


def lines_of(page: str) -> list[str]:
    return (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()


def test_the_first_steps_are_those_of_the_log() -> None:
    text = (ROOT / "results/log/2026-11-26/first_step_c69e142.txt").read_text(encoding="utf-8")
    marks = {}
    for line in text.splitlines()[3:]:
        name, *seconds = line.split(" | ")
        marks[tuple(name.split())] = [float(second) for second in seconds]
    expected = []
    for (name, when), seconds in marks.items():
        if when == "after":
            before = marks.get((name, "before"))
            cells = [f"{second:.1f}" for second in seconds[:-1]] + [f"**{seconds[-1]:.1f}**"]
            expected.append([*cells, f"{before[-1]:.1f}" if before else "not measured"])
    table = [line.strip("| ").split(" | ") for line in lines_of("first_step.md")]
    assert [cells[1:] for cells in table if len(cells) == 8 and "**" in cells[6]] == expected
    reached = [seconds[-1] <= 30 for (name, when), seconds in marks.items() if when == "after" and "1b3" not in name]
    assert all(reached), "at 350m and below"


def test_the_first_steps_at_1b3_are_those_of_the_log() -> None:
    text = (ROOT / "results/log/2026-11-26/first_step_7d60aaf.txt").read_text(encoding="utf-8")
    runs: dict[str, list[tuple[str, list[float]]]] = {"first": [], "second": []}
    for line in text.splitlines()[3:]:
        name, *seconds = line.split(" | ")
        machine, _, model = name.split()
        runs[machine].append((model, [float(second) for second in seconds]))
    expected = [
        [*(f"{second:.1f}" for second in seconds[1:-1]), f"**{seconds[-1]:.1f}**"] for _, seconds in runs["first"]
    ]
    table = [line.strip("| ").split(" | ") for line in lines_of("first_step.md")]
    assert [cells[1:] for cells in table if len(cells) == 6 and "**" in cells[5]] == expected
    page = " ".join(lines_of("first_step.md"))
    found = estimate([seconds[-1] for model, seconds in runs["first"] if model == "gla"], ratios=False)
    assert found.low is not None
    assert found.high is not None
    assert answer(found.low, found.high, AT_MOST, 30) is None, "undecided"
    assert f"GLA 1b3 takes {found.value:.1f} s ({found.low:.1f} to {found.high:.1f}, n = {found.n})" in page
    first, *later = [seconds[-1] for model, seconds in runs["second"] if model == "gla"]
    assert f"GLA took {first} s, and three later ones took {min(later)} to {max(later)} s" in page
    begins = [seconds[2] for _, seconds in runs["second"]]
    assert f"after {min(begins):.1f} to   {max(begins):.1f} s" in page


def test_the_repeated_efficiencies_are_those_of_the_rows() -> None:
    [run] = [run for run in read(ROOT / "results/bench_parallel") if "part=350m_repeats" in run.command]
    cells = []
    for row in run.steps[1:]:
        found = estimate(row.efficiencies, ratios=True)
        assert found.n == 5
        assert found.low is not None
        assert found.high is not None
        assert answer(found.low, found.high, AT_LEAST, 0.9) is None
        cells.append(f"**undecided**: {found.value:.3f} ({found.low:.3f} to {found.high:.3f})")
    [line] = [line for line in lines_of("multi_gpu.md") if "n = 5 |" in line]
    assert line.endswith(" | " + " | ".join(cells) + " |")
    text = " ".join(lines_of("multi_gpu.md"))
    alone, fsdp = run.steps[0].times_ms, run.steps[1].efficiencies
    assert f"one GPU alone took {min(alone):.0f} to {max(alone):.0f} ms in that row" in text
    assert f"reach {min(fsdp[:3]):.2f} to {max(fsdp[:3]):.2f}, and the last two {fsdp[3]:.2f} and {fsdp[4]:.2f}" in (
        text.replace("`fsdp` the first three repeats ", "")
    )
