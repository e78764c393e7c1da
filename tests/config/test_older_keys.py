"""Keys of earlier versions: refused on a command line, renamed in files. No run gets another name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from linrnn.config import load_config, read_config, run_name, to_yaml
from linrnn.config.naming import identity
from linrnn.config.older_keys import NEW_NAMES
from linrnn.core.errors import ConfigError
from linrnn.runs.summary import names_of_run
from linrnn.study import older_rows
from linrnn.training.checkpoint import found, read_state
from linrnn.training.checkpoint.files import write_state
from linrnn.training.trainer import Trainer

OLD_NAMES = {new: old for old, new in NEW_NAMES.items()}
NEW_OF_FSDP = {"blocks_together", "keep_gathered"}
# What every schedule of an earlier version had, whether or not it used it.
ALWAYS = {"schedule.min_lr_ratio": 0.1, "schedule.decay_fraction": 0.2}


def as_before(config: Any) -> dict[str, Any]:
    """A configuration as an earlier version wrote it."""
    raw = yaml.safe_load(to_yaml(config))
    schedule = {"min_lr_ratio": 0.1, "decay_fraction": 0.2, **raw.pop("schedule")}
    for key, value in schedule.items():
        raw["optimizer"][OLD_NAMES[f"schedule.{key}"].removeprefix("optimizer.")] = value
    raw["model"].pop("shared_projection_rank", None)
    raw["trainer"]["compile_blocks"] = raw["trainer"].pop("compile") == "blocks"
    return raw


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("optimizer.schedule=wsd", "schedule=wsd"),
        ("+optimizer.schedule=wsd", "schedule=wsd"),
        ("optimizer.schedule_steps=7", "schedule.steps=7"),
        ("optimizer.warmup_steps=7", "schedule.warmup_steps=7"),
        ("optimizer.min_lr_ratio=0.2", "schedule.min_lr_ratio=0.2"),
        ("optimizer.decay_fraction=0.2", "schedule.decay_fraction=0.2"),
        ("trainer.compile_blocks=true", "trainer.compile=blocks"),
        ("trainer.compile_blocks=False", "trainer.compile=none"),
    ],
)
def test_an_old_key_is_refused_with_the_new_one(old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=r"\w+\.\w+ has a new name") as error:
        load_config([old])
    assert error.value.remedy == f"use {new}"


NAME_OF_COMPILED = "gla-smoke-cce_kahan-reset_at_document_True-compile_blocks_True-s0"


# Names that the version before the group `schedule` gave.
@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "gla-smoke-cce_kahan-s0"),
        (["schedule=wsd"], "gla-smoke-cce_kahan-schedule_wsd-s0"),
        (["trainer.compile=blocks", "data.reset_at_document=true"], NAME_OF_COMPILED),
        (
            ["schedule=wsd", "optimizer.lr=0.01", "schedule.steps=400", "schedule.decay_fraction=0.3"],
            "gla-smoke-cce_kahan-lr0.01-schedule_wsd-steps400-decay_fraction_0.3-s0",
        ),
        (
            ["schedule=constant", "schedule.warmup_steps=0", "trainer.batch_size=4", "parallel=ddp"],
            "gla-smoke-cce_kahan-ddp-schedule_constant-warmup_steps_0-b4-s0",
        ),
    ],
)
def test_no_run_gets_another_name(overrides: list[str], name: str) -> None:
    assert run_name(load_config(overrides)) == name


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_a_config_yaml_of_an_earlier_version_reads_as_todays(schedule: str, tmp_path: Path) -> None:
    compiled = "blocks" if schedule == "wsd" else "none"
    config = load_config([f"schedule={schedule}", "schedule.warmup_steps=3", f"trainer.compile={compiled}"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(as_before(config)))
    assert read_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_a_run_of_an_earlier_version_goes_on(small: Callable[..., list[str]], schedule: str) -> None:
    plan = small("model=transformer", f"schedule={schedule}", "schedule.steps=4")
    first = Trainer(load_config([*plan, "trainer.max_steps=2"]))
    first.fit()
    directory, [step] = first.directory.path, found(first.directory.checkpoints)
    there = {**ALWAYS, **json.loads((directory / "identity.json").read_text()), "trainer.compile": False}
    del there["model.shared_projection_rank"]
    (directory / "identity.json").write_text(json.dumps({OLD_NAMES.get(key, key): there[key] for key in there}))
    state = read_state(step)
    state["schedule"] = {"min_lr_ratio": 0.1, **state["schedule"]}
    write_state(step, state)
    assert Trainer(load_config([*plan, "trainer.max_steps=3"])).fit()["steps"] == 3
    assert json.loads((directory / "identity.json").read_text()).keys() == identity(load_config(plan)).keys()


# What the version before the group `schedule` recorded.
ADAMW = (
    "optimizer.name=adamw optimizer.lr=0.003 optimizer.beta1=0.9 optimizer.beta2=0.95 optimizer.eps=1e-08 "
    "optimizer.weight_decay=0.1 optimizer.max_grad_norm=1.0"
)
REST = (
    "continue_from=None data.reset_at_document=False size.tie_embeddings=True trainer.valid_tokens=100000 "
    "trainer.compile_blocks=False trainer.deterministic=False"
)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_a_row_of_an_earlier_version_compares_with_todays(schedule: str) -> None:
    old = (
        f"{ADAMW} optimizer.schedule={schedule} optimizer.schedule_steps=200 optimizer.warmup_steps=None "
        f"optimizer.min_lr_ratio=0.1 optimizer.decay_fraction=0.2 init_from=a b {REST}"
    )
    new = names_of_run(load_config([f"schedule={schedule}", "init_from=a b"]), "name", 1)["training"]
    assert old != new
    assert older_rows.without_horizon(old) == older_rows.without_horizon(new)
    assert older_rows.horizon({"training": old}) == older_rows.horizon({"training": new}) == 200
    assert older_rows.without_horizon("no keys at all") == "no keys at all"


def test_a_sharded_run_of_an_earlier_version_gathered_blocks_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    config = load_config(["parallel=fsdp"])
    lines = to_yaml(config).splitlines()
    path.write_text("\n".join(line for line in lines if line.split(":")[0].strip() not in NEW_OF_FSDP))
    assert len(path.read_text().splitlines()) == len(lines) - len(NEW_OF_FSDP)
    assert read_config(path) == config
    assert not NEW_OF_FSDP & {key.rpartition(".")[2] for key in identity(config, 2)}
