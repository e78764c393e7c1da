"""The figures of docs/study/h7_follow_ups.md."""

import re
import statistics
from collections import Counter
from operator import itemgetter as pick
from typing import Any

import pytest
from blocks import ROOT
from figures import STEPS, answer_of, by_name, index_rows, percent, steps, table_of, with_interval

from linrnn.bench.steps.rows import AGAIN, Row, read_rows
from linrnn.core.files import read_object
from linrnn.runs.intervals import estimate, ratio_of_means
from linrnn.runs.step_parts import parts_of_step, shares_of_step
from linrnn.study.benchmarks.line_ratios import line_ratios
from linrnn.study.benchmarks.step_speed import host_share, step_speeds
from linrnn.study.criteria import CURVES, FINAL_LOSS, MEMORY, MVE_LOSS, VALID_LOSS, Criterion, Verdict
from linrnn.study.curves import difference
from linrnn.study.figures import BREAKDOWNS
from linrnn.study.plots.step_parts import PARTS
from linrnn.study.report.settings import changes_of_loss
from linrnn.study.results import read_committed
from linrnn.study.verdicts import verdicts

# Model lines of the follow-ups, and the lines that they are compared with; by the name of the model.
FOLLOW_UPS = steps("_followups")
PLAIN, BLOCKS, FLOAT8 = "{} 1b3", "{} 1b3, compile=blocks", "{} 1b3, compile=blocks, float8=blocks"
RANKS = tuple("{} " + f"shared_projection_rank={rank} 1b3" for rank in (512, 1024))
RANK_512, MODELS = "shared_projection_rank=512", ("gla", "transformer")
BREAKDOWNS_350M = {  # breakdowns of 350M with 131,072 entries, in a table alone
    "GLA": "gla-350m-cce_kahan-v131072-steps15-b16-t2048-s0",
    "GLA, shared projection": "gla-350m-cce_kahan-r512-v131072-steps15-b16-t2048-s0",
    "Transformer": "transformer-350m-cce_kahan-v131072-steps15-b16-t2048-s0",
    "Transformer, shared projection": "transformer-350m-cce_kahan-r512-v131072-steps15-b16-t2048-s0",
}
COMPARED = ((BLOCKS, PLAIN), (FLOAT8, BLOCKS), (FLOAT8, PLAIN), *((rank, PLAIN) for rank in RANKS))


def follow_ups() -> dict[str, dict[str, Row]]:
    found = by_name(read_rows(FOLLOW_UPS))
    assert {row.rounds for own in found.values() for row in own.values()} == {6}
    return found


def test_the_table_of_the_follow_ups_speeds_holds_the_rows_and_verdicts() -> None:
    judged = {(one.verdict.setting, one.verdict.backend): one.verdict for one in step_speeds(read_rows(FOLLOW_UPS))}
    expected = []
    for name, row in follow_ups().items():
        cells = [name, *(f"{row[loss].step_ms:.1f}" for loss in ("compiled", "cce_kahan"))]
        cells += [answer_of(judged[name, "cce_kahan"]), with_interval(judged[name, AGAIN])]
        expected.append([*cells, f"{host_share(row['compiled']):.0%}".replace("%", " %")])
    assert sorted(table_of("h7_follow_ups.md", "H100, 8 x 2048 tokens, step")) == sorted(expected)


def test_the_table_of_every_loss_beside_float8_holds_the_rows() -> None:
    rows = read_rows(steps("_float8"))
    judged = {
        (one.row.model, one.row.loss): one.verdict for one in step_speeds(rows) if one.verdict.against == "compiled"
    }
    names = {"gla": "GLA", "transformer": "Transformer"}
    expected = []
    for row in rows:
        cells = ["out of memory", *4 * "-"]
        if row.status == "ok":
            form = answer_of if row.loss == "cce_kahan" else with_interval
            of_compiled = form(judged[row.model, row.loss]) if row.loss != "compiled" else "-"
            cells = [f"{row.step_ms:.1f}", of_compiled, f"{row.loss_layer_ms:.1f}"]
            cells += [percent(row.loss_layer_share), f"{row.peak_gib:.2f}"]
        expected.append([names[row.model], f"`{row.loss}`", *cells])
    assert table_of("h7_follow_ups.md", "H100, 1.3B with float8 blocks") == expected
    assert {(row.rounds, row.steps) for row in rows if row.status == "ok"} == {(8, 3)}
    assert [row.loss for row in rows if row.status == "out_of_memory"] == ["standard"]
    page = " ".join((ROOT / "docs/study/h7_follow_ups.md").read_text(encoding="utf-8").split())

    ours = {model: judged[model, "cce_kahan"] for model in names}
    assert all(v.verdict == "missed" and v.low <= 1 <= v.high for v in ours.values())  # type: ignore[operator]
    control = judged["gla", AGAIN]
    assert f"compiled built twice has an interval of {control.low:.3f} to {control.high:.3f}." in page
    slower = {key for key, verdict in judged.items() if (verdict.high or 0) < 1}
    others = {(model, loss) for model in names for loss in ("liger", "fla")}
    assert slower == {*others, ("transformer", "standard")}

    cell = {(row.model, row.loss): row for row in rows}
    shares = [percent(cell[model, loss].loss_layer_share) for model in names for loss in ("cce_kahan", "fla")]
    gla, transformer = shares[:2], [shares[2].removesuffix(" %"), shares[3]]
    assert "takes {} of GLA's step with ours and {} with FLA's, and".format(*gla) in page
    assert "and {} and {} of the Transformer's.".format(*transformer) in page

    index = index_rows("Follow-ups")
    for model, setting in (
        ("gla", "the same in the process with Liger and FLA"),
        ("transformer", "the same in the process with eager, Liger and FLA"),
    ):
        assert [setting, "torch.compile", "1", with_interval(ours[model]), "**undecided**", "8"] in index
    earlier = read_rows(ROOT / "results/superseded/steps_float8_one_step")
    [told] = [
        with_interval(one.verdict)
        for one in step_speeds(earlier)
        if (one.row.loss, one.verdict.against, one.verdict.n) == ("cce_kahan", "compiled", 5)
    ]
    assert ["the same in a noisier process, replaced", "torch.compile", "1", told, "**undecided**", "5"] in index
    assert f"has ours at {told} of compiled's speed" in page
    first = follow_ups()[FLOAT8.format("Transformer")]["compiled"]
    took = [row.step_ms for row in (earlier[0], first, cell["transformer", "compiled"])]
    assert "took {:.1f} ms there, {:.1f} ms in the first process and {:.1f} ms here.".format(*took) in page

    norms = {model: [row.gradient_norm or 0 for row in rows if row.model == model and row.loss_nats] for model in names}
    assert f"is {norms['gla'][0]:.1f} with compiled and {max(norms['gla']):.1f} with FLA's loss." in page
    assert f"Transformer's is {min(norms['transformer']):.2f} to {max(norms['transformer']):.2f}." in page
    assert max(norms["gla"]) == cell["gla", "fla"].gradient_norm
    for model in names:
        losses = [row.loss_nats for row in rows if row.model == model and row.loss_nats]
        assert max(losses) - min(losses) < 1e-5


def test_what_later_processes_say_of_float8_is_told() -> None:
    page = " ".join((ROOT / "docs/study/h7_follow_ups.md").read_text(encoding="utf-8").split())
    later, shared = (by_name(read_rows(steps(name))) for name in ("_float8", "_gla_graphs"))
    before = {"GLA": shared[BLOCKS.format("GLA")], "Transformer": follow_ups()[BLOCKS.format("Transformer")]}
    with_float8 = {model: later[FLOAT8.format(model)] for model in before}

    def gains(own: dict[str, Row]) -> list[float]:
        return [base / ms for base, ms in zip(own["compiled"].wall_ms, own["cce_kahan"].wall_ms, strict=True)]

    times = {
        model: with_interval(ratio_of_means(with_float8[model]["compiled"].wall_ms, own["compiled"].wall_ms))
        for model, own in before.items()
    }
    assert f"on another H100 has {times['GLA']} of that bf16 step." in page
    took = with_float8["Transformer"]["compiled"].step_ms
    assert f"A later process takes {took:.1f} ms, {times['Transformer']} of that bf16 step." in page
    gain = ratio_of_means(gains(with_float8["Transformer"]), gains(before["Transformer"]))
    assert f"of the gain without it, and {with_interval(gain)} with a later process." in page
    assert f"and within {100 * (1 - (gain.low or 0)):.1f} % in the later process" in page
    shares = [own[FLOAT8.format("GLA")]["compiled"].loss_layer_share for own in (shared, later)]
    assert f"In two later processes it is {percent(shares[0])[:-2]} and [{percent(shares[1])}]" in page
    training = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    earlier = read_rows(ROOT / "results/superseded/steps_float8_one_step")[0]
    first = follow_ups()[FLOAT8.format("Transformer")]["compiled"]
    known = sorted(row.step_ms or 0 for row in (first, earlier, with_float8["Transformer"]["compiled"]))
    assert f"{known[0]:.1f} to {known[-1]:.1f} |" in training
    gla = sorted(own[FLOAT8.format("GLA")]["compiled"].step_ms or 0 for own in (shared, later))
    assert "{:.1f} and {:.1f} |".format(*gla) in training

    peaks = {
        model: [own[loss].peak_gib or 0 for loss in ("cce_kahan", "liger", "fla")] for model, own in with_float8.items()
    }
    less = {model: [f"{peak[0] - other:.1f}" for other in peak[1:]] for model, peak in peaks.items()}
    told = (
        f"Liger {less['GLA'][0]} GiB for GLA and {less['Transformer'][0]} GiB for the Transformer, FLA {less['GLA'][1]}"
    )
    assert told in page
    assert less["GLA"][1] == less["Transformer"][1]
    hosts = [host_share(row) for own in with_float8.values() for row in own.values() if row.status == "ok"]
    assert f"issues kernels for {100 * min(hosts):.0f} to {100 * max(hosts):.0f} % of these steps." in page
    clocks = {model: [mhz for row in own.values() for mhz in row.sm_mhz] for model, own in with_float8.items()}
    ends = {model: f"{min(mhz):,.0f} to {max(mhz):,.0f} MHz" for model, mhz in clocks.items()}
    assert f"{ends['GLA']} (GLA) and {ends['Transformer']} (Transformer)." in page

    liger = " ".join((ROOT / "docs/study/h6_liger.md").read_text(encoding="utf-8").split())
    beside = {
        model: estimate(
            [theirs / ms for theirs, ms in zip(own["liger"].wall_ms, own["cce_kahan"].wall_ms, strict=True)],
            ratios=True,
        )
        for model, own in with_float8.items()
    }
    assert f"ours runs at {with_interval(beside['GLA'])} of Liger's tokens/s for GLA" in liger
    assert f"and at {with_interval(beside['Transformer'])} for the Transformer (n = 8)." in liger
    judged = {
        (one.verdict.setting, one.row.loss): one.verdict.value
        for one in step_speeds(read_rows(steps("_float8")))
        if one.verdict.against == "compiled"
    }
    ends = {loss: sorted(judged[name, loss] or 0 for name in later) for loss in ("liger", "cce_kahan")}
    cells = ["{:.3f} to {:.3f}".format(*ends[loss]) for loss in ("liger", "cce_kahan")]
    assert all((one.low or 0) > 1 for one in beside.values())
    told = ["speed of 1.3B steps with float8, 8 sequences", "torch.compile", *cells, "**no** in both", "8"]
    assert told in index_rows("Liger")


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
    """As `scripts/bench_steps.py compare_with='GLA 1b3'` prints it, with the verdicts that follow."""
    rows, expected = read_rows(FOLLOW_UPS), []
    for model in ("GLA", "Transformer"):
        for pair in COMPARED:
            name, other = (text.format(model) for text in pair)
            table = line_ratios(rows, other)
            assert table.columns[2:] == ("step's time (90 %)", "gain over `compiled` (90 %)")
            cells = {loss: of_loss for line, loss, *of_loss in table.rows if line == name}
            expected.append([name, other, cells["`compiled`"][0], *cells["`cce_kahan`"]])
    assert table_of("h7_follow_ups.md", "model line") == expected


def breakdown_of(name: str) -> dict[str, Any]:
    return read_object(ROOT / "results" / "summaries" / "breakdown" / f"{name}.json", ("time", "flops", "steps"))


@pytest.mark.parametrize(
    ("head", "breakdowns"),
    [
        ("H100, 1.3B, `cce_kahan`: of a step", BREAKDOWNS),
        ("H100, 350M, V = 131,072, 16 x 2048 tokens, `cce_kahan`: of a step", BREAKDOWNS_350M),
    ],
)
def test_the_tables_of_a_steps_parts_hold_the_breakdowns(head: str, breakdowns: dict[str, str]) -> None:
    expected = []
    for words, name in breakdowns.items():
        breakdown = breakdown_of(name)
        seconds, step = parts_of_step(breakdown), breakdown["time"]["step"]["total"]
        scan = shares_of_step(breakdown)["mixer/scan"]
        assert (scan.n, len(breakdown["steps"])) == (9, 9)
        shares = [percent(sum(seconds[part] for part in held) / step) for held, _ in PARTS.values()]
        shares[1] += f" ({100 * (scan.low or 0):.1f} to {100 * (scan.high or 0):.1f})"
        rates = [f"{rate:.0f}" for rate in rates_of(breakdown)]
        expected.append([words, f"{1e3 * step:.1f}", *shares, *rates])
        assert (scan.high or 1) < 0.5, "the scan takes less than half of every step"
    assert table_of("h7_follow_ups.md", head) == expected


def rates_of(breakdown: dict[str, Any]) -> list[float]:
    """TFLOP/s of projections, scan, MLP and loss layer."""
    seconds = parts_of_step(breakdown)
    computed = {
        "mixer/projections": "mixer_projections",
        "mixer/scan": "mixer_scan",
        "mlp": "mlp",
        "loss": "vocabulary",
    }
    return [sum(breakdown["flops"][name].values()) / seconds[part] / 1e12 for part, name in computed.items()]


def test_what_the_pages_say_of_a_steps_parts_holds_the_breakdowns() -> None:
    pages = {
        name: " ".join((ROOT / "docs/study" / name).read_text(encoding="utf-8").split())
        for name in ("h7_follow_ups.md", "h4_linear_rnn_or_transformer.md")
    }
    page = pages["h7_follow_ups.md"]
    found = {words: breakdown_of(name) for words, name in BREAKDOWNS.items()}
    parts = {words: parts_of_step(breakdown) for words, breakdown in found.items()}
    steps = {words: breakdown["time"]["step"]["total"] for words, breakdown in found.items()}
    linear = [words for words in found if "Transformer" not in words]
    for words in linear:
        drawn = [sum(parts[words][part] for part in held) for held, _ in PARTS.values()]
        assert sorted(drawn[:5], reverse=True).index(drawn[3]) == 3, "the loss layer comes fourth"
        largest = sorted(parts[words], key=lambda part: parts[words][part])[-2:]
        assert largest[::-1].index("mixer/scan") == (1 if "GLA" in words else 0)
    scan_flops = []
    for words in linear:
        flops = {part: sum(passes.values()) for part, passes in found[words]["flops"].items()}
        scan_flops.append(flops["mixer_scan"] / (sum(flops.values()) - flops["optimizer"]))
    slow = [rates_of(found[words])[1] for words in linear]
    assert f"it does {100 * min(scan_flops):.0f} to {100 * max(scan_flops):.0f} % of a linear RNN's FLOPs" in page
    assert f"at {min(slow):.0f} to {max(slow):.0f} TFLOP/s. The H100's peak is 989." in page
    models = [(parts[name], parts[f"{name}, shared projection"]) for name in ("GLA", "Transformer")]
    off = [1e3 * (plain["mixer/projections"] - shared["mixer/projections"]) for plain, shared in models]
    back = [1e3 * (shared["mlp"] - plain["mlp"]) for plain, shared in models]
    assert "takes {:.0f} ms off GLA's projections at 1.3B and {:.0f} ms off the Transformer's".format(*off) in page
    assert "takes {:.0f} and {:.0f} ms of it back".format(*back) in page
    slowest = max(step["step"] / steps[words] for words in found for step in found[words]["steps"])
    assert f"Single steps took up to {slowest:.2f} times the median, and up to" in page
    smaller = [breakdown_of(name) for name in BREAKDOWNS_350M.values()]
    slowest = max(step["step"] / one["time"]["step"]["total"] for one in smaller for step in one["steps"])
    assert f"and up to {slowest:.2f} times at 350M." in page
    longer = steps["GLA, shared projection"] / steps["GLA"]
    assert f"makes GLA's step {longer:.2f} times as long" in page
    shared = [
        breakdown_of(names[f"{model}, shared projection"])
        for names in (BREAKDOWNS, BREAKDOWNS_350M)
        for model in ("GLA", "Transformer")
    ]
    taken_by_loss = [f"{100 * parts_of_step(one)['loss'] / one['time']['step']['total']:.1f}" for one in shared]
    told = "it takes {} and {} % at 1.3B, and {} and {} % at 350M."
    assert told.format(*taken_by_loss) in page
    whole = [follow_ups()[line.format("GLA")]["cce_kahan"].step_ms for line in (PLAIN, RANKS[1])]
    taken = [1e3 * steps[name] / one for name, one in zip(("GLA", "GLA, shared projection"), whole, strict=True)]
    assert "GLA's two steps take {:.2f} and {:.2f} times those of the next section".format(*taken) in page
    for breakdown, words in (
        (found["GLA, shared projection"], "it takes {} of GLA's step at 1.3B"),
        (breakdown_of(BREAKDOWNS_350M["GLA, shared projection"]), "and {} at 350M"),
    ):
        scan = shares_of_step(breakdown)["mixer/scan"]
        low, high = scan.low or 0, scan.high or 0
        assert words.format(f"{100 * scan.value:.1f} % ({100 * low:.1f} to {100 * high:.1f})") in page
    older = ROOT / "results/superseded/breakdown_medians/gla-1b3-cce_kahan-r1024-steps11-t2048-s0.json"
    seconds = parts_of_step(read_object(older, ("time",)))
    assert f"had the scan at {100 * seconds['mixer/scan'] / sum(seconds.values()):.1f} %" in page
    scans = [parts[words]["mixer/scan"] / steps[words] for words in linear]
    told = f"{100 * min(scans):.0f} to {100 * max(scans):.0f} %"
    assert ["the scan's share of a linear RNN's step", "-", "50 %", told, "**missed**", "9 steps"] in index_rows(
        "Follow-ups"
    )
    mixers = [
        (parts[name]["mixer/projections"] + parts[name]["mixer/scan"]) / steps[name]
        for name in ("GLA", "KDA", "Gated DeltaNet", "Transformer")
    ]
    told = "GLA's takes {} of a step, KDA's {} and Gated DeltaNet's {}, where attention's takes {}"
    assert told.format(*(f"{one:.0%}".replace("%", " %") for one in mixers)) in pages["h4_linear_rnn_or_transformer.md"]


def test_the_follow_ups_sentences_hold_the_rows() -> None:
    """The page's figures outside its tables, and those of the pages that link to it."""
    found = follow_ups()
    pages = {
        name: " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())
        for name in ("study/h7_follow_ups.md", "study/h1b_step_speed.md", "models.md", "training.md")
    }
    page = pages["study/h7_follow_ups.md"]
    gains = {name: cells for name, other, *cells in table_of("h7_follow_ups.md", "model line") if "compile" in other}
    gain = gains["Transformer 1b3, compile=blocks, float8=blocks"][2].partition(": ")[2]
    assert f"our gain with float8 is {gain} of the gain without it, and" in page
    low = float(gain.split()[1].lstrip("("))
    assert f"**Both gains multiply within {1 - low:.1%}**".replace("%", " %") in page

    shared = [own["cce_kahan"].loss_layer_share for name, own in found.items() if "shared" in name]
    low, high = (f"{100 * end(shared):.1f}" for end in (min, max))
    assert f"With them our loss layer takes {low} to {high} % of a step." in page
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
    plain, blocks, float8 = (name.format("Transformer") for name in (PLAIN, BLOCKS, FLOAT8))
    assert f"| Transformer, three processes with float8 | {ms[blocks]} | {ms[float8]} to" in pages["training.md"]
    rise = f"from {shares[plain]} in bf16 to {shares[blocks]} with compiled blocks and {shares[float8]} with float8."
    assert rise in page
    assert f"**GLA's share** was {shares[FLOAT8.format('GLA')]} with float8 in this process" in page
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
    index = {setting: told for setting, _, _, told, _, _ in index_rows("Follow-ups")}
    assert index["speed with float8 blocks, Transformer: is ours faster"] == with_interval(with_float8)
    assert index["speed without float8, Transformer"] == with_interval(with_blocks)
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


def test_the_verdicts_on_losses_are_those_of_the_three_sizes_tables() -> None:
    ranks, page = {"10 M": 128, "448 M": 512, "1.75 B": 1024}, "h7_follow_ups.md"
    against = {
        size: dict(map(pick(0, 2), table_of(page, f"{size} parameters: `cce_kahan` against compiled")))
        for size in ranks
    }
    changes = {
        size: {(name, loss): cell for name, loss, _, cell, *_ in table_of(page, f"{size} parameters: change")}
        for size in ranks
    }
    rows = {(what, model): cells for what, model, *cells in table_of(page, "what is compared")}
    assert len(rows) == 6
    for (what, model), cells in rows.items():
        for (size, rank), cell in zip(ranks.items(), cells, strict=True):
            change = "float8=blocks" if "float8" in what else f"shared_projection_rank={rank}"
            if what.startswith("`cce_kahan`"):
                expected = against[size][f"{model}, compile=blocks, float8=blocks"]
            else:
                expected = changes[size][f"{model}, {change}", "`cce_kahan`"]
            word, _, figures = expected.partition(": ")
            told = f"{word}: {figures.split()[0]}" if "missed" in word else word
            assert re.split("[,;] ", cell)[0] == told, (what, model, size)
    compiled = changes["10 M"]["GLA, shared_projection_rank=128", "`compiled`"]
    assert compiled.startswith("**undecided**")
    assert "; compiled **undecided**" in rows["a shared projection of half the width and none", "GLA"][0]


@pytest.mark.parametrize(
    ("folder", "size", "runs_there", "lines", "undecided_there", "criterion_of_losses"),
    [
        ("follow_ups", "10 M", 92, 8, (4, 5), MVE_LOSS),
        ("follow_ups_350m", "448 M", 50, 2, (1, 2), FINAL_LOSS),
        ("follow_ups_1b3", "1.75 B", 40, 2, (2, 2), FINAL_LOSS),
    ],
)
def test_the_follow_ups_losses_hold_the_rows(
    folder: str,
    size: str,
    runs_there: int,
    lines: int,
    undecided_there: tuple[int, int],
    criterion_of_losses: Criterion,
) -> None:
    def cell(v: Verdict) -> str:
        return f"**{v.verdict}**: {v.value:+.4f} ({v.low:+.4f} to {v.high:+.4f})"

    def in_words(model: str) -> str:
        name, _, rest = model.replace(", ", " ").partition(" ")
        return ", ".join(filter(None, [{"gla": "GLA", "transformer": "Transformer"}[name], rest]))

    runs = read_committed(ROOT / "results" / "summaries" / folder)
    assert len(runs) == runs_there
    changes = {(v.model, v.backend, v.criterion): v for v in changes_of_loss(runs)}
    expected = [
        [in_words(model), f"`{loss}`", str(v.n), cell(v), cell(changes[model, loss, VALID_LOSS])]
        for (model, loss, criterion), v in changes.items()
        if criterion == FINAL_LOSS
    ]
    assert sorted(table_of("h7_follow_ups.md", f"{size} parameters: change")) == sorted(expected)
    judged = {
        (v.model, v.setting, v.criterion): v
        for v in verdicts(runs)
        if v.against == "compiled" and v.value is not None and v.criterion in (criterion_of_losses, VALID_LOSS)
    }
    expected = []
    for (model, setting, criterion), v in judged.items():
        if criterion == criterion_of_losses:
            name = ", ".join(filter(None, [in_words(model), setting]))
            expected.append([name, str(v.n), cell(v), cell(judged[model, setting, VALID_LOSS])])
    assert sorted(table_of("h7_follow_ups.md", f"{size} parameters: `cce_kahan` against compiled")) == sorted(expected)
    assert len(expected) == lines
    undecided = Counter(criterion for (*_, criterion), v in judged.items() if v.verdict == "undecided")
    assert (undecided[criterion_of_losses], undecided[VALID_LOSS]) == undecided_there


def test_what_the_pages_say_of_the_losses_of_448_m_parameters_follows_from_the_rows() -> None:
    pages = {
        name: " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())
        for name in ("study/h7_follow_ups.md", "models.md", "training.md")
    }
    page = pages["study/h7_follow_ups.md"]
    runs = read_committed(ROOT / "results" / "summaries" / "follow_ups_350m")
    found = {v.model: v for v in changes_of_loss(runs) if v.criterion == FINAL_LOSS}
    values = {model: v.value or 0 for model, v in found.items()}
    float8, gla, transformer = values["gla, float8=blocks"], *(values[f"{m}, {RANK_512}"] for m in MODELS)
    assert f"Float8 raises GLA's final loss by {float8:.3f} nats" in page
    assert f"| 448 M | **missed**: {float8:+.3f} nats after 128 steps |" in pages["training.md"]
    assert f"the Transformer by {-transformer:.2f} nats and GLA by {-gla:.2f}." in page
    assert f"| 448 M, 128 steps | [{-transformer:.2f} lower]" in pages["models.md"]
    assert f"Rounding alone moves GLA by {values['gla, compile=blocks']:.4f} nats." in page
    control = found["gla, compile=blocks"].high
    assert control is not None
    assert control < 0 < (found["gla, float8=blocks"].low or 0), "on the other side of zero"

    judged = {
        (v.model, v.criterion): v.value for v in verdicts(runs) if v.against == "compiled" and v.value is not None
    }
    assert f"lie up to {judged['gla', CURVES]:.2f} nats apart (the median of five pairs)" in page
    peaks = [
        f"{judged[model, MEMORY]:.2f} ({name})" for model, name in zip(MODELS, ("GLA", "Transformer"), strict=True)
    ]
    assert f"`cce_kahan` peaks at {peaks[0]} and {peaks[1]} of compiled's memory." in page
    curves = [
        difference(run.losses, base.losses)
        for run in runs
        for base in runs
        if {run.summary["model"], base.summary["model"]} == {"gla"}
        and "trainer.float8=blocks" in run.summary["training"]
        and (run.summary["loss"], base.summary["loss"]) == ("cce_kahan", "compiled")
        and run.summary["seed"] == base.summary["seed"]
    ]
    assert len(curves) == 5
    means = [
        statistics.mean(values) for values in zip(*([y for x, y in curve if x > 80] for curve in curves), strict=True)
    ]
    assert max(map(abs, means)) < 0.02, "after step 80"


def test_what_the_page_says_of_the_losses_of_1_75_b_parameters_follows_from_the_rows() -> None:
    page = " ".join((ROOT / "docs" / "study" / "h7_follow_ups.md").read_text(encoding="utf-8").split())
    own = page.partition("## Training losses at 1.75 B parameters")[2].partition("## Why")[0]
    of_group = {
        size: read_committed(ROOT / "results" / "summaries" / f"follow_ups{end}")
        for size, end in {"10 M": "", "448 M": "_350m", "1.75 B": "_1b3"}.items()
    }
    runs = of_group["1.75 B"]
    assert {run.summary["n_parameters"] // 10**7 for run in runs if "shared" not in run.summary["model"]} == {175}
    assert {run.summary["tokens"] for run in runs} == {128 * 8192}
    changed = {
        size: {
            v.model: v.value or 0
            for v in changes_of_loss(group)
            if (v.criterion, v.backend) == (FINAL_LOSS, "cce_kahan")
        }
        for size, group in of_group.items()
    }
    gla, transformer = (changed["1.75 B"][f"{model}, shared_projection_rank=1024"] for model in MODELS)
    assert f"GLA ends {-gla:.3f} nats lower, and the Transformer {transformer:.3f} higher." in page
    most = max(abs(value) for model, value in changed["1.75 B"].items() if "float8" in model)
    assert f"by more than {most:.4f} nats in the median" in own
    shared = {
        size: [next(value for name, value in found.items() if name.startswith(f"{m}, shared")) for m in MODELS]
        for size, found in changed.items()
    }
    assert all(gla < 0 for gla, _ in shared.values()), "lowers GLA's final loss at all three sizes"
    small, middle, large = (shared[size][1] for size in of_group)
    words = (
        f"ends {small:.2f} nats higher at 10 M parameters, {-middle:.2f} lower at 448 M, and {large:.2f} higher here"
    )
    assert words in own
    models_page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert f"| 10 M | {small:.2f} higher |" in models_page
    assert f"| 1.75 B, 128 steps | [{large:.2f} higher]" in models_page
    judged = {
        (v.model, v.criterion): v.value for v in verdicts(runs) if v.against == "compiled" and v.value is not None
    }
    assert f"lie up to {judged['gla', CURVES]:.3f} nats apart (the median of five pairs)" in own
    full = [run for run in runs if "shared" not in run.summary["model"]]
    assert {f"{run.summary['peak_memory_bytes'] / 2**30:.1f}" for run in full} == {"26.5"}
    controls = {v.verdict for v in changes_of_loss(of_group["448 M"]) if "compile=blocks" in v.model}
    assert controls == {"undecided"}


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
    assert f"| GLA, two processes with float8 | {blocks.step_ms:.1f} |" in training
    assert f"and {float8.step_ms:.1f} |" in training
    ratio = ratio_of_means(float8.wall_ms, blocks.wall_ms)
    assert (ratio.low or 0) < 1 < (ratio.high or 0), "within the noise"
    assert f"takes {blocks.step_ms:.1f} ms a step with compiled blocks and {plain.step_ms:.1f} ms without" in training
