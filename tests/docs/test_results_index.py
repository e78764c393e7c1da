"""results/README.md lists every committed folder, superseded/README.md every superseded one."""

import json
import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "results"
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PAGES = [RESULTS / "README.md", RESULTS / "superseded" / "README.md", *sorted((RESULTS / "log").glob("*.md"))]


def targets(page: Path) -> list[Path]:
    return [
        (page.parent / link).resolve() for link in LINK.findall(page.read_text(encoding="utf-8")) if ":" not in link
    ]


@pytest.mark.parametrize(
    ("page", "folders"),
    [
        (
            PAGES[0],
            [
                *(RESULTS / "summaries").iterdir(),
                *(RESULTS / name for name in ("bench_first_step", "bench_parallel", "bench_steps", "figures")),
            ],
        ),
        (PAGES[1], [path for path in (RESULTS / "superseded").iterdir() if path.is_dir()]),
    ],
)
def test_every_committed_folder_is_listed(page: Path, folders: list[Path]) -> None:
    named = targets(page)
    assert [path.name for path in folders if not any(target.is_relative_to(path) for target in named)] == []


def test_every_summary_is_listed_with_its_runs_and_seeds() -> None:
    row = re.compile(r"\(summaries/(\w+)/report\.md\) \|[^|]*\| (\d+) \((\d+) seeds?\) \|")
    told = {
        folder: (int(runs), int(seeds)) for folder, runs, seeds in row.findall(PAGES[0].read_text(encoding="utf-8"))
    }
    found = {}
    for folder in told:
        rows = json.loads((RESULTS / "summaries" / folder / "runs.json").read_text(encoding="utf-8"))
        rows = rows["runs"] if isinstance(rows, dict) else rows
        found[folder] = (len(rows), len({one["seed"] for one in rows}))
    assert len(told) > 40
    assert told == found


@pytest.mark.parametrize("page", PAGES[2:], ids=lambda page: page.name)
def test_a_day_opens_with_a_summary_of_at_most_five_points(page: Path) -> None:
    head = page.read_text(encoding="utf-8").partition("\n## ")[0]
    assert 1 <= sum(line.startswith("* ") for line in head.splitlines()) <= 5
