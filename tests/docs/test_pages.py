"""The pages name things that exist: files, tests, commands and the first screen."""

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from blocks import FENCE, PAGES, ROOT, blocks, commands

from linrnn.config import last_of_each

LINK = re.compile(r"!?\[[^\[\]]*\]\(([^()\s]+)\)")
OF_RESULTS = [ROOT / "results/README.md", *sorted((ROOT / "results/log").glob("*.md"))]
NAMED = re.compile(r"`((?:src|configs|docs|kernels|notebooks|scripts|tests)/[\w/.*-]+)(?:::(\w+))?`")


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


@pytest.mark.parametrize("page", [*PAGES, *OF_RESULTS], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page):
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_every_test_that_a_page_names_is_there(page):
    for path, test in NAMED.findall(page.read_text(encoding="utf-8")):
        if "NAME" in path or path.endswith(("/chunked.py", "/chunked.yaml")):
            continue  # the reader's own
        assert list(ROOT.glob(path.rstrip("/"))), f"{page.name}: {path}"
        assert not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{test}"


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_every_diagram_has_a_picture_of_its_source(page):
    """The site shows the pictures, so that it needs no network."""
    diagrams = [block.text for block in blocks(page) if block.language == "mermaid"]
    pictures = sorted((ROOT / "docs" / "diagrams").glob(f"{page.stem}-*.svg"))
    sources = [ElementTree.parse(path).getroot().findtext("{http://www.w3.org/2000/svg}desc") for path in pictures]
    assert [source and source.rstrip("\n") for source in sources] == diagrams, "python scripts/maintain/diagrams.py"


def test_the_menu_holds_every_page():
    class Loader(yaml.SafeLoader):
        """Reads the names of Python functions as text."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)

    def entries(nav: object) -> list[str]:
        if isinstance(nav, str):
            return [nav]
        values = nav.values() if isinstance(nav, dict) else nav
        return [entry for value in values for entry in entries(value)]  # type: ignore[attr-defined]

    menu = entries(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"])
    for page in PAGES[1:]:
        name = page.relative_to(ROOT / "docs").as_posix()
        assert name in menu or f"{name.rpartition('/')[0]}/" in menu, name


def test_the_quickstart_works_from_training_to_the_report(command, small, tmp_path):
    """The commands of "A first run, step by step", with fewer steps and in another directory."""
    page = ROOT / "docs" / "quickstart.md"
    after = page.read_text(encoding="utf-8").split("## A first run")[0].count("\n")
    before = page.read_text(encoding="utf-8").split("## A run on your own text")[0].count("\n")
    lines = [words for block in blocks(page) if after < block.line < before for words in commands(block)]
    assert [Path(words[1]).stem for words in lines] == ["train", "evaluate", "generate", "export", "report"]
    cache = next(override for override in small() if override.startswith("data.cache_dir="))
    more = {
        "train.py": [*small(), "run_name=gla-smoke-standard-s0"],
        "scripts/evaluate.py": [cache],
        "scripts/report.py": [f"results_dir={tmp_path}/results"],
    }
    for _, script, *overrides in lines:
        here = [override.replace("results/", f"{tmp_path}/results/") for override in overrides]
        here = [override.replace("output=", f"output={tmp_path}/") for override in here]
        done = command(script, *last_of_each([*here, *more.get(script, [])]))
        assert done.returncode == 0, f"{shlex.join([script, *overrides])}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "my_model" / "config.json").exists()
    assert (tmp_path / "results" / "summaries" / "default" / "report.md").exists()
