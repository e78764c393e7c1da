"""The study's pictures are those of the committed rows."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from linrnn.runs.intervals import Estimate
from study import pictures
from study.step_parts import parts_of_step, shares_of_step

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return pictures.draw(tmp_path_factory.mktemp("figures"))


def test_every_committed_picture_is_drawn_from_committed_rows(drawn):
    committed = ROOT / "results" / "figures"
    names = {path.with_suffix(suffix).name for path in drawn for suffix in (".png", ".svg")}
    assert names == {path.name for path in committed.iterdir()}


def test_the_committed_pictures_say_what_the_rows_say(drawn):
    def words(path: Path) -> list[str | None]:
        return [text.text for text in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]

    for path in (picture.with_suffix(".svg") for picture in drawn):
        assert words(path) == words(ROOT / "results" / "figures" / path.name), "python -m study.pictures"


def test_the_parts_of_a_step_fill_it_and_the_mixer_counts_once():
    passes = {"mixer": (3.0, 5.0), "mixer/projections": (1.0, 2.0), "mixer/scan": (2.0, 3.0), "embedding": (0.5, None)}
    passes |= {"norms": (0.5, 1.0), "mlp": (1.0, 2.0), "loss": (1.0, 1.0)}
    times = {name: {"forward": forward, "backward": backward} for name, (forward, backward) in passes.items()}
    times |= {"optimizer": {"total": 1.0}, "step": {"total": 20.0}, "host": {"total": 15.0}}
    parts = parts_of_step({"time": times, "steps": []})
    assert "mixer" not in parts
    assert "host" not in parts
    assert (parts["mixer/projections"], parts["mixer/scan"], parts["the rest"]) == (3.0, 5.0, 4.0)
    assert sum(parts.values()) == 20.0
    whole = {"time": {name: row for name, row in times.items() if "/" not in name}, "steps": []}
    assert parts_of_step(whole)["mixer"] == 8.0
    assert shares_of_step(whole)["mixer"] == Estimate(1, 0.4, None, None)
