"""The figures of the loss layer alone: docs/kernel_figures.md and what the README says of them."""

import json
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks import ROOT
from figures import FIRST_SCREEN, H100, MEASURED, interval, linked

from linrnn.bench.loss.rows import read_rows as loss_rows
from linrnn.runs.intervals import interval_of_median

SHAPES = {
    "8192 x 2304 x 256000": "gemma2_2b",
    "16384 x 2048 x 128256": "llama_1b3",
    "16384 x 256 x 32000": "mve",
    "32768 x 1024 x 32000": "lm_350m",
}
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


def error(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def time_and_memory(row: dict[str, Any], with_error: bool) -> str:
    shown = f"{row['ratio_to_compiled']:.2f}, {row['extra_mib']:,.0f}"
    return f"{shown}, {error(row['dc_err'])}" if with_error else shown


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
    kernels = " ".join((ROOT / "docs" / "kernels.md").read_text(encoding="utf-8").split())
    assert f"With peaked logits on an H100, as in the README, it takes at most {slowest[0]:.2f}." in kernels
    tokens, dimensions, entries = (found[largest][size] for size in "ndv")
    shape = f"{tokens} tokens x {dimensions} dimensions x {entries} entries"
    assert f"The largest ratio of memory is {largest[1]:.2f}, on {shape}." in FIRST_SCREEN


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
        (
            ("4096x7168x129280", "4096x8192x128256"),
            "| 4096 x 7168 x 129280, 4096 x 8192 x 128256 | {} to {} | {} to {} |",
        ),
        (("3001x2880x201088",), "| 3001 x 2880 x 201088 | {} to {} | {} to {} |"),
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
    assert len(times) == 9
    ends = "{} to {} | {} to {} |"
    assert f"| H200, the nine above | {ends.format(*shares, *floors)}" in text
    times = host_times(H100 / "profile.jsonl")
    shares, floors = host_shares(times)
    assert len(times) == 10
    assert re.search(rf"\| H100, ten \(.*\) \| {re.escape(ends.format(*shares, *floors))}", text)


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
