"""A run is known by what it computes and by the text that it reads, however its command spells a path."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fitting import fitted

from linrnn.config import load_config, run_name
from linrnn.config.naming import resolved
from linrnn.core.errors import ConfigError, DataError
from linrnn.runs.summary import names_of_run

Small = Callable[..., list[str]]
SIX = ("schedule.steps=6", "trainer.max_steps=6")
THREE = ("schedule.steps=6", "trainer.max_steps=3")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory and home, with a folder of texts and links to folder and text."""
    home = tmp_path / "home"
    (home / "texts").mkdir(parents=True)
    for name in ("a", "b"):
        text = "\n\n".join(f"the cat {name} number {i} sat on mat number {i * i % 97} again" for i in range(300))
        (home / f"texts/{name}.txt").write_text(text, encoding="utf-8")
    (home / "linked").symlink_to("texts")
    (home / "other_name.txt").symlink_to("texts/a.txt")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    return home


SPELLINGS = ("texts/a.txt", "./texts/a.txt", "texts//a.txt", "texts/../texts/a.txt", "HOME/texts/a.txt")
LINKS = ("linked/a.txt", "HOME/linked/a.txt", "other_name.txt", "~/texts/a.txt", "~/other_name.txt")


@pytest.mark.parametrize("key", ["data.path", "data.valid_path", "data.tokenizer", "init_from", "continue_from"])
def test_names_do_not_depend_on_the_spelling_of_a_path(key, on_text, home):
    spelt = [path.replace("HOME", str(home)) for path in (*SPELLINGS, *LINKS)]
    configs = [load_config(on_text("data.path=texts", f"{key}={path}")) for path in spelt]
    names = {run_name(config) for config in configs}
    assert len(names) == 1, names
    assert len({names_of_run(config)["training"] for config in configs}) == 1, "reports compare it"
    other = run_name(load_config(on_text("data.path=texts", f"{key}=texts/b.txt")))
    assert other not in names
    folders = ("texts", "texts/", "./texts/.", "linked", "linked/", f"{home}/texts", "~/linked/", "nothing/../texts")
    assert len({run_name(load_config(on_text("data.path=b.txt", f"{key}={path}"))) for path in folders}) == 1
    assert "-path_a.txt_" in run_name(load_config(["data=text", "data.path=texts/a.txt"])), "for people"


def test_a_name_on_the_hub_is_no_path_and_a_list_is_many(home):
    for name in ("gpt2", "openai-community/gpt2"):
        assert resolved(name, of_hub=True) == name
    (home / "gpt2").mkdir()
    assert resolved("gpt2", of_hub=True) == resolved("./gpt2/") == str(home / "gpt2")
    assert resolved("texts/gone", of_hub=True) == str(home / "texts/gone"), "its folder is here"
    assert resolved(["linked/a.txt", "texts/b.txt"]) == [f"{home}/texts/a.txt", f"{home}/texts/b.txt"]
    assert resolved(["linked/a.txt"]) == resolved("texts/a.txt")
    assert resolved("texts/*.txt") == resolved("linked/../texts//*.txt") == f"{home}/texts/*.txt"
    assert resolved(None) is None


def test_a_named_run_goes_on_when_its_text_and_tokenizer_have_moved(on_text, home):
    first = fitted(on_text("data.path=texts/a.txt", "run_name=foo", *THREE))
    (home / "elsewhere").mkdir()
    shutil.copy(home / "texts/a.txt", home / "elsewhere/renamed.txt")
    shutil.copy(first.directory.path / "tokenizer.json", home / "elsewhere/tokenizer.json")
    moved = on_text("data.path=elsewhere/renamed.txt", "data.tokenizer=elsewhere/tokenizer.json", "run_name=foo")
    second = fitted([*moved, *SIX])
    assert "resuming at step 3" in (second.directory.path / "train.log").read_text()


def test_other_text_under_the_same_path_is_no_continuation(on_text, home):
    run = on_text("data.path=texts/a.txt", "data.tokenizer=null")
    finished = fitted(run)
    shutil.copy(home / "texts/b.txt", home / "texts/a.txt")
    with pytest.raises(ConfigError, match="holds a finished run on other data") as error:
        fitted(run)
    before = finished.directory.read_summary()
    name, *_ = error.value.remedy.split()
    for way in ("trainer.resume=never", name):
        assert way in error.value.remedy
        assert fitted([*run, way]).directory.read_summary()["data_fingerprint"] != before["data_fingerprint"]
    fitted([*run, "group=early", *THREE])
    (home / "texts/a.txt").write_text((home / "texts/b.txt").read_text() * 2, encoding="utf-8")
    with pytest.raises(DataError, match="the checkpoint's data position has fingerprint="):
        fitted([*run, "group=early", *SIX])
