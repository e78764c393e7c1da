"""The figures of docs/study/h1a_larger_batches.md."""

import json
import re
from typing import Any

from blocks import ROOT
from figures import index_lines, table_of

from linrnn.study.results import read_committed

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
