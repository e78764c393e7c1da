"""The figures of equal losses and of the MVE: docs/study/h5_same_loss.md."""

import re

from blocks import ROOT
from figures import cell_of, index_rows, table_of

from linrnn.study.criteria import CURVES, MVE_LOSS, MVE_MEMORY, PERPLEXITY, VALID_LOSS
from linrnn.study.results import read_committed
from linrnn.study.verdicts import verdicts


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


def test_the_mve_s_peak_memory_is_that_of_the_twelve_seeds() -> None:
    found = verdicts(read_committed(ROOT / "results" / "summaries" / "same_loss"))
    peaks = {(v.backend, v.against): v for v in found if v.criterion == MVE_MEMORY}
    ours, liger = ([peaks[loss, base] for base in ("compiled", "standard")] for loss in ("cce_kahan", "liger"))
    [row] = [row for row in table_of("h2_loss_memory.md", "peak, ratio") if row[0].startswith("MVE, GLA, today's")]
    assert row[1:4] == [*(f"**{v.verdict}**: {v.value:.3f} (n = {v.n})" for v in ours), f"{MVE_MEMORY.target:g}"]
    page = (ROOT / "docs" / "study" / "h6_liger.md").read_text(encoding="utf-8")
    for name, mine, theirs in zip(("torch.compile", "eager"), ours, liger, strict=True):
        told = [f"{theirs.value:.3f}", f"{mine.value:.3f}", "**yes**", f"{mine.n}"]
        assert ["peak memory, MVE", name, *told] in index_rows("Liger")
        told = [f"{MVE_MEMORY.target:g}", f"{mine.value:.3f}", f"**{mine.verdict}**", f"{mine.n}"]
        assert ["peak, as a multiple, MVE", name, *told] in index_rows("Memory of the loss layer")
    assert f"({liger[0].value:.3f})" in page
    assert (liger[0].verdict, ours[0].verdict) == ("met", "missed")
