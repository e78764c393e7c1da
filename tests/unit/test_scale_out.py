"""The page on many GPUs: what the formulas must give, whatever the constants."""

from itertools import pairwise
from pathlib import Path

import pytest

from linrnn.scale_out import GPUS, SETTINGS, WAYS, foresee, page

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_page_is_what_the_script_writes() -> None:
    assert (ROOT / "results" / "scale_out.md").read_text() == page() + "\n", "run python scripts/scale_out.py"


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_more_gpus_compute_less_each_and_shards_hold_less(setting) -> None:
    for way in WAYS:
        rows = [foresee(setting, way, gpus) for gpus in GPUS]
        for fewer, more in pairwise(rows):
            assert fewer.compute == pytest.approx(2 * more.compute, rel=0.02)
            assert more.memory <= fewer.memory
        assert all(0 < row.mfu <= 0.4 for row in rows)
    for gpus in GPUS:
        ddp, fsdp, hsdp, vocab = (foresee(setting, way, gpus) for way in WAYS)
        assert fsdp.memory < hsdp.memory < ddp.memory
        assert vocab.memory < ddp.memory
        assert ddp.sent_across == fsdp.sent_across == 0 < hsdp.sent_across
