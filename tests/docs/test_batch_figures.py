"""The figures of docs/study/h1a_larger_batches.md."""

import itertools
import json
import re

from blocks import ROOT
from figures import index_rows, span, table_of

from linrnn.study.benchmarks.largest_batch import SEARCHES, Search, batch_verdicts, searches_on_the_h100
from linrnn.study.criteria import Verdict

# The study's tables of largest batches on an H100: columns, and the folders of the searches.
SEARCHED = {"eager": "standard", "compiled": "compiled", "Liger": "liger", "`cce_kahan`": "cce_kahan"}
LINES = {"GLA": "gla", "KDA": "kda", "Gated DeltaNet": "gated_deltanet", "Transformer": "transformer"}


def of_line(name: str) -> tuple[str, str]:
    model, _, checkpointing = name.partition(", ")
    return LINES[model], checkpointing.removesuffix(" checkpointing") or "none"


def in_words(search: Search | None) -> str:
    """The cell of a search: its answer, or what an unfinished one has found."""
    if search is None:
        return "not measured"
    return f"{search.batch}" if search.exact else f"{search.batch} to {(search.too_large or 0) - 1}"


def speed_of(search: Search | None) -> float | None:
    if search is None or not search.exact:
        return None
    return float(search.probes[search.batch]["tokens_per_second"])


def test_the_tables_of_largest_batches_on_the_h100_hold_its_rows() -> None:
    found, lines = searches_on_the_h100(ROOT / "results"), set()
    page, names = "h1a_larger_batches.md", list(SEARCHED)
    for name, *cells, _ in table_of(page, "1.3B, T = 2048, V = 128,256: sequences on an H100"):
        lines.add(of_line(name))
        for loss, cell in zip(names, cells, strict=True):
            assert cell == in_words(found.get((*of_line(name), SEARCHED[loss]))), (name, loss)
    assert lines == {key[:2] for key in found}
    speeds_table = table_of(page, "tokens/s at these batches, n = 1")
    assert [name for name, *_ in speeds_table] == [
        name for name, *_ in table_of(page, "1.3B, T = 2048, V = 128,256: sequences on an H100")
    ]
    for name, *cells in speeds_table:
        speeds = {loss: speed_of(found.get((*of_line(name), loss))) for loss in SEARCHED.values()}
        shown = ["not measured" if speed is None else f"{speed:,.0f}" for speed in speeds.values()]
        ours, compiled = speeds["cce_kahan"], speeds["compiled"]
        assert ours
        assert compiled
        assert cells == [*shown, f"{ours / compiled:.3f}"], name


def test_the_verdicts_on_largest_batches_are_those_of_the_searches() -> None:
    baselines = {"torch.compile": "compiled", "eager": "standard"}
    ratios: dict[tuple[str, str], dict[str, Verdict]] = {}
    for (model, checkpointing, _), verdict in batch_verdicts(searches_on_the_h100(ROOT / "results")):
        ratios.setdefault((str(verdict.against), checkpointing), {})[model] = verdict
    for base, *cells in table_of("h1a_larger_batches.md", "against"):
        for checkpointing, cell in zip(("none", "selective", "full"), cells, strict=True):
            words: dict[str, tuple[str, str]] = {}
            for part in cell.split("; "):
                [(answer, rest)] = re.findall(r"\*\*(\w+)\*\*(.*)", part) or [("", "")]
                words |= {LINES[model]: (answer, ratio) for ratio, model in re.findall(r"(\d\.\d\d) \(([^)]+)\)", rest)}
            own = ratios[baselines[base], checkpointing]
            assert words == {model: (v.verdict, f"{v.value:.2f}") for model, v in own.items()}
    index = index_rows("Larger batches")
    of_index = {(setting, against): (asked, told, answer) for setting, against, asked, told, answer, _ in index}
    deltanet, others = "Gated DeltaNet, without checkpointing", "the three others, without checkpointing"
    plain = dict(ratios["standard", "none"])
    for setting, against, some in (
        ("without checkpointing", "torch.compile", ratios["compiled", "none"]),
        ("selective checkpointing", "torch.compile", ratios["compiled", "selective"]),
        ("full checkpointing", "torch.compile", ratios["compiled", "full"]),
        ("selective checkpointing", "eager", ratios["standard", "selective"]),
        ("full checkpointing", "eager", ratios["standard", "full"]),
        (deltanet, "eager", {"gated_deltanet": plain.pop("gated_deltanet")}),
        (others, "eager", plain),
    ):
        [answer] = {verdict.verdict for verdict in some.values()}
        assert of_index[setting, against] == ("1.5", width(some), f"**{answer}**")
    found = searches_on_the_h100(ROOT / "results")
    speeds = [(speed_of(found[*key, "cce_kahan"]), speed_of(found[*key, "compiled"])) for key in {k[:2] for k in found}]
    of_compiled = [ours / base for ours, base in speeds if ours and base]
    assert len(of_compiled) == 12
    at_batches = "tokens/s at these batches, twelve rows, three on a throttled GPU", "torch.compile"
    assert of_index[at_batches] == ("1.15", span(of_compiled), "**undecided**")
    gains = index_rows("Linear RNN or Transformer")
    page = " ".join((ROOT / "docs/study/h4_linear_rnn_or_transformer.md").read_text(encoding="utf-8").split())
    names = {model: name for name, model in LINES.items()}
    words = {"none": "without checkpointing", "selective": "selective checkpointing", "full": "full checkpointing"}
    answers = []
    for (against, base), (checkpointing, name) in itertools.product(baselines.items(), words.items()):
        values = {model: verdict.value or 0 for model, verdict in ratios[base, checkpointing].items()}
        transformer = values.pop("transformer")
        assert f"Transformer {transformer:.2f}" in page
        for answer, own in (
            ("missed", {model: value for model, value in values.items() if value <= transformer}),
            ("met", {model: value for model, value in values.items() if value > transformer}),
        ):
            told = [f"{names[model]} {value:.2f}" for model, value in sorted(own.items(), key=lambda one: one[1])]
            assert all(one in page for one in told)
            cells = against, ", ".join(told), f"{transformer:.2f}", f"**{answer}**", "1"
            assert not told or [f"larger batches, {name}", *cells] in gains
            answers += [answer] * len(own)
    assert (answers.count("missed"), answers.count("met")) == (17, 1)
    assert "missed for 17 of 18 largest batches" in page
    ours, compiled = (found["gated_deltanet", "selective", loss] for loss in ("cce_kahan", "compiled"))
    assert compiled.too_large == 20
    assert f"With 20 the ratio would be {ours.batch / 20:.2f}." in page


def test_what_liger_fits_is_what_both_pages_say() -> None:
    found = searches_on_the_h100(ROOT / "results")
    rows = {key[:2] for key in found}
    both = {row: tuple(found[*row, loss].batch for loss in ("liger", "cce_kahan")) for row in rows}
    unequal = {row: pair for row, pair in both.items() if pair[0] != pair[1]}
    assert (len(rows), unequal) == (12, {("gated_deltanet", "none"): (11, 10), ("transformer", "selective"): (22, 23)})
    liger_page = " ".join((ROOT / "docs/study/h6_liger.md").read_text(encoding="utf-8").split())
    assert "Liger fits 11 of Gated DeltaNet without checkpointing, and ours 10" in liger_page
    assert "Liger fits 22 of the Transformer with selective checkpointing, and ours 23" in liger_page
    page = " ".join((ROOT / "docs/study/h1a_larger_batches.md").read_text(encoding="utf-8").split())
    assert "fits as many sequences as `cce_kahan`** in ten of the twelve rows" in page
    peaks = [found["transformer", "selective", loss].probes[23]["peak_memory_bytes"] for loss in ("liger", "cce_kahan")]
    assert {f"{peak / 2**30:.2f}" for peak in peaks} == {"77.35"}
    assert "Both losses peak at 77.35 GiB at 23 sequences" in page
    for model in LINES.values():
        full = [found[model, "full", loss].answer()["peak_memory_bytes"] / 2**30 for loss in ("liger", "cce_kahan")]
        assert f"{full[0]:.2f}" == f"{full[1]:.2f}", model
        if model == "gated_deltanet":
            assert f"because the blocks decide: {full[0]:.2f} GiB at 84 sequences of Gated DeltaNet" in page
    speeds = {row: [speed_of(found[*row, loss]) for loss in ("liger", "cce_kahan")] for row in rows}
    ahead = [theirs / ours - 1 for theirs, ours in speeds.values() if theirs and ours and theirs > ours]
    assert all(theirs and ours for theirs, ours in speeds.values())
    assert len(ahead) == 7
    ends = f"{100 * min(ahead):.1f} to {100 * max(ahead):.1f} %"
    assert f"Liger's tokens/s lie above ours in seven of the twelve rows, by {ends}, and below in five." in liger_page
    told = ["tokens/s at the largest batches, twelve rows", "`cce_kahan`", "above in seven", "-", "**undecided**", "1"]
    assert told in index_rows("Liger")
    row = found["gated_deltanet", "none", "cce_kahan"].probes[10]
    share = max(row["memory_bytes"][name] for name in ("loss_forward", "loss_backward")) / row["peak_memory_bytes"]
    share_page = (ROOT / "docs/study/h2_loss_memory.md").read_text(encoding="utf-8")
    assert f"Gated DeltaNet: {share:.1%} at 10".replace("%", " %") in share_page


def width(found: dict[str, Verdict]) -> str:
    return span([verdict.value or 0 for verdict in found.values()], digits=2)


def test_the_forecasts_that_were_too_high_are_those_of_the_h100_s_searches() -> None:
    expected, short, fits = {}, {}, 0
    names = {loss: name for name, loss in SEARCHED.items()}
    models = {model: name for name, model in LINES.items()}
    found = searches_on_the_h100(ROOT / "results")
    for folder in SEARCHES[1:]:
        for search in json.loads((ROOT / "results" / "summaries" / folder / "max_batches.json").read_text()):
            if not search["exact"] or search["foreseen"] == search["batch"]:
                continue
            key = search["model"], search["activation_checkpointing"], search["loss"]
            [foreseen] = [p["foreseen_bytes"] for p in search["probes"] if p["batch"] == search["foreseen"]]
            message = str(found[key].probes[search["foreseen"]])
            asked, held, unused = (
                float(number) / (1024 if unit == "MiB" else 1)
                for pattern in (r"allocate {}", r"allocated memory {} is", r"and {} is reserved")
                for number, unit in [re.search(pattern.format(r"([\d.]+) (\wiB)"), message).groups()]
            )
            name = f"{models[key[0]]}, {names[key[2]]}" + f", {key[1]} checkpointing" * (key[1] != "none")
            sizes = foreseen / 2**30, held + asked, held + unused + asked
            expected[name] = [str(search["foreseen"]), str(search["batch"]), *(f"{size:.2f}" for size in sizes)]
            short[name] = sizes[1] - sizes[0]
            assert sizes[0] <= 78 < sizes[2]
            fits += sizes[1] < 78
    assert {name: cells for name, *cells in table_of("h1a_larger_batches.md", "H100, 78 GiB")} == expected
    page = " ".join((ROOT / "docs/study/h1a_larger_batches.md").read_text(encoding="utf-8").split())
    assert (len(expected), fits) == (10, 8)
    assert "In eight of the ten searches the allocated tensors alone would fit into 78 GiB" in page
    most = sorted(short, key=lambda name: short[name])[-2:]
    assert {name.replace("`cce_kahan`", "Liger") for name in most} == {"Gated DeltaNet, Liger, full checkpointing"}
    assert all(f"the formulas fall short by {short[name]:.2f} GiB" in page for name in most)
