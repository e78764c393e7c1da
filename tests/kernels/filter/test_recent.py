"""The filter remembers which kinds of calls it has launched in full, up to a fixed number."""

import os

import pytest
from cases import BF16

pytest.importorskip("triton")

from cce_kernels.filter import gather
from cce_kernels.filter.gather import Recent
from compiling import launch_lists, pretend


def test_what_was_met_longest_ago_is_forgotten_first():
    recent = Recent(2)
    assert [recent.meet((x,)) for x in (1, 2, 1, 3, 1, 2)] == [False, False, True, False, True, False]
    assert len(recent) == 2


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="launches nothing there")
def test_ragged_batches_do_not_let_the_table_grow(monkeypatch):
    pretend(monkeypatch, 90)
    assert isinstance(gather._launched, Recent)
    monkeypatch.setattr(gather, "_launched", Recent(3))
    for rows in (17, 18, 19, 20, 20):
        launch_lists(BF16, unbiased=False, mass=None, shape=(rows,), dim=64, vocab=1024)
    assert len(gather._launched) == 3
