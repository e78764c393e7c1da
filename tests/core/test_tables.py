"""Markdown tables: columns are aligned by their content, no cell breaks a row, a missing number is a dash."""

from linrnn.core.tables import Table, show


def test_words_stand_left_and_numbers_right():
    table = Table(("model", "ms", "status"), [("gla", 1.5, ""), ("kda", 12, "failed")], words=("model", "status"))
    assert table.markdown() == ["| model | ms | status |", "|---|--:|---|", "| gla | 1.5 | |", "| kda | 12 | failed |"]


def test_a_bar_in_a_cell_does_not_end_the_cell():
    assert Table(("loss",), [("a | b",)]).markdown()[-1] == "| a \\| b |"


def test_a_number_is_shown_in_its_unit_and_a_missing_one_as_a_dash():
    assert [show(3 * 2**30, ".2f", 2**30), show(0.5, ".1%"), show(None, ".2f")] == ["3.00", "50.0%", "-"]
