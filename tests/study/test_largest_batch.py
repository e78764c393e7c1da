"""The study's largest batches, from the probes of several groups."""

from dataclasses import replace
from pathlib import Path

import pytest

from linrnn.core.errors import DataError
from linrnn.report.runs import read_committed
from study.searches import Search, batch_ratios, searches

GROUP = Path(__file__).resolve().parents[2] / "results" / "summaries" / "largest_h100_gated_deltanet"


def search(*fitting: int, too_large: int) -> Search:
    rows = {batch: {"status": "finished"} for batch in fitting}
    return Search({**rows, too_large: {"status": "out_of_memory"}})


def test_a_search_is_exact_if_one_sequence_more_did_not_fit():
    found = searches(read_committed(GROUP))
    assert {key: one.exact for key, one in found.items() if not one.exact} == {
        ("gated_deltanet", "full", "liger"): False
    }
    unfinished = found["gated_deltanet", "full", "liger"]
    assert (unfinished.batch, unfinished.too_large) == (75, 85)


def test_searches_without_an_answer_give_no_ratio():
    found = {
        ("gla", "none", "cce_kahan"): search(3, too_large=4),
        ("gla", "none", "compiled"): search(too_large=1),
        ("gla", "none", "standard"): search(1, too_large=4),
        ("kda", "none", "cce_kahan"): search(3, too_large=4),
        ("kda", "none", "compiled"): search(2, too_large=3),
    }
    assert batch_ratios(found) == {("kda", "none", "compiled"): 1.5}


def test_searches_of_another_setting_are_refused():
    first, *others = read_committed(GROUP)
    with pytest.raises(DataError, match="memory_budget_gib"):
        searches([replace(first, summary={**first.summary, "memory_budget_gib": 80.0}), *others])
