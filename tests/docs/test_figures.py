"""The README's figures equal those of committed rows."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from blocks import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
# Findings wrap; figures do not.
FINDINGS = [
    " ".join(text.split()) for text in re.split(r"^\* \*\*", README.split("## Install")[0], flags=re.MULTILINE)[1:]
]


def rows(finding: str, name: str, label: str) -> Any:
    """The file `name` next to a report that a finding links to."""
    [page] = re.findall(rf"\[{label}\]\((results/[\w/.]+\.md)\)", finding)
    return json.loads((ROOT / page).parent.joinpath(name).read_text(encoding="utf-8"))


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


def test_the_loss_layer_s_time_and_memory() -> None:
    share = r"takes ([\d.]+) to ([\d.]+) of torch.compile's time and ([\d.]+) to ([\d.]+) of its memory"
    stated = list(map(float, re.findall(share, FINDINGS[0])[0]))
    stated += list(map(float, re.findall(r"`workspace_mib=128` it takes ([\d.]+) to ([\d.]+) of", FINDINGS[0])[0]))
    [rounds] = map(int, re.findall(r"medians of (\d+) rounds on four shapes", FINDINGS[0]))
    stated += list(map(float, re.findall(r"its default errs (\d) to (\d) times", FINDINGS[0])[0]))
    time, memory, small, errors, below = [], [], [], [], []
    for shape in SHAPES.values():
        found = by_backend(rows(FINDINGS[0], f"{shape}.json", "H100"))
        for logits in ("flat", "peaked"):
            compiled, ours, little = (
                found[logits, *row] for row in (("compiled", None), ("cce_kahan", None), ("cce_kahan", 128))
            )
            assert ours["rounds"] == little["rounds"] == rounds
            below.append(ours["ratio_to_compiled_high"] < 1)
            time.append(ours["ratio_to_compiled"])
            memory.append(ours["extra_mib"] / compiled["extra_mib"])
            small.append(little["ratio_to_compiled"])
            errors.append(round(found[logits, "liger", None]["dc_err_ratio"]))
            for options in ("", " accumulate=fp32"):
                liger = found[logits, f"liger{options}", None]
                assert liger["extra_mib"] < ours["extra_mib"], "Liger needs less memory"
                assert liger["ratio_to_compiled_low"] > 1, "and more time"
    assert [round(end(figures), 2) for figures in (time, memory, small, errors) for end in (min, max)] == stated
    [intervals] = re.findall(r"(\d+) of the (\d+) intervals \(95 %\) lie below 1", FINDINGS[0])
    assert [sum(below), len(below)] == list(map(int, intervals))


def test_the_median_and_the_slowest_of_all_shapes() -> None:
    said = re.findall(
        r"On (\d+) shapes, .*? the median is ([\d.]+) and the slowest takes ([\d.]+)", " ".join(FINDINGS[0].split())
    )
    directory = ROOT / "results" / "bench_loss" / "nvidia_h100_80gb_hbm3"
    files = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in directory.glob("*.json")}
    found = {name: by_backend(file, "grid")["peaked", "cce_kahan", None] for name, file in files.items()}
    ratios = [row["ratio_to_compiled"] for row in found.values()]
    again = [found[name]["ratio_to_compiled"] for name in SHAPES.values()]
    [stated] = re.findall(r"Today's kernels took ([\d.]+) to ([\d.]+) on them", FINDINGS[0])
    assert (f"{min(again):.2f}", f"{max(again):.2f}") == stated
    assert [(str(len(ratios)), f"{statistics.median(ratios):.2f}", f"{max(ratios):.2f}")] == said


@pytest.mark.parametrize(
    ("page", "tables"), [("docs/kernels.md", 3), ("kernels/README.md", 1), ("docs/study/h6_liger.md", 1)]
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
    section = (ROOT / "docs/kernels.md").read_text(encoding="utf-8").split("### Ignored rows")[1].split("## ")[0]
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
    section = (ROOT / "docs/kernels.md").read_text(encoding="utf-8").split("### When cce_filter filters")[1]
    head, *lines = [line.strip("| ").split(" | ") for line in section.split("\n\n")[3].splitlines() if "--" not in line]
    assert len(lines) == 4
    for vocab, *cells in lines:
        for dim, cell in zip(head[1:], cells, strict=True):
            sizes = int(dim.removeprefix("D = ").replace(",", "")), int(vocab.replace(",", ""))
            kinds = torch.bfloat16, torch.bfloat16, torch.bfloat16, False, True, False
            found = [planner.plan(planner.Problem(n, *sizes, *kinds), 132, options).exact for n in numbers]
            filtered = [n for n, exact in zip(numbers, found, strict=True) if not exact]
            bounds = [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", cell)] or [2**30]
            assert filtered == [n for n in numbers if bounds[0] <= n <= (*bounds, 2**30)[1]], (vocab, dim, cell)


def error(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def interval(row: dict[str, Any]) -> str:
    ratio, low, high = (row[f"ratio_to_compiled{end}"] for end in ("", "_low", "_high"))
    return f"{ratio:.3f} ({low:.3f} to {high:.3f})"


def time_and_memory(row: dict[str, Any], with_error: bool) -> str:
    shown = f"{row['ratio_to_compiled']:.2f}, {row['extra_mib']:,.0f}"
    return f"{shown}, {error(row['dc_err'])}" if with_error else shown


@pytest.mark.parametrize(
    ("label", "checkpointing", "sentence"),
    [
        ("with checkpointing", "full", r"hold (\d+) sequences of GLA instead of torch.compile's (\d+)"),
        ("without", "none", r"one sequence, (\d+) instead of (\d+)"),
    ],
)
def test_the_largest_batches(label: str, checkpointing: str, sentence: str) -> None:
    answers = rows(FINDINGS[1], "max_batches.json", label)
    largest = {
        answer["loss"]: answer["batch"] for answer in answers if answer["activation_checkpointing"] == checkpointing
    }
    [stated] = re.findall(sentence, FINDINGS[1])
    assert (largest["cce_kahan"], largest["compiled"]) == tuple(map(int, stated))


def test_the_final_losses_of_the_mve() -> None:
    [bound] = map(float, re.findall(r"within ([\d.]+) nats", FINDINGS[2]))
    by_seed: dict[int, dict[str, float]] = {}
    for run in rows(FINDINGS[2], "runs.json", "rows")["runs"]:
        if run["loss_options"].get("accumulate") in (None, "kahan", "native"):
            by_seed.setdefault(run["seed"], {})[run["loss"]] = run["train_loss_nats"]
    assert [len(losses) for losses in by_seed.values()] == [4, 4, 4]
    assert all(max(losses.values()) - min(losses.values()) < bound for losses in by_seed.values())


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
