"""The figures of whole steps: docs/study/h1b_step_speed.md, h4 and h6."""

import re

import pytest
from blocks import ROOT
from figures import (
    FIRST_SCREEN,
    H100,
    STEPS,
    answer_of,
    by_name,
    index_rows,
    percent,
    span,
    steps,
    table_of,
    tokens_per_second,
    with_interval,
)

from linrnn.bench.loss.rows import read_rows as read_loss_rows
from linrnn.bench.records import read_runs
from linrnn.bench.steps.rows import AGAIN, read_rows
from linrnn.core.files import read_object
from linrnn.core.machine import GIB
from linrnn.costs.devices import peak_flops_per_second
from linrnn.runs.intervals import AT_LEAST, answer, estimate, ratio_of_means
from linrnn.study.benchmarks.line_ratios import line_ratios
from linrnn.study.benchmarks.step_speed import host_share, step_speeds
from linrnn.study.figures import BREAKDOWNS
from linrnn.study.results import read_committed


@pytest.mark.parametrize(
    ("folder", "page", "head", "rounds"),
    [
        ("", "h1b_step_speed.md", "H100, 8 x 2048 tokens a step", 8),
        ("_gated_deltanet", "h1b_step_speed.md", "H100, Triton 3.7.1, 8 x 2048 tokens a step", 6),
        ("_kda", "h1b_step_speed.md", "H100, KDA in a later process, 8 x 2048 tokens a step", 6),
        ("_262144", "h1b_step_speed.md", "H100, V = 262,144, 8 x 2048 tokens a step", 6),
        ("_350m_graphs", "h1b_step_speed.md", "H100, one CUDA graph a step, 8 x 2048 tokens", 8),
        ("_mve_graphs", "h1b_step_speed.md", "H100, MVE, one CUDA graph a step, 8 x 2048 tokens", 16),
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


# Later processes of 8 x 2048 tokens without checkpointing: the line's name, its model, and the folder of its rows.
LATER = (
    ("Gated DeltaNet 1b3, model.chunk_size=64", "Gated DeltaNet 1b3", "_chunks"),
    ("KDA 1b3, model.chunk_size=64", "KDA 1b3", "_chunks"),
    ("GLA 1b3", "GLA 1b3", "_followups"),
    ("GLA 1b3", "GLA 1b3", "_gla_graphs"),
    ("GLA 1b3, model.chunk_size=64", "GLA 1b3", "_chunks"),
    ("GLA 1b3, 8 x 2,048", "GLA 1b3", "_lengths"),
    ("Transformer 1b3", "Transformer 1b3", "_followups"),
    ("Transformer 1b3, 8 x 2,048", "Transformer 1b3", "_lengths"),
)


def test_the_later_processes_of_a_setting_are_all_told() -> None:
    expected, values = [], []
    for line, model, folder in LATER:
        found = read_rows(steps(folder))
        judged = {(one.verdict.setting, one.row.loss, one.verdict.against): one for one in step_speeds(found)}
        ours = judged[line, "cce_kahan", "compiled"]
        assert (ours.row.batch, ours.row.seq, ours.verdict.n) == (8, 2048, 6)
        values.append(ours.verdict.value or 0)
        [commit] = {
            run["environment"]["git"]["commit"][:7]
            for name, run in read_runs(steps(folder)).items()
            if name == ours.row.run
        }
        control = with_interval(judged[line, AGAIN, "compiled"].verdict)
        expected.append([model, answer_of(ours.verdict), control, commit])
    table = table_of("h1b_step_speed.md", "H100, later processes, 8 x 2048 tokens a step")
    assert [cells[:4] for cells in table] == expected
    assert [steps(folder).name in cells[4] for cells, (*_, folder) in zip(table, LATER, strict=True)] == [True] * 8
    ends = f"{min(values):.3f} to {max(values):.3f}"
    page = " ".join((ROOT / "docs/study/h1b_step_speed.md").read_text(encoding="utf-8").split())
    assert f"Eight [later processes](#measured-again) give {ends}." in page
    index = index_rows("Faster steps")
    assert ["the same in later processes", "torch.compile", "1.08", ends, "**missed**", "6"] in index
    without_graphs = [
        one.verdict
        for one in step_speeds(read_rows(STEPS))
        if "350m" in one.verdict.setting and (one.row.loss, one.verdict.against) == ("cce_kahan", "compiled")
    ]
    assert {verdict.verdict for verdict in without_graphs} == {"undecided"}
    points = [verdict.value or 0 for verdict in without_graphs]
    told = f"{min(points):.3f} to {max(points):.3f}"
    assert ["350M without CUDA graphs", "torch.compile", "1.08", told, "**undecided**", "8"] in index


def test_the_gains_of_later_processes_are_divided_by_the_transformer_s() -> None:
    gains = {
        (one.verdict.setting, one.verdict.against): one.ratios
        for folder in ("", "_gated_deltanet", "_kda", "_chunks")
        for one in step_speeds(read_rows(steps(folder)))
        if one.row.loss == "cce_kahan"
    }
    words, page = {False: "missed", True: "met", None: "undecided"}, "h4_linear_rnn_or_transformer.md"
    table = table_of(page, "T = 2048, gain of a later process divided by the Transformer's")
    plain, full = "{} 1b3", "{} 1b3, full checkpointing"
    deltanet, kda = "Gated DeltaNet", "KDA"
    chunks = "{} 1b3, model.chunk_size=64"
    told = [plain.format(deltanet), full.format(deltanet), plain.format(kda), chunks.format(deltanet)]
    assert [name for name, *_ in table] == [*told, chunks.format(kda)]
    for name, *cells in table:
        base = (full if name.endswith("checkpointing") else plain).format("Transformer")
        for against, cell in zip(("compiled", "standard"), cells, strict=True):
            if cell == "not measured":
                assert (name, against) not in gains
                continue
            one = ratio_of_means(gains[name, against], gains[base, against])
            assert one.low is not None
            assert one.high is not None
            assert cell == f"**{words[answer(one.low, one.high, AT_LEAST, 1.0)]}**: {with_interval(one)}"


def test_the_graphs_and_the_host_at_350m_are_told_with_their_rows() -> None:
    """The sentences around the tables of 350M, with and without CUDA graphs."""
    found = step_speeds(read_rows(steps("_350m_graphs")))
    ours = {(v.setting, v.against): v for one in found if (v := one.verdict).backend == "cce_kahan"}
    page = " ".join((ROOT / "docs/study/h1b_step_speed.md").read_text(encoding="utf-8").split())
    index = index_rows("Faster steps")
    compiled = [v.value for v in ours.values() if v.against == "compiled"]
    ends = f"{min(compiled):.3f} to {max(compiled):.3f}"
    assert f"missed against torch.compile**, {ends}." in page
    assert ["350M as CUDA graphs", "torch.compile", "1.08", ends, "**missed**", "8"] in index
    assert f"V = 32,000 to 262,144: speed | - | {ends} | ratio | 8 rounds |" in FIRST_SCREEN
    eager = [v for v in ours.values() if v.against == "standard"]
    met = [v.value for v in eager if v.verdict == "met"]
    assert f"on ({min(met):.3f} to {max(met):.3f})" in page
    assert {v.setting.split(", ")[1] for v in eager if v.verdict == "missed"} == {"V = 32,000"}
    missed = sorted(v.value for v in eager if v.verdict == "missed")
    assert "**missed** at 32,000 ({:.3f} and {:.3f})".format(*missed) in page
    for vocabularies, some, word in (("32,000", missed, "missed"), ("65,536 and 131,072", met, "met")):
        told = ["eager", "1.08", f"{min(some):.3f} to {max(some):.3f}", f"**{word}**", "8"]
        assert [f"350M as CUDA graphs, V = {vocabularies}", *told] in index
    assert {v.setting.split(", ")[1] for v in eager if v.verdict == "met"} == {"V = 65,536", "V = 131,072"}
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


def test_the_mve_as_cuda_graphs_is_told_with_its_rows() -> None:
    page = " ".join((ROOT / "docs/study/h1b_step_speed.md").read_text(encoding="utf-8").split())
    found = read_rows(steps("_mve_graphs"))
    ours = [one.verdict for one in step_speeds(found) if one.row.loss == "cce_kahan"]
    assert {(v.verdict, v.n) for v in ours} == {("met", 16)}
    ratios = {base: [v.value or 0 for v in ours if v.against == base] for base in ("compiled", "standard")}
    told = "met**, {:.3f} and {:.3f} against torch.compile, {:.3f} and {:.3f} against eager."
    assert told.format(*ratios["compiled"], *ratios["standard"]) in page
    index = index_rows("Faster steps")
    setting = "MVE as CUDA graphs, GLA and Transformer"
    assert [setting, "torch.compile", "1.08", span(ratios["compiled"]), "**met**", "16"] in index
    assert ["the same", "eager", "1.08", span(ratios["standard"]), "**met**", "16"] in index
    assert (
        f"of 10 M parameters as CUDA graphs: speed | - | {span(ratios['compiled'])} | ratio | 16 rounds |"
        in FIRST_SCREEN
    )
    rows = by_name(found)
    peaks = [
        [rows[f"{model} mve, cuda_graph=true"][loss].peak_gib for loss in ("standard", "compiled", "cce_kahan")]
        for model in ("GLA", "Transformer")
    ]
    assert "GLA: {:.2f} GiB with eager, {:.2f} with compiled and {:.2f} with ours.".format(*peaks[0]) in page
    assert "The Transformer: {:.2f}, {:.2f} and {:.2f}.".format(*peaks[1]) in page
    assert min(v.low or 0 for v in ours) > 0.95, "the MVE's criterion"
    layers = {
        row.backend: row.graph_ms
        for row in read_loss_rows(H100 / "mve.json")
        if (row.set, row.logits, row.workspace_mib) == ("grid", "flat", None)
    }
    shares = [
        sorted(100 * (layers[loss] or 0) / (own[loss].step_ms or 1) for own in rows.values())
        for loss in ("compiled", "cce_kahan")
    ]
    told = "{:.2f} ms with compiled and {:.2f} with ours".format(layers["compiled"], layers["cce_kahan"])
    ends = "{:.0f} and {:.0f} % of compiled's steps below, and {:.0f} and {:.0f} % of ours".format(
        *shares[0], *shares[1]
    )
    assert told in page
    assert ends in page


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
    page = " ".join((ROOT / "docs/study/h4_linear_rnn_or_transformer.md").read_text(encoding="utf-8").split())
    assert f"the step takes {with_interval(ratio_of_means(large, small))} of that with 64 (compiled" in page
    small, large = (chunks[f"KDA 1b3, model.chunk_size={size}"] for size in (32, 64))
    compiled, ours = (ratio_of_means(small[loss].wall_ms, large[loss].wall_ms) for loss in ("compiled", "cce_kahan"))
    assert (
        f"{with_interval(compiled)} of that with 64 with compiled, and {with_interval(ours)} with `cce_kahan`" in page
    )
    slowest = max(max(row.wall_ms) / row.step_ms for one in (small, large) for row in one.values())
    assert f"took up to {slowest:.2f} times the median" in page
    sizes = {size: chunks[f"Gated DeltaNet 1b3, model.chunk_size={size}"] for size in (16, 32, 64)}
    (compiled_32, compiled_16), (ours_32, ours_16) = (
        [with_interval(ratio_of_means(sizes[size][loss].wall_ms, sizes[64][loss].wall_ms)) for size in (32, 16)]
        for loss in ("compiled", "cce_kahan")
    )
    assert (
        f"With 32 the step takes {compiled_32} of that with 64, and with 16 it takes {compiled_16} (compiled)" in page
    )
    assert f"`cce_kahan` gives {ours_32} and {ours_16}." in page
    asked = {  # the smaller chunk's step takes at least 1.05 times that of the larger
        (model, smaller, larger, loss): answer(one.low or 0, one.high or 0, AT_LEAST, 1.05)
        for model, smaller, larger in (
            ("GLA", 64, 128),
            ("KDA", 32, 64),
            ("Gated DeltaNet", 32, 64),
            ("Gated DeltaNet", 16, 64),
        )
        for loss in ("compiled", "cce_kahan")
        for pair in [[chunks[f"{model} 1b3, model.chunk_size={size}"][loss].wall_ms for size in (smaller, larger)]]
        for one in [ratio_of_means(*pair)]
    }
    assert list(asked.values()) == [False, False, False, None, False, False, True, True]
    assert "**GLA, 128 tokens instead of 64: missed.**" in page
    assert "**KDA, 64 tokens instead of 32: missed** with compiled, **undecided** with `cce_kahan`." in page
    assert "**Gated DeltaNet, 64 tokens instead of 32: missed; instead of 16: met.**" in page


def test_the_mve_s_points_are_those_of_all_its_folders() -> None:
    page = " ".join((ROOT / "docs/study/h1b_step_speed.md").read_text(encoding="utf-8").split())

    def ratio(folder: str, model: str, batch: int, against: str) -> str:
        rows = [run.summary for run in read_committed(ROOT / "results" / "summaries" / folder)]
        speeds = {
            row["loss"]: row["tokens_per_second"]
            for row in rows
            if (row["model"], row["batch_size"]) == (model, batch)
            and (row.get("loss_options") or {}).get("accumulate", "kahan") == "kahan"
        }
        return f"{speeds['cce_kahan'] / speeds[against]:.3f}"

    for words, folder, batch in (("B = 32", "mve_batches", 32), ("B = 128", "mve_batches", 128)):
        both = [ratio(folder, "gla", batch, against) for against in ("compiled", "standard")]
        assert f"| MVE, {words} | {both[0]} | {both[1]} |" in page
    assert f"| MVE, B = 64 | {ratio('mve_batches', 'gla', 64, 'compiled')} | not measured |" in page
    both = [ratio("mve_batch64", "gla", 64, against) for against in ("compiled", "standard")]
    assert f"| MVE, B = 64, a later commit | {both[0]} | {both[1]} |" in page
    models = [ratio("mve_models", model, 8, "compiled") for model in ("gla", "gated_deltanet", "transformer")]
    assert "GLA {}, Gated DeltaNet {}, Transformer {}".format(*models) in page
    assert f"undecided: {min(models)} to {max(models)}, below the target" in page
    assert f"undecided: {ratio('mve_batches', 'gla', 8, 'compiled')}, below the target" in page


def test_liger_peaks_lower_than_ours_without_checkpointing() -> None:
    lower = [
        (row["cce_kahan"].peak_gib or 0) - (row["liger"].peak_gib or 0)
        for folder in ("", "_kda", "_gated_deltanet")
        for name, row in by_name(read_rows(steps(folder))).items()
        if name.endswith("1b3")
    ]
    assert len(lower) == 4
    page = " ".join((ROOT / "docs/study/h6_liger.md").read_text(encoding="utf-8").split())
    assert f"Liger peaks {min(lower):.1f} to {max(lower):.1f} GiB lower than ours, in all four models" in page


@pytest.mark.parametrize(
    ("folder", "head"),
    [
        ("", "H100, whole steps of 8 x 2048 tokens"),
        ("_gated_deltanet", "H100, Triton 3.7.1, whole steps of 8 x 2048 tokens"),
        ("_kda", "H100, KDA in a later process, whole steps of 8 x 2048 tokens"),
        ("_262144", "H100, V = 262,144, whole steps of 8 x 2048 tokens"),
    ],
)
def test_the_table_of_liger_s_steps_holds_the_h100_s_rows(folder: str, head: str) -> None:
    found = read_rows(steps(folder))
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
    assert sorted(table_of("h6_liger.md", head)) == sorted(expected)


def test_the_sentences_on_a_large_vocabulary_hold_its_rows() -> None:
    found, rows = read_rows(steps("_262144")), by_name(read_rows(steps("_262144")))
    page = " ".join((ROOT / "docs/study/h1b_step_speed.md").read_text(encoding="utf-8").split())
    plain, full = rows["GLA 1b3"], rows["GLA 1b3, full checkpointing"]
    shares = [percent(row["compiled"].loss_layer_share) for row in (plain, by_name(read_rows(STEPS))["GLA 1b3"])]
    assert "the loss layer {} of GLA's step with compiled, instead of {}.".format(*shares) in page
    told = "{:.2f} GiB with compiled and {:.2f} with ours. With full checkpointing: {:.2f} and {:.2f}."
    assert told.format(*(row[loss].peak_gib for row in (plain, full) for loss in ("compiled", "cce_kahan"))) in page
    assert {row["standard"].status for row in rows.values()} == {"out_of_memory"}
    step, layer = plain["compiled"].step_ms or 0, plain["compiled"].loss_layer_ms or 0
    assert f"would make GLA's step {step / (step - layer):.2f} times as fast" in page
    assert f"A loss layer of {layer - step * (1 - 1 / 1.08):.1f} ms would reach 8 %" in page
    rate = peak_flops_per_second("NVIDIA H100 80GB HBM3", "bf16") or 0
    assert f"Its three products take {1e3 * 6 * 16384 * 2048 * 262144 / rate:.1f} ms" in page
    ends = {
        loss: span([v.value for one in step_speeds(found) if (v := one.verdict).backend == loss])
        for loss in ("liger", "cce_kahan")
    }
    told = ["GLA 1.3B, V = 262,144, two settings", "torch.compile", "1.08", ends["cce_kahan"], "**missed**", "6"]
    assert told in index_rows("Faster steps")
    told = ["speed of 1.3B steps, V = 262,144, GLA", "torch.compile", ends["liger"], ends["cce_kahan"], "**no**", "6"]
    assert told in index_rows("Liger")


def test_ours_beside_liger_in_the_same_rounds_is_what_the_page_says() -> None:
    expected, around_one = {}, 0
    for folder in ("", "_gated_deltanet", "_kda"):
        for name, row in by_name(read_rows(steps(folder))).items():
            if "liger" in row and "1b3" in name:
                pairs = zip(row["liger"].wall_ms, row["cce_kahan"].wall_ms, strict=True)
                found = estimate([liger / ours for liger, ours in pairs], ratios=True)
                expected[name] = f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"
                around_one += (found.low or 0) <= 1 <= (found.high or 0)
    assert dict(table_of("h6_liger.md", "H100, whole steps of 8 x 2048 tokens, n = 6 or 8")) == expected
    assert (len(expected), around_one) == (8, 3)


def test_the_table_of_peaks_holds_the_h100_s_rows() -> None:
    expected = []
    every = [
        (name + ", V = 262,144" * (folder == "_262144"), row)
        for folder in ("", "_gated_deltanet", "_kda", "_262144")
        for name, row in by_name(read_rows(steps(folder))).items()
    ]
    for name, row in every:
        if "1b3" in name:
            peaks = [row[loss].peak_gib if row[loss].status == "ok" else None for loss in ("standard", "compiled")]
            ours = row["cce_kahan"].peak_gib
            assert ours is not None
            cells = ["out of memory" if peak is None else f"{peak:.2f}" for peak in peaks]
            ratios = ["-" if peak is None else f"{ours / peak:.3f}" for peak in reversed(peaks)]
            expected.append([name, *cells, f"{ours:.2f}", *ratios])
    assert sorted(table_of("h2_loss_memory.md", "H100, peak of a step, GiB")) == sorted(expected)


def test_the_index_tells_the_peaks_of_all_models_on_the_h100() -> None:
    ratios: dict[tuple[str, bool], list[float]] = {}
    for folder in ("", "_kda", "_gated_deltanet"):
        for name, row in by_name(read_rows(steps(folder))).items():
            for base in ("compiled", "standard"):
                if "1b3" in name and row[base].status == "ok":
                    ratio = (row["cce_kahan"].peak_gib or 0) / (row[base].peak_gib or 0)
                    ratios.setdefault((base, "full" in name), []).append(ratio)
    compiled = ratios["compiled", False] + ratios["compiled", True]
    assert (len(compiled), min(compiled) > 0.6) == (8, True)
    [plain], full = ratios["standard", False], ratios["standard", True]
    assert plain > 0.6 > max(full)
    index = [row[:5] for row in index_rows("Memory of the loss layer")]
    for where, base, some, word in (
        ("1.3B", "torch.compile", compiled, "missed"),
        ("1.3B without checkpointing", "eager", [plain], "missed"),
        ("1.3B with checkpointing", "eager", full, "met"),
    ):
        assert [f"peak, as a multiple, {where}", base, "0.6", span(some), f"**{word}**"] in index
    large = [
        (row["cce_kahan"].peak_gib or 0) / (row["compiled"].peak_gib or 0)
        for row in by_name(read_rows(steps("_262144"))).values()
    ]
    assert ["the same, GLA 1.3B, V = 262,144", "torch.compile", "0.6", span(large), "**missed**"] in index
    older = [re.findall(r"missed\*\*: ([\d.]+)", row[1])[0] for row in table_of("h2_loss_memory.md", "peak, ratio")]
    ends = f"{min(older[2:])} to {max(older[2:])}"
    assert ["the same, older kernels, on an H200", "torch.compile", "0.6", ends, "**missed**"] in index
    page = (ROOT / "docs/study/h2_loss_memory.md").read_text(encoding="utf-8")
    [(low, high)] = re.findall(r"kernels it takes\s+([\d.]+) to ([\d.]+) % at 1.3B without checkpointing", page)
    assert ["the same, 1.3B without checkpointing, H100", "-", "1 %", f"{low} to {high} %", "**missed**"] in index


def test_the_tables_of_peaks_without_a_loss_layer_hold_the_breakdowns() -> None:
    shares, peaks = [], []
    for words in ("GLA", "Gated DeltaNet", "KDA", "Transformer"):
        path = ROOT / "results" / "summaries" / "breakdown" / f"{BREAKDOWNS[words]}.json"
        memory = {name: row["measured"] for name, row in read_object(path, ("memory",))["memory"].items()}
        peak, without = memory["peak"], memory["peak/without_loss_layer"]
        most = max(memory["loss_forward"], memory["loss_backward"])
        gib = [f"{size / GIB:.2f}" for size in (peak, most, without)]
        shares.append([words, *gib[:2], percent(most / peak), gib[2], percent(1 - without / peak)])
        peaks.append([words, gib[0], gib[2]])
    assert table_of("h2_loss_memory.md", "1.3B, B = 8, H100, today's `cce_kahan`") == shares
    assert table_of("h1a_larger_batches.md", "peak at 8 sequences, GiB") == peaks
    page = " ".join((ROOT / "docs/study/h2_loss_memory.md").read_text(encoding="utf-8").split())
    found = sorted(float(row[3].removesuffix(" %")) for row in shares)
    assert f"With today's kernels it takes {found[0]:.1f} to {found[-1]:.1f} % at 1.3B without checkpointing" in page


def test_the_table_of_shares_of_a_step_holds_the_h100_s_rows() -> None:
    expected = []
    for name, row in by_name(read_rows(STEPS)).items():
        shares = [row[loss].loss_layer_share for loss in ("compiled", "cce_kahan")]
        expected.append([name, *(f"{share:.1%}".replace("%", " %") for share in shares if share is not None)])
    assert sorted(table_of("h4_linear_rnn_or_transformer.md", "H100, 8 x 2048 tokens a step")) == sorted(expected)
    page = " ".join((ROOT / "docs/study/h4_linear_rnn_or_transformer.md").read_text(encoding="utf-8").split())
    shares_of = {
        name: [percent(row[loss].loss_layer_share) for loss in ("compiled", "cce_kahan")]
        for folder in ("_gated_deltanet", "_kda")
        for name, row in by_name(read_rows(steps(folder))).items()
    }
    plain, full = shares_of["Gated DeltaNet 1b3"], shares_of["Gated DeltaNet 1b3, full checkpointing"]
    words = "takes {} with compiled and {} with ours, and with full checkpointing {} and {}"
    assert words.format(*plain, full[0].removesuffix(" %"), full[1]) in page
    compiled, ours = shares_of["KDA 1b3"]
    assert f"Of KDA's without checkpointing it takes {compiled.removesuffix(' %')} and {ours}" in page


def test_the_table_of_gains_divides_those_of_linear_rnns_by_the_transformer_s() -> None:
    """As `scripts/bench_steps.py compare_with='Transformer 1b3'` prints them."""
    found = table_of("h4_linear_rnn_or_transformer.md", "T = 2048, gain divided by the Transformer's")
    assert [row[0] for row in found] == ["GLA 1b3", "GLA 1b3, full checkpointing", "KDA 1b3, full checkpointing"]
    for name, *cells in found:
        table = line_ratios(read_rows(STEPS), re.sub("^[A-Z]+", "Transformer", name))
        assert [column.split("`")[1] for column in table.columns[3:]] == ["compiled", "standard"]
        [gains] = [gains for line, loss, _, *gains in table.rows if (line, loss) == (name, "`cce_kahan`")]
        assert [cell.replace("not measured", "-") for cell in cells] == gains
