"""The README's figures equal those of committed rows."""

import json
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks import ROOT

from linrnn.bench.loss.rows import read_rows as loss_rows
from linrnn.bench.steps.rows import AGAIN, Row, read_rows
from linrnn.runs.intervals import AT_LEAST, answer, interval_of_median, pairs_for, ratio_of_means
from linrnn.study.criteria import CURVES, FINAL_LOSS, MVE_LOSS, MVE_MEMORY, PERPLEXITY, VALID_LOSS, Criterion, Verdict
from linrnn.study.curves import difference, mean_of_last
from linrnn.study.filter_speed import filter_speeds
from linrnn.study.plots.select import named
from linrnn.study.report.settings import changes_of_loss
from linrnn.study.results import Run, read_committed
from linrnn.study.step_speed import host_share, names_of, step_speeds
from linrnn.study.verdicts import CONTROL, verdicts

README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_SCREEN = " ".join(README.split("## Install")[0].split())
# The first screen's table: the cells of each row, by what was measured.
MEASURED = {
    cells[0]: cells[1:]
    for cells in (line.strip("| ").split(" | ") for line in README.split("## Install")[0].splitlines() if "|" in line)
}


def linked(measured: str) -> Path:
    """The page that a row of the table links to."""
    [page] = re.findall(r"\((results/[\w/.]+\.md)\)", MEASURED[measured][3])
    return ROOT / page


STEPS = ROOT / "results" / "bench_steps" / "nvidia_h100_80gb_hbm3"
H100 = ROOT / "results" / "bench_loss" / "nvidia_h100_80gb_hbm3"
SHAPES = {
    "8192 x 2304 x 256000": "gemma2_2b",
    "16384 x 2048 x 128256": "llama_1b3",
    "16384 x 256 x 32000": "mve",
    "32768 x 1024 x 32000": "lm_350m",
}
# Two filters of sweep=apple, as reports name them; a run's training and validation loss.
DROPPED, SAMPLED = (f"cce_filter filter_unbiased={unbiased}" for unbiased in (False, True))
LOSSES = ("train_loss_nats", "valid_loss_nats")
# Columns of the pages' tables of the loss layer, and the rows that they show.
BACKENDS = {
    "compiled": ("compiled", None),
    "compiled again": ("compiled (again)", None),
    "eager": ("standard", None),
    "Liger (default)": ("liger", None),
    "Liger (default): time, MiB, dC error": ("liger", None),
    "Liger, fp32 sums": ("liger accumulate=fp32", None),
    "`cce_kahan`": ("cce_kahan", None),
    "`cce_kahan`, `workspace_mib=128`": ("cce_kahan", 128),
    "`workspace_mib=128`": ("cce_kahan", 128),
}


def by_backend(found: list[dict[str, Any]], of_set: str = "shapes") -> dict[tuple[Any, ...], dict[str, Any]]:
    """The measured rows of a set by logits, backend and workspace."""
    measured = [row for row in found if row["status"] == "ok" and row["rounds"] and row["set"] == of_set]
    return {(row["logits"], row["backend"], row["workspace_mib"]): row for row in measured}


def test_the_time_and_memory_of_the_loss_layer() -> None:
    label = "loss layer of {} shapes: time"
    files = [loss for loss in H100.glob("*.json") if "grid" in {row["set"] for row in json.loads(loss.read_text())}]
    assert linked(label.format(len(files))) == H100 / "grid.md"
    time: dict[int | None, list[float]] = {None: [], 256: []}
    memory: dict[int | None, list[float]] = {None: [], 256: []}
    found, below, above = {}, 0, 0
    for file in files:
        by = by_backend(json.loads(file.read_text(encoding="utf-8")), "grid")
        for workspace in time:
            ours, compiled = by["peaked", "cce_kahan", workspace], by["peaked", "compiled", None]
            time[workspace].append(ours["ratio_to_compiled"])
            memory[workspace].append(ours["extra_mib"] / compiled["extra_mib"])
        found[time[None][-1], memory[None][-1]] = ours = by["peaked", "cce_kahan", None]
        below += ours["ratio_to_compiled_high"] < 1
        above += ours["ratio_to_compiled_low"] > 1
        assert ours["rounds"] == 10
    for what, figures in (("time", time), ("memory", memory)):
        for workspace, start in ((None, f"loss layer of {len(files)} shapes"), (256, "with `workspace_mib=256`")):
            low, middle, high = (f(figures[workspace]) for f in (min, statistics.median, max))
            assert MEASURED[f"{start}: {what}"][:2] == [f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
    label = "loss layer of 25 shapes on an H200: time"
    on_h200 = [
        by_backend(json.loads((linked(label).parent / file.name).read_text(encoding="utf-8")), "grid") for file in files
    ]
    ratios = [by["peaked", "cce_kahan", None]["ratio_to_compiled"] for by in on_h200]
    assert MEASURED[label][:2] == [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
    assert f"lies below 1 on {below} shapes, and above 1 on {above}." in FIRST_SCREEN
    slowest, largest = max(found), max(found, key=lambda shares: shares[1])
    words = f"has {found[slowest]['n']} tokens and takes {slowest[0]:.2f} of torch.compile's time."
    assert f"The slowest of {len(files)} shapes {words}" in FIRST_SCREEN
    shape = " x ".join(str(found[largest][size]) for size in "ndv")
    assert f"The largest share of memory is {largest[1]:.2f}, on {shape}." in FIRST_SCREEN


def test_the_table_of_25_shapes_on_both_gpus() -> None:
    """Every figure of the table in docs/kernel_figures.md, from the grid's rows."""
    text = (ROOT / "docs" / "kernel_figures.md").read_text(encoding="utf-8")
    head = "| time, of torch.compile's | H100, peaked | H100, flat | H200, peaked | H200, flat |"
    lines = text.split(head)[1].split("\n\n")[0].splitlines()[2:]
    table = {cells[0]: cells[1:] for cells in (line.strip("| ").split(" | ") for line in lines)}
    medians, slowest = [], []
    for place, (gpu, logits) in enumerate(
        (g, x) for g in (H100, H100.parent / "nvidia_h200") for x in ("peaked", "flat")
    ):
        grid = [own for file in gpu.glob("*.json") if (own := by_backend(json.loads(file.read_text()), "grid"))]
        assert len(grid) == 25

        def ratios(backend: str, workspace: int | None = None, grid=grid, logits=logits) -> dict[str, float]:
            return {
                own[key]["shape"]: own[key]["ratio_to_compiled"]
                for own in grid
                for key in [(logits, backend, workspace)]
            }

        ours, tokens = ratios("cce_kahan"), {own[key]["shape"]: own[key]["n"] for own in grid for key in own}
        large = {shape: ratio for shape, ratio in ours.items() if tokens[shape] >= 2048}
        few = [ratio for shape, ratio in ours.items() if tokens[shape] < 2048]
        filtered = [
            ratio
            for own, ratio in zip(grid, ratios("cce_filter").values(), strict=True)
            if own[logits, "cce_filter", None]["de_err_ratio"] > 1.5
        ]
        rounds = [[own[logits, loss, None]["rounds_ms"] for loss in ("cce_filter", "cce_kahan")] for own in grid]
        pairs = [statistics.median(mine / theirs for mine, theirs in zip(*pair, strict=True)) for pair in rounds]
        errors = [own[logits, "cce_filter", None]["de_err_ratio"] for own in grid]
        exact = [pair for pair, ratio in zip(pairs, errors, strict=True) if ratio <= 1.5]
        expected = {
            "`cce_kahan`, median of 25 shapes": f"{statistics.median(ours.values()):.2f}",
            "three cuBLAS products alone, median": f"{statistics.median(ratios('three_products_cublas').values()):.2f}",
            "2,048 tokens and more: shapes of at most 1.02, of 21": f"{sum(x <= 1.02 for x in large.values())}",
            "fewer tokens, four shapes": f"{min(few):.2f} to {max(few):.2f}",
            "`workspace_mib=256`, slowest shape": f"{max(ratios('cce_kahan', 256).values()):.2f}",
            "`cce_filter`, median of the shapes that it filters (11)": f"{statistics.median(filtered):.2f}",
            "`cce_filter`, fastest of them": f"{min(filtered):.2f}",
            "`cce_filter`, slowest of them": f"{max(filtered):.2f}",
            "`cce_filter`, slowest of the exact shapes (14), of `cce_kahan`'s time": f"{max(exact):.2f}",
        }
        slow = {shape.replace("x", " x ") for shape, ratio in large.items() if ratio > 1.02}
        assert slow <= table.keys(), "every slow shape is named"
        named = table.keys() - expected.keys()
        expected |= {shape: f"{ours[shape.replace(' ', '')]:.2f}" for shape in named}
        medians.append(statistics.median(ours.values()))
        slowest.append(max(ours.values()))
        assert (len(filtered), len(exact)) == (11, 14)
        assert {row: cells[place] for row, cells in table.items()} == expected
    page = " ".join((ROOT / "docs" / "kernels.md").read_text(encoding="utf-8").split())
    ends = " to ".join(dict.fromkeys(f"{end(medians):.2f}" for end in (min, max)))
    assert f"the loss takes {ends} of torch.compile's time in the median, and at most {max(slowest):.2f}." in page


@pytest.mark.parametrize(("asked", "workspace", "tokens"), [(1.02, None, 2048), (1.30, 256, 0)])
def test_the_tables_of_undecided_cases_hold_every_case_that_no_interval_decides(
    asked: float, workspace: int | None, tokens: int
) -> None:
    words: dict[str, list[str]] = {}
    count: Counter[str] = Counter()
    slowest = 0.0
    for place, (gpu, logits) in enumerate(
        (gpu, logits) for gpu in (H100, H100.parent / "nvidia_h200") for logits in ("peaked", "flat")
    ):
        for path in gpu.glob("*.json"):
            row = by_backend(json.loads(path.read_text(encoding="utf-8")), "grid").get((logits, "cce_kahan", workspace))
            if row is None or row["n"] < tokens:
                continue
            low, high = row["ratio_to_compiled_low"], row["ratio_to_compiled_high"]
            verdict = "met" if high <= asked else "missed" if low > asked else "undecided"
            count[verdict] += 1
            slowest = max(slowest, row["ratio_to_compiled"])
            cells = words.setdefault(" x ".join(f"{row[size]:,}" for size in "ndv"), [""] * 4)
            cells[place] = interval(row) if verdict == "undecided" else verdict
            count["beyond"] += row["ratio_to_compiled"] > asked
    page = (ROOT / "docs" / "kernel_figures.md").read_text(encoding="utf-8")
    lines = page.split(f"| undecided on {asked:.2f}, N x D x V |")[1].split("\n\n")[0].splitlines()[2:]
    shown = {shape: cells for shape, *cells in (line.strip("| ").split(" | ") for line in lines)}
    assert shown == {shape: cells for shape, cells in words.items() if set(cells) != {"met"}}
    text, cases = " ".join(page.split()), count["met"] + count["missed"] + count["undecided"]
    assert f"By the 95 % intervals {count['met']} of {cases} cases meet it, none misses it," in text
    assert count["missed"] == 0
    numbers = {2: "two", 8: "eight", 17: "17"}
    assert f"and {numbers[count['undecided']]} are undecided." in text
    if workspace:
        exceed = f"{numbers[count['beyond']].capitalize()} of the 17 exceed it, by at most {slowest - asked:.3f}."
        assert exceed in text
    else:
        assert f"The {numbers[count['beyond']]} cases of {slowest:.3f} are undecided," in text


def test_the_floor_in_256_mib_is_four_of_cublas_s_products() -> None:
    text = " ".join((ROOT / "docs" / "kernel_figures.md").read_text(encoding="utf-8").split())
    for names, form in (
        (("4096x7168x129280", "4096x8192x128256"), "alone would take {} to {}, and the loss takes {} to {}."),
        (("3001x2880x201088",), "they would take {} to {}, and the loss takes {} to {}:"),
    ):
        floors, taken = [], []
        for gpu in (H100, H100.parent / "nvidia_h200"):
            for name in names:
                grid = by_backend(json.loads((gpu / f"{name}.json").read_text(encoding="utf-8")), "grid")
                for logits in ("peaked", "flat"):
                    floors.append(4 / 3 * grid[logits, "three_products_cublas", None]["ratio_to_compiled"])
                    taken.append(grid[logits, "cce_kahan", 256]["ratio_to_compiled"])
        ends = [f"{end(values):.2f}" for values in (floors, taken) for end in (min, max)]
        assert form.format(*ends) in text
    assert f"tiles of 128 x 256 to {3001 * 2880 / (24 * 128 * 12 * 256):.0%}".replace("%", " %") in text


def test_what_one_more_chunk_costs_at_d_1000() -> None:
    text = " ".join((ROOT / "docs" / "kernel_figures.md").read_text(encoding="utf-8").split())
    ends = []
    for workspace in (256, None):
        ratios = [
            by_backend(json.loads((gpu / "5120x1000x50304.json").read_text(encoding="utf-8")), "grid")[
                logits, "cce_kahan", workspace
            ]["ratio_to_compiled"]
            for gpu in (H100, H100.parent / "nvidia_h200")
            for logits in ("peaked", "flat")
        ]
        ends += [f"{min(ratios):.2f}", f"{max(ratios):.2f}"]
    assert "5120 x 1000 x 50304 takes {} to {} with 256 MiB, and {} to {} by default".format(*ends) in text


def test_the_table_of_repeated_calls_holds_rows_and_what_was_printed_before() -> None:
    text = (ROOT / "docs" / "kernel_methods.md").read_text(encoding="utf-8")
    printed = (ROOT / "results" / "log" / "2026-11-25" / "grid_312fe4c.txt").read_text(encoding="utf-8")
    lines = text.split("| 10 rounds on an H100, peaked logits")[1].split("\n\n")[0].splitlines()[2:]
    assert len(lines) == 6
    for line in lines:
        shape, usual, repeated = line.replace(",", "").strip("| ").split(" | ")
        name = SHAPES.get(shape, shape.replace(" ", ""))
        row = by_backend(json.loads((H100 / f"{name}.json").read_text(encoding="utf-8")), "grid")
        assert repeated == interval(row["peaked", "cce_kahan", None])
        [table] = re.findall(rf" {name} \({shape}\), peaked(.*?)(?:\n\[|$)", printed, re.DOTALL)
        [ratio, low, high] = re.findall(r"\ncce_kahan +10 +\S+ +(\S+) +([^-\s]+)-(\S+)", table)[0]
        assert usual == f"{ratio} ({low} to {high})"


def test_the_table_of_the_host_s_times_holds_the_profile_s_rows() -> None:
    text = (ROOT / "docs" / "kernel_methods.md").read_text(encoding="utf-8")
    head = (
        "| N x D x V | compiled: forward | backward | `cce_kahan`: forward | backward | nothing: forward | backward |"
    )
    lines = text.split(head)[1].split("\n\n")[0].splitlines()[2:]
    shown = {}
    for line in lines:
        shape, *cells = line.replace(",", "").strip("| ").split(" | ")
        shown[SHAPES.get(shape, shape.replace(" ", ""))] = cells
    times = host_times(H100.parent / "nvidia_h200" / "profile.jsonl")
    assert shown == {shape: [f"{ms:.2f}" for ms in own] for shape, own in times.items()}
    shares, floors = host_shares(times)
    assert f"Nothing takes {floors[0]} to {floors[1]} ms." in text
    assert f"the host takes {shares[0]} to {shares[1]} of compiled's time for both passes" in text
    times = host_times(H100 / "profile.jsonl")
    shares, floors = host_shares(times)
    assert len(times) == 10
    ends = f"takes {shares[0]} to {shares[1]} of compiled's time on ten shapes, and nothing takes"
    assert f"{ends} {floors[0]} to {floors[1]} ms" in " ".join(text.split())


def host_times(rows: Path) -> dict[str, list[float]]:
    """By shape: the host's ms for the forward and the backward pass of compiled, `cce_kahan` and nothing."""
    profile = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()[1:]]
    found = {(row["shape"], row["loss"], row["kernel"]): row["ms"] for row in profile}
    kinds = [(loss, f"(host, {x})") for loss in ("compiled", "cce_kahan", "nothing") for x in ("forward", "backward")]
    return {shape: [found[shape, *kind] for kind in kinds] for shape in {row["shape"] for row in profile}}


def host_shares(times: dict[str, list[float]]) -> tuple[list[str], list[str]]:
    """Least and most over the shapes: `cce_kahan`'s part of compiled's time, and the time of nothing."""
    shares = [sum(own[2:4]) / sum(own[:2]) for own in times.values()]
    floors = [sum(own[4:]) for own in times.values()]
    return tuple([f"{end(values):.2f}" for end in (min, max)] for values in (shares, floors))  # type: ignore[return-value]


def test_more_memory_is_slower_in_one_case_and_the_default_is_close_to_the_best_workspace() -> None:
    text = " ".join((ROOT / "docs" / "kernel_figures.md").read_text(encoding="utf-8").split())
    slower, shares = [], {}
    for path in H100.glob("*.json"):
        own = by_backend(json.loads(path.read_text(encoding="utf-8")), "workspace")
        sizes = {size: row for (_, backend, size), row in own.items() if backend == "cce_kahan"}
        if not sizes:
            continue
        default = sizes.pop(None)
        if path.stem == "16384x2048x65536":  # measured beside QuACK alone
            assert {size: row["rounds"] for size, row in sizes.items()} == {512: 8}
            assert default["ratio_to_compiled_high"] < sizes[512]["ratio_to_compiled_low"], "more memory is faster"
            continue
        assert (len(sizes), {row["rounds"] for row in sizes.values()}) == (7, {8})
        shares[path.stem] = default["ratio_to_compiled"] / min(row["ratio_to_compiled"] for row in sizes.values())
        slower += [
            (path.stem, small, large)
            for small in sizes
            for large in sizes
            if small < large
            and sizes[large]["extra_mib"] > sizes[small]["extra_mib"] + 1
            and sizes[large]["ratio_to_compiled_low"] > sizes[small]["ratio_to_compiled_high"]
        ]
    assert len(shares) == 10
    assert slower == [("4096x8192x128256", 128, 512)]
    worst = shares.pop("mve")
    assert f"The default takes {worst:.2f} times as long on 16384 x 256 x 32000" in text
    assert f"On the other nine shapes it takes at most {max(shares.values()):.2f} times as long" in text
    mve = json.loads((H100 / "mve.json").read_text(encoding="utf-8"))
    for of_set, one_chunk, words in (("workspace", 1024, "that is"), ("rivals_grid", 4096, "it is")):
        rounds = [by_backend(mve, of_set)["peaked", "cce_kahan", size]["rounds_ms"] for size in (None, one_chunk)]
        ratios = np.array(rounds[0]) / np.array(rounds[1])
        low, high = interval_of_median(ratios, seed=0)
        assert f"{words} {np.median(ratios):.3f} ({low:.3f} to {high:.3f})" in text


def test_liger_needs_less_memory_and_more_time_and_errs_more() -> None:
    errors = []
    for shape in SHAPES.values():
        found = by_backend(json.loads((H100 / f"{shape}.json").read_text(encoding="utf-8")))
        for logits in ("flat", "peaked"):
            errors.append(round(found[logits, "liger", None]["dc_err_ratio"]))
            for options in ("", " accumulate=fp32"):
                liger = found[logits, f"liger{options}", None]
                assert liger["extra_mib"] < found[logits, "cce_kahan", None]["extra_mib"]
                assert liger["ratio_to_compiled_low"] > 1
    assert f"Liger's default errs {min(errors)} to {max(errors)} times" in FIRST_SCREEN


def test_the_table_beside_quack_holds_its_fastest_chunks() -> None:
    section = (ROOT / "docs/kernel_figures.md").read_text(encoding="utf-8").split("## Beside QuACK")[1].split("## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")][2:]
    shown = {shape: cells for shape, *cells in lines if len(cells) == 5}
    leaner = {shape: cells for shape, *cells in lines if len(cells) == 2 and shape[0].isdigit()}
    in_little = dict(leaner)
    faster, memory, errors, slowest = 0, [], [], []
    for path in H100.glob("*.json"):
        own = by_backend(json.loads(path.read_text(encoding="utf-8")), "rivals_grid")
        chunks = [row for (_, backend, _), row in own.items() if backend.startswith("quack")]
        if not chunks:
            continue
        ours, quack = own["peaked", "cce_kahan", None], min(chunks, key=lambda row: float(row["ratio_to_compiled"]))
        ratios = [mine / other for mine, other in zip(ours["rounds_ms"], quack["rounds_ms"], strict=True)]
        low, high = interval_of_median(np.array(ratios), seed=0)
        cells = [f"{row['ratio_to_compiled']:.3f}, {row['extra_mib']:,.0f}" for row in (ours, quack)]
        cells.append(f"{int(quack['backend'].partition('/')[2] or 4096):,}")
        cells.append(f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")
        cells.append(f"{quack['dc_err'] / ours['dc_err']:.1f}")
        assert shown.pop(" x ".join(f"{ours[size]:,}" for size in "ndv")) == cells
        faster += high < 1
        assert high < 1 or low < 1 < high
        memory.append(quack["extra_mib"] / ours["extra_mib"])
        if memory[-1] < 1:
            small = by_backend(json.loads(path.read_text(encoding="utf-8")), "workspace").values()
            fitting = [row for row in small if row["backend"] == "cce_kahan" and row["extra_mib"] <= quack["extra_mib"]]
            best = min(fitting, key=lambda row: float(row["ratio_to_compiled"]), default=None)
            words = "not measured" if best is None else f"{best['ratio_to_compiled']:.3f}, {best['extra_mib']:,.0f}"
            assert leaner.pop(" x ".join(f"{ours[size]:,}" for size in "ndv")) == [cells[1], words]
        errors.append(quack["dc_err"] / ours["dc_err"])
        slowest.append(statistics.median(ratios))
    assert shown == leaner == {}
    memory.sort()
    less = sum(share < 1 for share in memory)
    text = " ".join(section.split())
    assert f"`cce_kahan` is faster on {faster} of {len(memory)} shapes" in text
    assert less == 4
    assert f"QuACK takes less memory on four of these {len(memory)} shapes" in FIRST_SCREEN
    slower = [shape for shape, (theirs, ours) in in_little.items() if ours[0].isdigit() and ours > theirs]
    assert len(slower) == len(in_little) == 4
    assert "in as little memory it is faster on all four, by medians." in FIRST_SCREEN
    assert f"{memory[0]:.2f} to {memory[3]:.2f} of `cce_kahan`'s" in text
    assert f"other {len(memory) - less} it takes {memory[4]:.1f} to {memory[-1]:.1f} times as much" in text
    assert f"errs {min(errors):.1f} to {max(errors):.1f} times as much" in text
    assert f"largest lead is {100 * (max(slowest) - 1):.0f} %" in text
    assert f"faster than QuACK on {faster} of {len(memory)} shapes" in FIRST_SCREEN


@pytest.mark.parametrize(
    ("page", "tables"),
    [
        ("docs/kernel_figures.md", 2),
        ("docs/kernel_filter.md", 1),
        ("kernels/README.md", 1),
        ("docs/study/h6_liger.md", 1),
    ],
)
def test_the_tables_of_the_loss_layer_hold_the_h100_s_rows(page: str, tables: int) -> None:
    directory = ROOT / "results" / "bench_loss" / "nvidia_h100_80gb_hbm3"
    found = {
        shape: by_backend(json.loads((directory / f"{name}.json").read_text(encoding="utf-8")))
        for shape, name in SHAPES.items()
    }
    heads, head = set(), ""
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        head = line if line.startswith("| ") and head == "" else head if line.startswith("|") else ""
        shape, _, logits = line.strip("| ").split(" | ")[0].partition(", ")
        if not line.startswith("|") or shape not in SHAPES:
            continue
        heads.add(head)
        if "exact `cce_kahan`: time" in head:
            filtered, exact = (found[shape][logits, backend, None] for backend in ("cce_filter", "cce_kahan"))
            ratio, low, high = (filtered[f"ratio_to_compiled{end}"] for end in ("", "_low", "_high"))
            cells = [f"{ratio:.2f} ({low:.2f} to {high:.2f})", error(filtered["de_err"]), error(filtered["dc_err"])]
            cells += [f"{exact['ratio_to_compiled']:.2f}", error(exact["de_err"])]
        else:
            columns = head.strip("| ").split(" | ")[1:]
            shown = [found[shape][logits or "flat", *BACKENDS[column]] for column in columns]
            cells = [interval(row) if logits else time_and_memory(row, "dC error" in head) for row in shown]
        assert line.strip("| ").split(" | ")[1:] == cells, line
    assert len(heads) == tables


def test_the_table_of_ignored_rows_holds_the_h100_s_rows() -> None:
    directory = ROOT / "results" / "bench_loss" / "nvidia_h100_80gb_hbm3"
    found = {}
    for path in directory.glob("*.json"):
        rows = json.loads(path.read_text(encoding="utf-8"))
        found[" x ".join(f"{rows[0][size]:,}" for size in "ndv")] = by_backend(rows, "ignored")
    section = (ROOT / "docs/kernel_methods.md").read_text(encoding="utf-8").split("## Ignored rows")[1].split("## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")][2:]
    assert len(lines) == sum(bool(rows) for rows in found.values())
    for shape, *cells in lines:
        rows = found[shape.removesuffix(" (small)")]
        kinds = (("cce_kahan", "peaked"), ("cce_kahan", "half_ignored"), ("compiled", "half_ignored"))
        whole, half, compiled = (rows[logits, name, None]["ratio_to_three_products"] for name, logits in kinds)
        assert cells == [f"{whole:.3f}", f"{half:.3f}", f"{half / whole:.2f}", f"{compiled:.3f}"], shape


def test_the_table_of_when_cce_filter_filters_is_the_planner_s_choice() -> None:
    torch, planner = pytest.importorskip("torch"), pytest.importorskip("cce_kernels.planner")
    options = planner.Options(filter_eps=2.0**-12, filter_unbiased=True, filter_if_faster=True)
    numbers = [2**k for k in range(8, 18)]
    section = (ROOT / "docs/kernel_filter.md").read_text(encoding="utf-8").split("## When cce_filter filters")[1]
    head, *lines = [line.strip("| ").split(" | ") for line in section.split("\n\n")[3].splitlines() if "--" not in line]
    assert len(lines) == 4
    for vocab, *cells in lines:
        for dim, cell in zip(head[1:], cells, strict=True):
            sizes = int(dim.removeprefix("D = ").replace(",", "")), int(vocab.replace(",", ""))
            kinds = torch.bfloat16, torch.bfloat16, torch.bfloat16, False, True, False
            found = [planner.plan(planner.Problem(n, *sizes, *kinds), 132, options).exact for n in numbers]
            filtered = [n for n, exact in zip(numbers, found, strict=True) if not exact]
            bounds = [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", cell)] or [2**30]
            bounds *= 1 + cell.startswith("N =")
            assert filtered == [n for n in numbers if bounds[0] <= n <= (*bounds, 2**30)[1]], (vocab, dim, cell)


def error(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def interval(row: dict[str, Any]) -> str:
    ratio, low, high = (row[f"ratio_to_compiled{end}"] for end in ("", "_low", "_high"))
    return f"{ratio:.3f} ({low:.3f} to {high:.3f})"


def time_and_memory(row: dict[str, Any], with_error: bool) -> str:
    shown = f"{row['ratio_to_compiled']:.2f}, {row['extra_mib']:,.0f}"
    return f"{shown}, {error(row['dc_err'])}" if with_error else shown


@pytest.mark.parametrize(("label", "checkpointing"), [("checkpointing", "full"), ("no checkpointing", "none")])
def test_the_largest_batches(label: str, checkpointing: str) -> None:
    measured = f"sequences of GLA 1.3B on 80 GB, {label}"
    answers = json.loads((linked(measured).parent / "max_batches.json").read_text(encoding="utf-8"))
    largest = {
        answer["loss"]: answer["batch"]
        for answer in answers
        if (answer["model"], answer["activation_checkpointing"]) == ("gla", checkpointing)
    }
    assert MEASURED[measured][1] == f"{largest['cce_kahan']} instead of {largest['compiled']}"


def test_the_final_losses_of_the_mve() -> None:
    measured = "final loss of GLA, 10 M parameters: difference in nats"
    _, interval, seeds, _ = MEASURED[measured]
    found = verdicts(read_committed(linked(measured).parent))
    found = [v for v in found if v.criterion == MVE_LOSS and v.against == "compiled"]
    assert [v.criterion.bound for v in found] == ["within ±0.0100"] * 5, "four losses and the control"
    assert {(v.verdict, f"{v.n} seeds") for v in found} == {("met", seeds)}
    [ours] = [v for v in found if v.backend == "cce_kahan"]
    assert f"{ours.low:+.4f} to {ours.high:+.4f}" == interval


def test_the_speed_of_whole_steps() -> None:
    speeds = [one.verdict for one in step_speeds(read_rows(STEPS)) if "1b3" in one.verdict.setting]
    ours = [v for v in speeds if v.backend == "cce_kahan"]
    assert linked("1.3B steps: speed").parent == STEPS
    for measured, against in (("1.3B steps: speed", "compiled"), ("1.3B steps: speed against eager", "standard")):
        values = [v.value for v in ours if v.against == against and v.value is not None]
        assert MEASURED[measured][1:3] == [f"{min(values):.3f} to {max(values):.3f}", f"{ours[0].n} rounds"]


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


# ------------------------------------------------------------------------------------------------- the study's tables


def table_of(page: str, head: str) -> list[list[str]]:
    """The rows below the only head of a page's tables that begins so."""
    text = (ROOT / "docs" / "study" / page).read_text(encoding="utf-8")
    [block] = [block for block in text.split("\n\n") if block.startswith(f"| {head} |")]
    return [line.strip("| ").split(" | ") for line in block.strip().splitlines()[2:]]


# The study's tables of largest batches on an H100: columns, and the folders of the searches.
SEARCHED = {"eager": "standard", "compiled": "compiled", "Liger": "liger", "`cce_kahan`": "cce_kahan"}
SEARCHES = ("largest_h100", "largest_h100_models", "largest_h100_none", "largest_h100_none_models", "largest_h100_full")
LINES = {"GLA": "gla", "KDA": "kda", "Transformer": "transformer"}


def probes_on_the_h100() -> dict[tuple[str, str, str], dict[int, dict[str, Any]]]:
    """By model, checkpointing and loss: the probes' rows by batch. A later folder's row replaces an earlier one's."""
    found: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
    for run in (run.summary for name in SEARCHES for run in read_committed(ROOT / "results" / "summaries" / name)):
        key = run["model"], run["activation_checkpointing"], run["loss"]
        found.setdefault(key, {})[run["batch_size"]] = run
    return found


def of_line(name: str) -> tuple[str, str]:
    model, _, checkpointing = name.partition(", ")
    return LINES[model], checkpointing.removesuffix(" checkpointing") or "none"


def test_the_tables_of_largest_batches_on_the_h100_hold_its_rows() -> None:
    probes, lines = probes_on_the_h100(), set()
    most: dict[tuple[str, str, str], int] = {}
    for key, rows in probes.items():
        most[key] = max(batch for batch, row in rows.items() if row["status"] == "finished")
        assert rows[most[key] + 1]["status"] == "out_of_memory", "an exact search"
    page, names = "h1a_larger_batches.md", list(SEARCHED)
    for name, *cells, _ in table_of(page, "1.3B, T = 2048, V = 128,256: sequences on an H100"):
        lines.add(of_line(name))
        for loss, cell in zip(names, cells, strict=True):
            assert cell == str(most.get((*of_line(name), SEARCHED[loss]), "not measured")), (name, loss)
    assert lines == {key[:2] for key in probes}
    for name, *cells in table_of(page, "tokens/s at these batches, n = 1"):
        speeds = {}
        for loss in SEARCHED.values():
            key = *of_line(name), loss
            speeds[loss] = probes[key][most[key]]["tokens_per_second"] if key in most else None
        shown = ["not measured" if speed is None else f"{speed:,.0f}" for speed in speeds.values()]
        assert cells == [*shown, f"{speeds['cce_kahan'] / speeds['compiled']:.3f}"], name
    against = {"torch.compile": "compiled", "eager": "standard"}
    ratios: dict[tuple[str, str], dict[str, float]] = {}
    for base, baseline in against.items():
        for model, checkpointing, loss in most:
            other = most.get((model, checkpointing, baseline))
            if loss == "cce_kahan" and other:
                ratios.setdefault((base, checkpointing), {})[model] = most[model, checkpointing, loss] / other
    for base, *cells in table_of(page, "against"):
        for checkpointing, cell in zip(("none", "full"), cells, strict=True):
            own = ratios[base, checkpointing]
            found = re.findall(r"(\d\.\d\d) \((\w+)\)", cell)
            assert {LINES[model]: ratio for ratio, model in found} == {m: f"{ratio:.2f}" for m, ratio in own.items()}
            assert ("**met**" in cell) == all(ratio >= 1.5 for ratio in own.values())
            assert ("**missed**" in cell) == all(ratio < 1.5 for ratio in own.values())
    [line] = [one for one in index_lines() if one.startswith("| [1.3 to 2 times")]
    for base, cell in zip(against, line.split(" | ")[1:], strict=False):
        every = [*ratios[base, "none"].values(), *ratios[base, "full"].values()]
        own = ratios[base, "none"].values() if base == "torch.compile" else every
        assert f"{min(own):.2f} to {max(own):.2f}" in cell


def test_the_forecasts_that_were_too_high_are_those_of_the_h100_s_searches() -> None:
    expected = {}
    names = {loss: name for name, loss in SEARCHED.items()}
    models = {model: name for name, model in LINES.items()}
    probes = probes_on_the_h100()
    for folder in SEARCHES[1:]:
        for search in json.loads((ROOT / "results" / "summaries" / folder / "max_batches.json").read_text()):
            if not search["exact"] or search["foreseen"] == search["batch"]:
                continue
            key = search["model"], search["activation_checkpointing"], search["loss"]
            [foreseen] = [p["foreseen_bytes"] for p in search["probes"] if p["batch"] == search["foreseen"]]
            message = str(probes[key][search["foreseen"]])
            asked, held, unused = (
                float(number) / (1024 if unit == "MiB" else 1)
                for pattern in (r"allocate {}", r"allocated memory {} is", r"and {} is reserved")
                for number, unit in [re.search(pattern.format(r"([\d.]+) (\wiB)"), message).groups()]
            )
            name = f"{models[key[0]]}, {names[key[2]]}" + ", full checkpointing" * (key[1] == "full")
            sizes = foreseen / 2**30, held + asked, held + unused + asked
            expected[name] = [str(search["foreseen"]), str(search["batch"]), *(f"{size:.2f}" for size in sizes)]
            assert sizes[1] < 78 < sizes[2]
    assert {name: cells for name, *cells in table_of("h1a_larger_batches.md", "H100, 78 GiB")} == expected


def index_lines() -> list[str]:
    return (ROOT / "docs/study/index.md").read_text(encoding="utf-8").splitlines()


def by_name(found: list[Row]) -> dict[str, dict[str, Row]]:
    """The rows of each model line, by the line's name and the loss."""
    names, lines = names_of(found), {}  # type: ignore[var-annotated]
    for row in found:
        lines.setdefault(names[row.line], {})[row.loss] = row
    return lines


def steps(folder: str) -> Path:
    """The directory of whole steps on the H100 whose name ends so."""
    return STEPS.parent / f"{STEPS.name}{folder}"


def answer_of(verdict: Verdict | None) -> str:
    if verdict is None:
        return "not measured"
    return f"**{verdict.verdict}**: {verdict.value:.3f} ({verdict.low:.3f} to {verdict.high:.3f})"


def tokens_per_second(row: Row) -> str:
    return f"{row.tokens_per_second:,.0f}" if row.status == "ok" else row.status.replace("_", " ")


@pytest.mark.parametrize(
    ("folder", "page", "head", "rounds"),
    [
        ("", "h1b_step_speed.md", "H100, 8 x 2048 tokens a step", 8),
        ("_350m_graphs", "h1b_step_speed.md", "H100, one CUDA graph a step, 8 x 2048 tokens", 8),
        ("_lengths", "h4_linear_rnn_or_transformer.md", "H100, 16,384 tokens a step", 6),
        ("_chunks", "h4_linear_rnn_or_transformer.md", "H100, tokens of a chunk", 6),
        ("_followups_350m", "h7_follow_ups.md", "H100, 350M, V = 131,072, 8 x 2048 tokens a step", 8),
    ],
)
def test_the_tables_of_step_speeds_hold_the_h100_s_rows_and_verdicts(
    folder: str, page: str, head: str, rounds: int
) -> None:
    found = read_rows(steps(folder))
    judged = {
        (one.verdict.setting, one.verdict.backend, one.verdict.against): one.verdict for one in step_speeds(found)
    }
    assert {verdict.n for verdict in judged.values()} == {rounds}
    expected = []
    for name, row in by_name(found).items():
        losses = ("standard", "compiled", "cce_kahan")
        cells = [name, *(tokens_per_second(row[loss]) if loss in row else "not measured" for loss in losses)]
        cells += [answer_of(judged.get((name, "cce_kahan", base))) for base in ("compiled", "standard")]
        cells.append(with_interval(judged[name, AGAIN, "compiled"]))
        expected.append([*cells, f"{host_share(row['cce_kahan']):.0%}".replace("%", " %")])
    assert sorted(table_of(page, head)) == sorted(expected)


def test_the_graphs_and_the_host_at_350m_are_told_with_their_rows() -> None:
    """The sentences around the tables of 350M, with and without CUDA graphs."""
    found = step_speeds(read_rows(steps("_350m_graphs")))
    ours = {(v.setting, v.against): v for one in found if (v := one.verdict).backend == "cce_kahan"}
    page, index = (" ".join((ROOT / "docs/study" / name).read_text(encoding="utf-8").split()) for name in (
        "h1b_step_speed.md", "index.md",
    ))  # fmt: skip
    compiled = [v.value for v in ours.values() if v.against == "compiled"]
    ends = f"{min(compiled):.3f} to {max(compiled):.3f}"
    assert f"missed against torch.compile**, {ends}." in page
    assert f"**missed** at 350M as CUDA graphs: {ends} |" in index
    assert f"V = 32,000 to 262,144: speed | - | {ends} | 8 rounds |" in FIRST_SCREEN
    eager = [v for v in ours.values() if v.against == "standard"]
    met = [v.value for v in eager if v.verdict == "met"]
    assert f"on ({min(met):.3f} to {max(met):.3f})" in page
    assert {v.setting.split(", ")[1] for v in eager if v.verdict == "missed"} == {"V = 32,000"}
    missed = sorted(v.value for v in eager if v.verdict == "missed")
    assert "**missed** at 32,000 ({:.3f} and {:.3f})".format(*missed) in page
    widest = max(own["compiled"].peak_gib for own in by_name(read_rows(steps("_350m_graphs"))).values())
    assert f"GLA {widest:.2f} GiB with compiled" in page

    rows = by_name(read_rows(steps("_followups_350m")))
    follow_ups_page = " ".join((ROOT / "docs/study/h7_follow_ups.md").read_text(encoding="utf-8").split())
    shares = [round(100 * host_share(own["cce_kahan"])) for own in rows.values()]
    assert f"The host issues kernels for {min(shares)} to {max(shares)} % of a step" in follow_ups_page
    for model, name in (("GLA", "GLA's step takes"), ("Transformer", "the Transformer's")):
        pair = (rows[f"{model} 350m, compile=blocks"], rows[f"{model} 350m"])
        ratio = ratio_of_means(*(own["compiled"].wall_ms for own in pair))
        assert f"{name} {with_interval(ratio)}" in follow_ups_page
    saved = {f"{own['compiled'].peak_gib - own['cce_kahan'].peak_gib:.2f}" for own in rows.values()}
    assert saved == {"1.81"}
    assert "Ours peaks 1.81 GiB lower than compiled in every line." in follow_ups_page


def test_the_table_of_lengths_holds_the_shares_and_gains() -> None:
    rows = by_name(read_rows(steps("_lengths")))
    ratios = {
        one.verdict.setting: one.ratios
        for one in step_speeds(read_rows(steps("_lengths")))
        if (one.verdict.backend, one.verdict.against) == ("cce_kahan", "compiled")
    }
    words = {False: "missed", True: "met", None: "undecided"}
    expected = []
    for tokens in ("32 x 512", "8 x 2,048", "2 x 8,192", "1 x 16,384"):
        names = [f"{model} 1b3, {tokens}" for model in ("GLA", "Transformer")]
        one = ratio_of_means(*(ratios[name] for name in names))
        assert one.low is not None
        assert one.high is not None
        cell = f"**{words[answer(one.low, one.high, AT_LEAST, 1.0)]}**: {with_interval(one)}"
        expected.append([tokens, *(percent(rows[name]["compiled"].loss_layer_share) for name in names), cell])
    assert table_of("h4_linear_rnn_or_transformer.md", "H100, compiled's loss layer, of a step") == expected
    graphs = {
        (one.verdict.setting, one.verdict.against): one.ratios
        for one in step_speeds(read_rows(steps("_350m_graphs")))
        if one.verdict.backend == "cce_kahan"
    }
    for vocabulary, *cells in table_of("h4_linear_rnn_or_transformer.md", "350M, V"):
        for against, cell in zip(("compiled", "standard"), cells, strict=True):
            keys = [(f"{model} 350m, V = {vocabulary}, cuda_graph=true", against) for model in ("GLA", "Transformer")]
            if cell == "out of memory":
                assert keys[0] not in graphs
                continue
            one = ratio_of_means(*(graphs[key] for key in keys))
            assert one.low is not None
            assert one.high is not None
            assert cell == f"**{words[answer(one.low, one.high, AT_LEAST, 1.0)]}**: {with_interval(one)}"
    chunks = by_name(read_rows(steps("_chunks")))
    large, small = (chunks[f"GLA 1b3, model.chunk_size={size}"]["compiled"].wall_ms for size in (128, 64))
    page = (ROOT / "docs/study/h4_linear_rnn_or_transformer.md").read_text(encoding="utf-8")
    assert f"GLA's step takes {with_interval(ratio_of_means(large, small))} of that with 64" in page


def test_the_table_of_fine_tuning_holds_the_verdicts_of_five_seeds() -> None:
    names = {"cce_filter": "`cce_filter` (samples)", "cce_apple": "`cce_apple` (Apple's kernels, drop tiles)"}
    names |= {"cce_kahan": "`cce_kahan` (exact)", "compiled_nudged": "`compiled_nudged`, the control"}
    expected = []
    for loss, name in names.items():
        cells = [cell_of("finetune_filter_gla", loss, "compiled", c, n=5) for c in (FINAL_LOSS, VALID_LOSS)]
        expected.append([name, *cells, cell_of("finetune_filter_gla", loss, "compiled", CURVES, ".4f", n=5)])
    assert table_of("h3_filter.md", "GLA 350M, fine-tuned, against compiled, n = 5") == expected
    [low, high] = re.findall(r"[+-][\d.]+", expected[0][1])[1:]
    assert f"final loss, difference in nats | - | {low} to {high} | 5 seeds |" in FIRST_SCREEN
    [row] = [one for one in index_lines() if one.startswith("| [A filter makes")]
    for name in ("cce_filter", "cce_apple"):
        _, _, figures = cell_of("finetune_filter_gla", name, "compiled", FINAL_LOSS, n=5).partition(": ")
        assert figures.replace(" (", " nats (" if name == "cce_filter" else " (", 1) in row


def test_the_table_of_liger_s_steps_holds_the_h100_s_rows() -> None:
    found = read_rows(STEPS)
    judged = {
        (one.verdict.setting, one.verdict.backend, one.verdict.against): one.verdict for one in step_speeds(found)
    }
    expected = []
    for name, row in by_name(found).items():
        if "liger" not in row or "1b3" not in name:
            continue
        ratios = [judged[name, loss, "compiled"] for loss in ("liger", "cce_kahan")]
        cells = [f"{one.value:.3f} ({one.low:.3f} to {one.high:.3f})" for one in ratios]
        cells += [f"{row[loss].loss_layer_ms:.1f}" for loss in ("liger", "cce_kahan", "compiled")]
        expected.append([name, *cells, *(f"{row[loss].peak_gib:.2f}" for loss in ("liger", "cce_kahan", "compiled"))])
    assert sorted(table_of("h6_liger.md", "H100, whole steps of 8 x 2048 tokens")) == sorted(expected)


def test_the_table_of_peaks_holds_the_h100_s_rows() -> None:
    expected = []
    for name, row in by_name(read_rows(STEPS)).items():
        if "1b3" in name:
            peaks = [row[loss].peak_gib if row[loss].status == "ok" else None for loss in ("standard", "compiled")]
            ours = row["cce_kahan"].peak_gib
            assert ours is not None
            cells = ["out of memory" if peak is None else f"{peak:.2f}" for peak in peaks]
            ratios = ["-" if peak is None else f"{ours / peak:.3f}" for peak in reversed(peaks)]
            expected.append([name, *cells, f"{ours:.2f}", *ratios])
    assert sorted(table_of("h2_loss_memory.md", "H100, peak of a step, GiB")) == sorted(expected)


def test_the_table_of_shares_of_a_step_holds_the_h100_s_rows() -> None:
    expected = []
    for name, row in by_name(read_rows(STEPS)).items():
        shares = [row[loss].loss_layer_share for loss in ("compiled", "cce_kahan")]
        expected.append([name, *(f"{share:.1%}".replace("%", " %") for share in shares if share is not None)])
    assert sorted(table_of("h4_linear_rnn_or_transformer.md", "H100, 8 x 2048 tokens a step")) == sorted(expected)


def test_the_table_of_gains_divides_those_of_linear_rnns_by_the_transformer_s() -> None:
    ratios = {
        (one.verdict.setting, one.verdict.against): one.ratios
        for one in step_speeds(read_rows(STEPS))
        if one.verdict.backend == "cce_kahan"
    }
    names = {False: "missed", True: "met", None: "undecided"}
    found = table_of("h4_linear_rnn_or_transformer.md", "T = 2048, gain divided by the Transformer's")
    assert [row[0] for row in found] == ["GLA 1b3", "GLA 1b3, full checkpointing", "KDA 1b3, full checkpointing"]
    for name, *cells in found:
        for cell, against in zip(cells, ("compiled", "standard"), strict=True):
            if (name, against) not in ratios:
                assert cell == "not measured"
                continue
            one = ratio_of_means(ratios[name, against], ratios[re.sub("^[A-Z]+", "Transformer", name), against])
            assert one.low is not None
            assert one.high is not None
            word = names[answer(one.low, one.high, AT_LEAST, 1.0)]
            assert cell == f"**{word}**: {one.value:.3f} ({one.low:.3f} to {one.high:.3f})"


def test_the_table_of_equal_losses_holds_the_twelve_seeds_verdicts() -> None:
    found = verdicts(read_committed(ROOT / "results" / "summaries" / "same_loss"))
    judged = {(v.backend, v.criterion): v for v in found if v.against == "compiled"}
    assert {v.n for v in judged.values() if v.value is not None} == {12}
    expected = []
    for loss in ("cce_kahan", "liger", "fla", "standard", "compiled_nudged"):
        cells = []
        for criterion, form in ((MVE_LOSS, "+.4f"), (VALID_LOSS, "+.4f"), (CURVES, ".4f"), (PERPLEXITY, "+.2f")):
            v = judged[loss, criterion]
            cells.append(f"**{v.verdict}**: {v.value:{form}} ({v.low:{form}} to {v.high:{form}})")
        expected.append([f"`{loss}`" + (", the control" if loss == "compiled_nudged" else ""), *cells])
    assert table_of("h5_same_loss.md", "MVE of GLA, twelve seeds, against compiled") == expected
    for loss, words in (("cce_kahan", "for ours"), ("compiled_nudged", "for the control")):
        [needed] = re.findall(r"needs about ([\d,]+) pairs", judged[loss, PERPLEXITY].remark)
        stated = f"{round(int(needed.replace(',', '')), -2):,}"
        page = " ".join((ROOT / "docs/study/h5_same_loss.md").read_text(encoding="utf-8").split())
        assert re.search(rf"some {stated}( pairs)? {words}", page)


def cell_of(folder: str, backend: str, against: str, criterion: Criterion, form: str = "+.4f", n: int = 12) -> str:
    """The verdict of a summary from n pairs, as the study's pages write it."""
    found = verdicts(read_committed(ROOT / "results" / "summaries" / folder))
    [v] = [v for v in found if (v.backend, v.against, v.criterion) == (backend, against, criterion)]
    assert v.n == n
    return f"**{v.verdict}**: {v.value:{form}} ({v.low:{form}} to {v.high:{form}})"


def test_the_table_of_ways_of_summing_holds_the_verdicts() -> None:
    rows = table_of("h5_same_loss.md", "way of summing")
    kahan = "cce_kahan accumulate=kahan"
    assert [row[0] for row in rows] == ["bf16", "fp32", "Kahan", "`compiled_nudged`, the control"]
    for name, final, beside, valid, curves in rows:
        loss = f"cce_kahan accumulate={name.lower()}" if len(name) < 6 else "compiled_nudged"
        assert final == cell_of("summation", loss, "compiled", MVE_LOSS)
        assert valid == cell_of("summation", loss, "compiled", VALID_LOSS)
        assert curves == cell_of("summation", loss, "compiled", CURVES, ".4f")
        assert beside == ("-" if name[0] in "K`" else cell_of("summation", loss, kahan, MVE_LOSS))


def test_the_tables_of_pretraining_with_a_filter_hold_the_verdicts() -> None:
    folder = "pretrain_filter_mve"
    rows = table_of("h8_pretraining_filter.md", "pair, ±0.01 nats asked")
    assert len(rows) == 4
    for pair, final, valid in rows:
        loss, against = pair.replace("`", "").replace(", the control", "").split(" against ")
        assert final == cell_of(folder, loss, against, MVE_LOSS)
        assert valid == cell_of(folder, loss, against, VALID_LOSS)
    page = (ROOT / "docs" / "study" / "h8_pretraining_filter.md").read_text(encoding="utf-8")
    assert f"{cell_of(folder, 'cce_filter', 'cce_kahan', MVE_LOSS)} | 12 |" in page
    assert f"{cell_of(folder, 'cce_filter', 'cce_kahan', CURVES, '.4f')}, near step 40 | 12 |" in page
    index = (ROOT / "docs" / "study" / "index.md").read_text(encoding="utf-8")
    for group, loss, criterion, words in (
        (folder, "cce_filter", MVE_LOSS, "at 10 M parameters for a filter that samples"),
        ("apple", DROPPED, MVE_LOSS, "for a rule that drops entries"),
        ("apple", "cce_apple", MVE_LOSS, "in training"),
        ("apple", "cce_apple", VALID_LOSS, "in validation on WikiText-103"),
    ):
        assert cell_of(group, loss, "compiled", criterion).replace(": ", f" {words}: ") in index
    [row] = [line for line in FIRST_SCREEN.split("|") if "to +0.0038" in line]
    assert row.strip() in cell_of(folder, "cce_filter", "compiled", MVE_LOSS)


def by_loss_and_seed(folder: str) -> dict[tuple[str, int], Run]:
    runs = named(read_committed(ROOT / "results" / "summaries" / folder))
    return {(name, run.summary["seed"]): run for run, name in runs}


def above(runs: dict[tuple[str, int], Run], loss: str, base: str) -> list[dict[int, float]]:
    """For each seed the distance of two training losses by step, as a mean of 20 steps."""
    seeds = sorted({seed for _, seed in runs})
    return [dict(difference(runs[loss, seed].losses, runs[base, seed].losses)) for seed in seeds]


def test_the_tables_of_dropped_entries_hold_the_verdicts_and_the_curves() -> None:
    folder, criteria = "apple", ((MVE_LOSS, "+.4f"), (VALID_LOSS, "+.4f"), (CURVES, ".4f"))
    rules = {"dropped entries": DROPPED, "Apple's kernels": "cce_apple", "sampled entries": SAMPLED}
    rows = table_of("h8_pretraining_filter.md", "305 steps, twelve seeds")
    assert len(rows) == 8
    for pair, *cells in rows:
        loss, against = re.sub(r"`|,( the control)?", "", pair).split(" against ")
        assert cells == [cell_of(folder, rules.get(loss, loss), against, *criterion) for criterion in criteria]
    page = (ROOT / "docs" / "study" / "h8_pretraining_filter.md").read_text(encoding="utf-8")
    assert f"10 M parameters: final training loss | {cell_of(folder, DROPPED, 'cce_kahan', MVE_LOSS)} | 12 |" in page
    assert f"kernels: final training loss | {cell_of(folder, 'cce_apple', 'cce_kahan', MVE_LOSS)} | 12 |" in page
    assert f"loss on WikiText-103 | {cell_of(folder, 'cce_apple', 'cce_kahan', VALID_LOSS)} | 12 |" in page
    log = (ROOT / "results" / "log" / "2026-11-26.md").read_text(encoding="utf-8")
    for loss in (*rules.values(), CONTROL, "cce_kahan"):
        assert f" | {' | '.join(cell_of(folder, loss, 'compiled', *criterion) for criterion in criteria)} |\n" in log

    runs, summing = (by_loss_and_seed(name) for name in (folder, "summation"))
    curves = {loss: above(runs, loss, "compiled") for loss in (DROPPED, "cce_apple", SAMPLED, CONTROL)}
    masses = [dict(runs[DROPPED, seed].statistics["dropped_mass_mean"]) for seed in range(12)]
    found = table_of("h8_pretraining_filter.md", "step | dropped entries, nats above compiled")
    assert [row[0] for row in found] == ["20", "35", "55", "100", "150", "200", "250", "305"]
    for step, *cells in found:
        means = [statistics.mean(own[int(step)] for own in seeds) for seeds in (*curves.values(), masses)]
        assert cells == [*(f"{mean:+.3f}" for mean in means[:4]), f"{means[4]:.3f}"]
    for loss in ("compiled", CONTROL):
        for seed in range(12):
            assert runs[loss, seed].losses == summing[loss, seed].losses, "bit for bit"


def test_what_the_page_says_of_apples_kernels_in_training_follows_from_the_rows() -> None:
    page = " ".join((ROOT / "docs" / "study" / "h8_pretraining_filter.md").read_text(encoding="utf-8").split())
    runs = by_loss_and_seed("apple")
    for loss, words in ((DROPPED, "of the mass still is dropped."), (SAMPLED, "of the mass is left to the sample.")):
        masses = [mean_of_last(runs[loss, seed].statistics["dropped_mass_mean"]) or 0 for seed in range(12)]
        assert f"{statistics.mean(masses):.0%}".replace("%", " %") + f" {words}" in page

    def means(loss: str) -> dict[int, float]:
        curves = above(runs, loss, "compiled")
        return {step: statistics.mean(curve[step] for curve in curves) for step in curves[0]}

    apple, dropped = means("cce_apple"), means(DROPPED)
    assert max(abs(apple[step] - dropped[step]) for step in range(1, 21)) < 0.002, "they start alike"
    below = max(step for step in apple if apple[step] >= 0) + 1
    lowest = min(apple, key=apple.__getitem__)
    assert f"from step {below} on, by {-apple[lowest]:.3f} nats near step {lowest}, and by {-apple[305]:.3f}" in page
    assert max(abs(nats) for nats in means(SAMPLED).values()) < 0.01

    def apart(loss: str, key: str) -> list[float]:
        return [runs[loss, seed].summary[key] - runs["compiled", seed].summary[key] for seed in range(12)]

    scatter = [statistics.stdev(apart(loss, "train_loss_nats")) for loss in ("cce_apple", SAMPLED)]
    assert scatter[0] / scatter[1] == pytest.approx(2, abs=0.05), "twice as much"
    lowest_apple, highest_control = min(apart("cce_apple", "valid_loss_nats")), max(apart(CONTROL, "valid_loss_nats"))
    assert f"at least {lowest_apple:.2f} nats above compiled, and no seed of the control more than 0.02" in page
    assert highest_control < 0.02
    found = verdicts(list(runs.values()))
    missed = [v for v in found if v.verdict == "missed" and v.criterion in (VALID_LOSS, CURVES)]
    controls = {v.criterion: v.value for v in found if v.backend == CONTROL}
    assert {v.backend for v in missed} == {DROPPED, "cce_apple"}
    assert all(v.value > 10 * controls[v.criterion] for v in missed), "more than ten times the control's value"
    ends = [statistics.mean(runs["compiled", seed].summary[key] for seed in range(12)) for key in LOSSES]
    assert "mean loss is {:.2f} nats in training and {:.2f} in validation".format(*ends) in page
    [epochs] = {run.summary["epochs"] for run in runs.values()}
    assert f"at most once ({epochs:.2f} epochs)" in page
    values = {(v.backend, v.criterion): v.value or 0 for v in found if v.against == "compiled"}
    assert f"drops them ends {values[DROPPED, MVE_LOSS]:.2f} nats higher" in FIRST_SCREEN
    assert f"WikiText-103 they end {values['cce_apple', VALID_LOSS]:.2f} nats above torch.compile" in FIRST_SCREEN
    peaks = {v.backend: f"{v.value:.3f}" for v in found if (v.criterion, v.against) == (MVE_MEMORY, "compiled")}
    assert f"peak at {peaks['cce_apple']} of compiled's memory, the two of `cce_filter` at {peaks[DROPPED]}" in page
    assert peaks[SAMPLED] == peaks[DROPPED]
    assert f"and `cce_kahan` at {peaks['cce_kahan']}." in page
    perplexities = {v.backend: v.verdict for v in found if (v.criterion, v.against) == (PERPLEXITY, "compiled")}
    rules = dict.fromkeys((DROPPED, "cce_apple", SAMPLED), "missed")
    assert perplexities == rules | dict.fromkeys(("cce_kahan", CONTROL), "undecided")


def test_350m_at_a_lower_learning_rate_is_told_as_its_rows_have_it() -> None:
    folders = {"learning rate 1e-3": "pretrain_filter", "learning rate 2e-4": "pretrain_filter_low_lr"}
    rows = table_of("h5_same_loss.md", "350M, five seeds, `cce_filter` against `cce_kahan`")
    assert [row[0] for row in rows] == list(folders)
    for name, *cells in rows:
        criteria = ((FINAL_LOSS, "+.4f"), (VALID_LOSS, "+.4f"), (CURVES, ".4f"))
        assert cells == [cell_of(folders[name], "cce_filter", "cce_kahan", *criterion, n=5) for criterion in criteria]
    h3, h5 = (
        " ".join((ROOT / "docs" / "study" / name).read_text(encoding="utf-8").split())
        for name in ("h8_pretraining_filter.md", "h5_same_loss.md")
    )
    low, high = (by_loss_and_seed(folder) for folder in reversed(folders.values()))
    final = cell_of("pretrain_filter_low_lr", "cce_filter", "cce_kahan", FINAL_LOSS, n=5)
    assert f"2e-4, without a control | {final} | 5 |" in h3
    ends = [[runs["cce_kahan", seed].summary["train_loss_nats"] for seed in range(5)] for runs in (low, high)]
    assert "`cce_kahan` ends at {:.3f} nats instead of {:.3f}".format(*map(statistics.mean, ends)) in h5
    apart = [
        [runs["cce_filter", seed].summary["train_loss_nats"] - own[seed] for seed in range(5)]
        for runs, own in zip((low, high), ends, strict=True)
    ]
    assert "by {:.3f} nats over the pairs, and by {:.3f} at 1e-3".format(*map(statistics.stdev, apart)) in h5
    mean = statistics.mean(apart[0])
    assert f"The mean of the differences is {mean:.3f} nats" in h5
    assert round(pairs_for(apart[0], 0.01 - abs(mean)), -1) == 10, "some ten pairs"
    late = max(abs(nats) for own in above(low, "cce_filter", "cce_kahan") for step, nats in own.items() if step > 150)
    assert f"After step 150 no pair differs by more than {late:.2f} nats" in h5


def test_the_table_of_350m_holds_the_verdicts_of_five_seeds_and_their_means() -> None:
    folder, pages = "pretrain_filter", ROOT / "docs" / "study"
    rows = table_of("h5_same_loss.md", "350M, five seeds, against compiled")
    assert len(rows) == 4
    for pair, *cells in rows:
        loss, _, against = pair.replace("`", "").replace(", the control", "").partition(" against ")
        criteria = (FINAL_LOSS, VALID_LOSS, CURVES)
        forms = ("+.4f", "+.4f", ".4f")
        expected = [
            cell_of(folder, loss, against or "compiled", criterion, form, 5)
            for criterion, form in zip(criteria, forms, strict=True)
        ]
        assert cells == expected
    h3 = " ".join((pages / "h8_pretraining_filter.md").read_text(encoding="utf-8").split())
    assert f"{cell_of(folder, 'cce_filter', 'cce_kahan', FINAL_LOSS, n=5)}, as for the control | 5 |" in h3
    h5 = " ".join((pages / "h5_same_loss.md").read_text(encoding="utf-8").split())
    runs = read_committed(ROOT / "results" / "summaries" / folder)
    losses = {name: [] for name in ("cce_kahan", "cce_filter", "compiled_nudged", "compiled")}
    for run in runs:
        losses[run.summary["loss"]].append(run.summary["train_loss_nats"])
    kahan, filtered, control, compiled = (f"{statistics.mean(own):.3f}" for own in losses.values())
    assert f"{kahan} (`cce_kahan`), {filtered} (`cce_filter`), {control} (the control) and {compiled} (compiled)" in h5
    assert f"{filtered} nats with the filter, between `cce_kahan` ({kahan}) and compiled ({compiled})" in h3
    scatter = [f"{statistics.stdev(own):.2f}" for own in losses.values()]
    assert f"scatter by {min(scatter)} to {max(scatter)} nats (standard deviation over the seeds)" in h5


def test_the_mve_s_peak_memory_is_that_of_the_twelve_seeds() -> None:
    found = verdicts(read_committed(ROOT / "results" / "summaries" / "same_loss"))
    peaks = {(v.backend, v.against): v for v in found if v.criterion == MVE_MEMORY}
    ours, liger = ([peaks[loss, base] for base in ("compiled", "standard")] for loss in ("cce_kahan", "liger"))
    [row] = [row for row in table_of("h2_loss_memory.md", "peak, ratio") if row[0].startswith("MVE, GLA, today's")]
    assert row[1:4] == [*(f"**{v.verdict}**: {v.value:.3f} (n = {v.n})" for v in ours), f"{MVE_MEMORY.target:g}"]
    pages = {name: (ROOT / "docs" / "study" / name).read_text(encoding="utf-8") for name in ("index.md", "h6_liger.md")}
    for mine, theirs in zip(ours, liger, strict=True):
        assert f"{theirs.value:.3f}" in pages["index.md"]
        assert f"ours {mine.value:.3f}" in pages["index.md"]
    assert f"({liger[0].value:.3f})" in pages["h6_liger.md"]
    assert (liger[0].verdict, ours[0].verdict) == ("met", "missed")


def test_the_filter_s_speed_up_of_the_gradients_is_that_of_the_rows() -> None:
    [stated] = re.findall(
        r"([\d.]+) to ([\d.]+) times as fast as compiled at 32,000 entries \(H200\); ([\d.]+) to ([\d.]+) above "
        r"100,000 \(H100\); ([\d.]+) to ([\d.]+) on trained",
        (ROOT / "docs/study/h3_filter.md").read_text(encoding="utf-8"),
    )
    trained = "phase1-gla-350m-cce_kahan-14f593d1-s0-step_512-16384"
    asked = (("nvidia_h200", ("mve", "lm_350m")), ("nvidia_h100_80gb_hbm3", ("gemma2_2b", "llama_1b3")))
    found: list[str] = []
    for device, shapes in (*asked, ("nvidia_h200", (trained,))):
        values = []
        for shape in shapes:
            directory = ROOT / "results" / "bench_loss" / device
            kept = [row for row in loss_rows(directory / f"{shape}.json") if row.rounds and not row.workspace_mib]
            # By process and logits. Below 2**-12 the filter keeps more, and asks for more time.
            bases = {(row.run, row.logits): row for row in kept if row.backend == "compiled"}
            filters = ("cce_filter", "cce_filter filter_eps=0.0009765625", "cce_filter filter_eps=0.000244140625")
            own = [row for row in kept if row.backend in filters and (shape == trained or row.set == "shapes")]
            values += [added_ms(bases[row.run, row.logits]) / added_ms(row) for row in own]
        found += [f"{end(values):.1f}" for end in (min, max)]
    assert list(stated) == found


def test_the_filter_s_speed_up_on_the_grid_is_that_of_the_rows() -> None:
    found = [list(filter_speeds(gpu)) for gpu in (H100, H100.parent / "nvidia_h200")]
    by_case = {(gpu, one.shape, one.row.logits): one.verdict for gpu, own in enumerate(found) for one in own}
    rows = table_of("h3_filter.md", "speed-up, N x D x V")
    assert len(by_case) == 4 * len(rows), "all cases are told"
    for shape, *cells in rows:
        verdicts = [by_case[gpu, shape, logits] for gpu in (0, 1) for logits in ("peaked", "flat")]
        assert cells == [f"**{v.verdict}**: {v.value:.2f} ({v.low:.2f} to {v.high:.2f})" for v in verdicts]
        assert {v.n for v in verdicts} == {10}
    count = Counter(verdict.verdict for verdict in by_case.values())
    values = [verdict.value or 0 for verdict in by_case.values()]
    ends = f"{min(values):.2f} to {max(values):.2f}"
    met, rest = (
        f"in {count['met']} of {len(by_case)} cases",
        f"in {count['missed']}, **undecided** in {count['undecided']}",
    )
    least = min(one.row.v for own in found for one in own)
    for name, words in (
        ("h3_filter.md", f"**met** {met}, **missed** {rest}: {ends}"),
        ("h3_filter.md", f"For the layer alone met {met}**, each with {least:,} entries or"),
        ("index.md", f"**met** {met} of {least:,} entries or more, **missed** {rest} ({ends})"),
    ):
        page = " ".join((ROOT / "docs" / "study" / name).read_text(encoding="utf-8").split())
        assert words in page


def added_ms(row: Any) -> float:
    """What gradients add to the time of a forward pass."""
    return float(row.forward_backward_ms - row.forward_ms)


def test_the_study_s_index_holds_the_h100_s_rows() -> None:
    lines = (ROOT / "docs/study/index.md").read_text(encoding="utf-8").splitlines()
    speeds = [one.verdict for one in step_speeds(read_rows(STEPS)) if one.verdict.setting.split(",")[0].endswith("1b3")]
    for loss, start in (("cce_kahan", "| [8 % faster"), ("liger", "| [Liger has")):
        values = [v.value for v in speeds if v.backend == loss and v.against == "compiled" and v.value is not None]
        [line] = [line for line in lines if line.startswith(start)]
        assert f"{min(values):.3f} to {max(values):.3f}" in line
    [line] = [line for line in lines if line.startswith("| [Training reaches")]
    found = verdicts(read_committed(ROOT / "results" / "summaries" / "same_loss"))
    for against, cell in zip(("compiled", "standard"), line.split(" | ")[1:], strict=False):
        [v] = [v for v in found if (v.backend, v.criterion, v.against) == ("cce_kahan", MVE_LOSS, against)]
        assert f"{v.value:+.4f} nats ({v.low:+.4f} to {v.high:+.4f})" in cell
        assert f"**{v.verdict}**" in cell


# Model lines of the follow-ups, and the lines that they are compared with; by the name of the model.
FOLLOW_UPS = steps("_followups")
PLAIN, BLOCKS, FLOAT8 = "{} 1b3", "{} 1b3, compile=blocks", "{} 1b3, compile=blocks, float8=blocks"
RANKS = tuple("{} " + f"shared_projection_rank={rank} 1b3" for rank in (512, 1024))
COMPARED = ((BLOCKS, PLAIN), (FLOAT8, BLOCKS), (FLOAT8, PLAIN), *((rank, PLAIN) for rank in RANKS))


def follow_ups() -> dict[str, dict[str, Row]]:
    found = by_name(read_rows(FOLLOW_UPS))
    assert {row.rounds for own in found.values() for row in own.values()} == {6}
    return found


def percent(share: float | None) -> str:
    assert share is not None
    return f"{share:.1%}".replace("%", " %")


def with_interval(one: Any, digits: int = 3) -> str:
    return f"{one.value:.{digits}f} ({one.low:.{digits}f} to {one.high:.{digits}f})"


def test_the_table_of_the_follow_ups_speeds_holds_the_rows_and_verdicts() -> None:
    judged = {(one.verdict.setting, one.verdict.backend): one.verdict for one in step_speeds(read_rows(FOLLOW_UPS))}
    expected = []
    for name, row in follow_ups().items():
        cells = [name, *(f"{row[loss].step_ms:.1f}" for loss in ("compiled", "cce_kahan"))]
        cells += [answer_of(judged[name, "cce_kahan"]), with_interval(judged[name, AGAIN])]
        expected.append([*cells, f"{host_share(row['compiled']):.0%}".replace("%", " %")])
    assert sorted(table_of("h7_follow_ups.md", "H100, 8 x 2048 tokens, step")) == sorted(expected)


def test_the_table_of_the_follow_ups_shares_holds_the_rows() -> None:
    attainable = {
        one.verdict.setting: one.attainable
        for one in step_speeds(read_rows(FOLLOW_UPS))
        if one.verdict.backend == "cce_kahan"
    }
    expected = []
    for name, row in follow_ups().items():
        both = [row[loss] for loss in ("compiled", "cce_kahan")]
        cells = [name, *(f"{one.loss_layer_ms:.1f}" for one in both), *(percent(one.loss_layer_share) for one in both)]
        expected.append([*cells, f"{attainable[name]:.3f}", *(f"{one.peak_gib:.2f}" for one in both)])
    assert sorted(table_of("h7_follow_ups.md", "H100, loss layer")) == sorted(expected)


def test_the_table_of_the_follow_ups_models_compares_their_rounds() -> None:
    found, expected = follow_ups(), []
    for model in ("GLA", "Transformer"):
        for pair in COMPARED:
            name, other = (text.format(model) for text in pair)
            cells = [name, other]
            for loss in ("compiled", "cce_kahan"):
                cells.append(with_interval(ratio_of_means(found[name][loss].wall_ms, found[other][loss].wall_ms)))
            gains = [
                [base / own for own, base in zip(row["cce_kahan"].wall_ms, row["compiled"].wall_ms, strict=True)]
                for row in (found[name], found[other])
            ]
            one = ratio_of_means(*gains)
            assert one.low is not None
            assert one.high is not None
            word = {False: "missed", True: "met", None: "undecided"}[answer(one.low, one.high, AT_LEAST, 1.0)]
            expected.append([*cells, f"**{word}**: {with_interval(one)}"])
    assert table_of("h7_follow_ups.md", "model line") == expected


def test_the_follow_ups_sentences_hold_the_rows() -> None:
    """The page's figures outside its tables, and those of the pages that link to it."""
    found = follow_ups()
    pages = {
        name: " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())
        for name in ("study/h7_follow_ups.md", "study/index.md", "study/h1b_step_speed.md", "models.md", "training.md")
    }
    page = pages["study/h7_follow_ups.md"]
    gains = {name: cells for name, other, *cells in table_of("h7_follow_ups.md", "model line") if "compile" in other}
    gain = gains["Transformer 1b3, compile=blocks, float8=blocks"][2].partition(": ")[2]
    assert f"our gain with float8 is {gain} of the gain without it." in page
    low = float(gain.split()[1].lstrip("("))
    assert f"**Both gains multiply within {1 - low:.1%}**".replace("%", " %") in page

    shared = [own["cce_kahan"].loss_layer_share for name, own in found.items() if "shared" in name]
    low, high = (f"{100 * end(shared):.1f}" for end in (min, max))
    assert f"Our loss layer still takes {low} to {high} % of a step. What the other " in page
    rest = [f"{100 * (1 - share):.0f}" for share in (max(shared), min(shared))]
    assert f"What the other {rest[0]} to {rest[1]} % are was not profiled." in page
    least = min(1 - (own[loss].loss_layer_share or 0) for own in found.values() for loss in ("compiled", "cce_kahan"))
    assert f"**In every line the rest takes {int(100 * least)} % of a step or more**" in page
    fewer = [
        1 - found[rank.format(model)]["compiled"].parameters / found[PLAIN.format(model)]["compiled"].parameters
        for model in ("GLA", "Transformer")
        for rank in RANKS
    ]
    assert f"These models have {100 * min(fewer):.1f} to {100 * max(fewer):.1f} % fewer parameters" in page
    ms = {name: f"{own['compiled'].step_ms:.1f}" for name, own in found.items()}
    shares = {name: percent(own["compiled"].loss_layer_share) for name, own in found.items()}
    for model in ("GLA", "Transformer"):
        blocks, float8 = BLOCKS.format(model), FLOAT8.format(model)
        assert (
            f"A step goes from {ms[blocks]} to {ms[float8]} ms, both with compiled blocks and the compiled loss."
            in page
        )
        assert f"{ms[blocks]} to {ms[float8]} ms" in pages["training.md"]
    plain, blocks, float8 = (name.format("Transformer") for name in (PLAIN, BLOCKS, FLOAT8))
    rise = f"from {shares[plain]} in bf16 to {shares[blocks]} with compiled blocks and {shares[float8]} with float8."
    assert rise in page
    assert f"**GLA's share falls** from {shares[PLAIN.format('GLA')]} to {shares[FLOAT8.format('GLA')]} with" in page
    assert f"takes {shares[plain]} of the Transformer's step in bf16 and {shares[float8]} with" in pages["training.md"]
    hosts = [f"{host_share(found[text.format('GLA')]['compiled']):.0%}" for text in (FLOAT8, BLOCKS)]
    words = f"kernels for {hosts[0]} of the time, instead of {hosts[1]} without float8."
    assert words.replace("%", " %") in page
    rounds = found[FLOAT8.format("GLA")]["cce_kahan"].wall_ms
    assert f"takes {max(rounds) / min(rounds):.2f} times as long as the fastest." in page
    twice = [abs((own["compiled"].loss_layer_ms or 0) - (own[AGAIN].loss_layer_ms or 0)) for own in found.values()]
    assert f"Compiled built twice differs by up to {max(twice):.1f} ms." in page

    shorter = [
        1 - ratio_of_means(found[rank.format(model)][loss].wall_ms, found[PLAIN.format(model)][loss].wall_ms).value
        for model in ("GLA", "Transformer")
        for rank in RANKS
        for loss in ("compiled", "cce_kahan")
    ]
    low, high = (f"{100 * end(shorter):.1f}" for end in (min, max))
    assert f"**Shared projections shorten a step** by {low} to {high} % for both models." in page
    assert f"{low} to {high} % shorter" in pages["models.md"]

    judged = {one.verdict.setting: one for one in step_speeds(read_rows(FOLLOW_UPS)) if one.row.loss == "cce_kahan"}
    above = [name for name, one in judged.items() if (one.verdict.low or 0) > 1]
    assert len(above) == 5
    assert not [name for name in above if "float8" in name]
    assert {one.verdict.verdict for one in judged.values()} == {"missed"}
    most = max(judged[name].verdict.value or 0 for name in above) - 1
    assert f"so ours is faster there, by up to {100 * most:.1f} % in the median." in page
    attainable = [f"{judged[name].attainable:.3f} times" for name in (plain, float8)]
    assert f"step {attainable[0]} as fast in bf16, and {attainable[1]} with float8." in page
    controls = [one.verdict for one in step_speeds(read_rows(FOLLOW_UPS)) if one.row.loss == AGAIN]
    medians = [v.value for v in controls if v.value is not None]
    assert f"The control's medians lie at {min(medians):.3f} to {max(medians):.3f}, about" in page
    beside = {v.setting for v in controls if v.low is not None and v.high is not None and not v.low <= 1 <= v.high}
    assert beside == {BLOCKS.format("GLA"), RANKS[0].format("Transformer")}
    with_float8, with_blocks = (judged[name].verdict for name in (float8, blocks))
    assert f"with float8 {with_interval(with_float8)}, without {with_interval(with_blocks)}" in pages["study/index.md"]
    for model in ("GLA", "Transformer"):
        again = judged[PLAIN.format(model)].verdict
        assert with_interval(again) in pages["study/h1b_step_speed.md"].partition("Measured again")[2]
    old = by_name(read_rows(STEPS))
    gla, transformer = (
        [f"{rows[PLAIN.format(model)]['compiled'].step_ms:.1f}" for rows in (old, found)]
        for model in ("GLA", "Transformer")
    )
    assert f"with compiled took {gla[0]} ms then and {gla[1]} ms now." in page
    assert f"The Transformer's took {transformer[0]} and {transformer[1]} ms." in page
    for text, word in ((PLAIN, "in bf16"), (FLOAT8, "with float8")):
        row = found[text.format("GLA")]["compiled"]
        assert re.search(rf"{row.loss_nats:.3f}( nats for GLA)? {word}", page)
        assert f"{row.gradient_norm:.0f} {word}" in page
    norms = [f"{found[text.format('Transformer')]['compiled'].gradient_norm:.1f}" for text in (PLAIN, FLOAT8)]
    assert f"The Transformer's norms are {norms[0]} and {norms[1]}." in page


def test_the_follow_ups_losses_hold_the_rows() -> None:
    def cell(v: Verdict) -> str:
        return f"**{v.verdict}**: {v.value:+.4f} ({v.low:+.4f} to {v.high:+.4f})"

    def in_words(model: str) -> str:
        name, _, rest = model.replace(", ", " ").partition(" ")
        return ", ".join(filter(None, [{"gla": "GLA", "transformer": "Transformer"}[name], rest]))

    runs = read_committed(ROOT / "results" / "summaries" / "follow_ups")
    assert len(runs) == 92
    changes = {(v.model, v.backend, v.criterion): v for v in changes_of_loss(runs)}
    expected = [
        [in_words(model), f"`{loss}`", str(v.n), cell(v), cell(changes[model, loss, VALID_LOSS])]
        for (model, loss, criterion), v in changes.items()
        if criterion == FINAL_LOSS
    ]
    assert sorted(table_of("h7_follow_ups.md", "10 M parameters: change")) == sorted(expected)
    judged = {
        (v.model, v.setting, v.criterion): v
        for v in verdicts(runs)
        if v.against == "compiled" and v.value is not None and v.criterion in (MVE_LOSS, VALID_LOSS)
    }
    expected = []
    for (model, setting, criterion), v in judged.items():
        if criterion == MVE_LOSS:
            name = ", ".join(filter(None, [in_words(model), setting]))
            expected.append([name, str(v.n), cell(v), cell(judged[model, setting, VALID_LOSS])])
    assert sorted(table_of("h7_follow_ups.md", "10 M parameters: `cce_kahan` against compiled")) == sorted(expected)
    assert len(expected) == 8
    undecided = Counter(criterion for (*_, criterion), v in judged.items() if v.verdict == "undecided")
    assert (undecided[MVE_LOSS], undecided[VALID_LOSS]) == (4, 5)


def test_the_table_of_gla_with_shared_graphs_holds_the_rows() -> None:
    shared = by_name(read_rows(steps("_gla_graphs")))
    expected = []
    for name, own in shared.items():
        before, now = follow_ups()[name]["compiled"], own["compiled"]
        times, peaks = ([getattr(row, key) for row in (before, now)] for key in ("step_ms", "peak_gib"))
        cells = [name, *(f"{one:.1f}" for one in times), *(f"{one:.2f}" for one in peaks)]
        expected.append([*cells, f"{host_share(now):.0%}".replace("%", " %")])
    assert table_of("h7_follow_ups.md", "GLA, step with compiled") == expected
    page = " ".join((ROOT / "docs" / "study" / "h7_follow_ups.md").read_text(encoding="utf-8").split())
    plain, blocks, float8 = (shared[name.format("GLA")]["compiled"] for name in (PLAIN, BLOCKS, FLOAT8))
    assert f"takes {with_interval(ratio_of_means(float8.wall_ms, blocks.wall_ms))} of that in bf16" in page
    judged = {(v.verdict.setting, v.row.loss): v.verdict for v in step_speeds(read_rows(steps("_gla_graphs")))}
    ours = [judged[name, "cce_kahan"] for name in shared]
    assert {v.verdict for v in ours} == {"missed"}
    assert all(with_interval(v) in page for v in ours)
    assert all(v.low is not None and v.high is not None and v.low <= 1 <= v.high for v in ours)
    assert f"has a ratio of {with_interval(judged[FLOAT8.format('GLA'), AGAIN])} there" in page
    training = " ".join((ROOT / "docs" / "training.md").read_text(encoding="utf-8").split())
    assert f"takes {float8.step_ms:.1f} ms with float8 and {blocks.step_ms:.1f} ms without" in training
    assert f"takes {blocks.step_ms:.1f} ms a step with compiled blocks and {plain.step_ms:.1f} ms without" in training


def test_the_default_beside_one_chunk_is_told_with_its_rows() -> None:
    page = (ROOT / "docs" / "kernel_figures.md").read_text(encoding="utf-8")
    table = page.split("| H100, N x D x V | default | one chunk |")[1].split("\n\n")[0].splitlines()[2:]
    expected = []
    for path in (H100.parent / f"{H100.name}_one_chunk").glob("*.json"):
        default, one = (
            next(row for row in loss_rows(path) if (row.backend, row.workspace_mib) == ("cce_kahan", size))
            for size in (None, 8192)
        )
        assert default.rounds == one.rounds == 16
        ratios = np.array(default.rounds_ms) / np.array(one.rounds_ms)
        low, high = interval_of_median(ratios, seed=0)
        word = "met" if high <= 1.05 else "missed" if low > 1.05 else "undecided"
        cells = [f"{row.ratio_to_compiled:.3f}, {row.extra_mib:,.0f}" for row in (default, one)]
        shape = f"{default.n:,} x {default.d:,} x {default.v:,}"
        expected.append([shape, *cells, f"**{word}**: {np.median(ratios):.3f} ({low:.3f} to {high:.3f})"])
    assert sorted(line.strip("| ").split(" | ") for line in table) == sorted(expected)
    [[_, _, one, _]] = [row for row in expected if row[0] == "16,384 x 2,048 x 32,768"]
    grids = {
        path.stem: by_backend(json.loads(path.read_text(encoding="utf-8")), "grid") for path in H100.glob("*.json")
    }
    ours = {name: grid.get(("peaked", "cce_kahan", None)) for name, grid in grids.items()}
    ratios = {name: row["ratio_to_compiled"] for name, row in ours.items() if row}
    ratios["16384x2048x32768"] = float(one.split(",")[0])
    assert f"with peaked logits would be {np.median(list(ratios.values())):.3f}." in page


def test_the_filter_on_the_h100_s_trained_logits_is_told_with_its_rows() -> None:
    [path] = H100.glob("pilot-gla-350m-*.json")
    rows = {(row.backend, row.workspace_mib): row for row in loss_rows(path)}
    sampled, exact = rows["cce_filter filter_if_faster=false", None], rows["cce_kahan", None]
    pages = {
        name: " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())
        for name in ("kernel_filter.md", "study/h3_filter.md")
    }
    for row in (sampled, exact):
        words = f"{row.ratio_to_compiled:.3f} ({row.ratio_to_compiled_low:.3f} to {row.ratio_to_compiled_high:.3f})"
        assert words in pages["kernel_filter.md"]
    of_exact = np.median(np.array(sampled.rounds_ms) / np.array(exact.rounds_ms))
    assert f"takes {of_exact:.2f} of the exact loss's time" in pages["kernel_filter.md"]
    errors = f"{sampled.de_err:.2e}, {sampled.dc_err:.1e}".replace("e-0", "e-")
    assert "dE errs by {} and dC by {}".format(*errors.split(", ")) in pages["kernel_filter.md"]
    assert "{} and {}".format(*errors.split(", ")) in pages["study/h3_filter.md"]
    plain = rows["cce_filter filter_if_faster=false filter_unbiased=false", None]
    for row in (plain, rows["cce_apple", None]):
        assert f"by {row.de_err:.2f}" in pages["study/h3_filter.md"]
        assert f"{row.dc_err:.2f}" in pages["study/h3_filter.md"]


def test_the_medians_of_25_shapes_are_told_with_their_intervals() -> None:
    """Each shape's rounds are drawn anew, and the median over the shapes is taken of their medians."""
    draw, told = np.random.default_rng(0), []
    for gpu in (H100, H100.parent / "nvidia_h200"):
        for logits in ("peaked", "flat"):
            ratios = []
            for path in sorted(gpu.glob("*.json")):
                own = by_backend(json.loads(path.read_text(encoding="utf-8")), "grid")
                if (ours := own.get((logits, "cce_kahan", None))) is not None:
                    times = (np.array(row["rounds_ms"]) for row in (ours, own[logits, "compiled", None]))
                    ratios.append(np.divide(*times))
            assert len(ratios) == 25
            redrawn = [np.median(draw.choice(ratio, (4000, len(ratio))), axis=1) for ratio in ratios]
            low, high = np.quantile(np.median(redrawn, axis=0), (0.025, 0.975))
            told.append((np.median([np.median(ratio) for ratio in ratios]), low, high))
    page = " ".join((ROOT / "docs" / "kernel_figures.md").read_text(encoding="utf-8").split())
    for value, low, high in told:
        assert low < 0.92 < high, "undecided"
        assert f"{value:.3f} ({low:.2f} to {high:.2f})" in page
