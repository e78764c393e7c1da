"""The README's figures equal those of committed rows."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from blocks import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
# Findings wrap; figures do not.
FINDINGS = [
    " ".join(text.split()) for text in re.split(r"^\* \*\*", README.split("## Install")[0], flags=re.MULTILINE)[1:]
]


def rows(finding: str, name: str, label: str) -> Any:
    """The file `name` next to a report that a finding links to."""
    [page] = re.findall(rf"\[{label}\]\((results/[\w/.]+\.md)\)", finding)
    return json.loads((ROOT / page).parent.joinpath(name).read_text(encoding="utf-8"))


def test_the_loss_layer_s_time_and_memory() -> None:
    low, high = map(float, re.findall(r"takes ([\d.]+) to ([\d.]+) of", FINDINGS[0])[0])
    ratios, memory = [], []
    for shape in ("gemma2_2b", "llama_1b3", "mve", "lm_350m"):
        found = rows(FINDINGS[0], f"{shape}.json", "H100")
        by_case = {(row["backend"], row["logits"], row["gradients"]): row for row in found if row["status"] == "ok"}
        for (backend, *case), row in by_case.items():
            if backend == "cce_kahan":
                ratios.append(row["ratio_to_compiled"])
                memory.append(row["extra_mib"] / by_case["compiled", *case]["extra_mib"])
    assert (round(min(ratios), 2), round(max(ratios), 2)) == (low, high)
    assert max(memory) < 0.5, "less than half of its memory"


@pytest.mark.parametrize(
    ("label", "checkpointing", "sentence"),
    [
        ("with checkpointing", "full", r"hold (\d+) sequences of GLA instead of torch.compile's (\d+)"),
        ("without", "none", r"one sequence, (\d+) instead of (\d+)"),
    ],
)
def test_the_largest_batches(label: str, checkpointing: str, sentence: str) -> None:
    answers = rows(FINDINGS[1], "max_batches.json", label)
    largest = {
        answer["loss"]: answer["batch"] for answer in answers if answer["activation_checkpointing"] == checkpointing
    }
    [stated] = re.findall(sentence, FINDINGS[1])
    assert (largest["cce_kahan"], largest["compiled"]) == tuple(map(int, stated))


def test_the_final_losses_of_the_mve() -> None:
    [bound] = map(float, re.findall(r"within ([\d.]+) nats", FINDINGS[2]))
    by_seed: dict[int, dict[str, float]] = {}
    for run in rows(FINDINGS[2], "runs.json", "rows")["runs"]:
        if run["loss_options"].get("accumulate") in (None, "kahan", "native"):
            by_seed.setdefault(run["seed"], {})[run["loss"]] = run["train_loss_nats"]
    assert [len(losses) for losses in by_seed.values()] == [4, 4, 4]
    assert all(max(losses.values()) - min(losses.values()) < bound for losses in by_seed.values())


def test_the_sizes_of_the_models() -> None:
    table = Path(ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    bold = {
        (size, model): figure
        for size, model, figure in re.findall(r"^\| (\w+) \| (\w+) \|.*\*\*([\d.,]+ M)\*\*", table, re.MULTILINE)
    }
    stated = re.findall(r"^\| `(\w+)` \|[^|]+\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", README, re.MULTILINE)
    assert len(stated) == 4
    for model, *figures in stated:
        assert figures == [bold[size, model] for size in ("smoke", "mve", "350m", "1b3")]
