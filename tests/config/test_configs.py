"""Every YAML composes into typed dataclasses. Wrong keys, types and values fail. Every key has a comment."""

import dataclasses
import re
import shlex

import pytest
import yaml
from omegaconf import OmegaConf

from linrnn.config import (
    CONFIG_DIR,
    data_for,
    identity,
    load_config,
    operational_settings,
    read_config,
    run_name,
    to_yaml,
)
from linrnn.config.compose import compose_config, menu_of, options_of
from linrnn.config.manual import manual_of, manual_of_command
from linrnn.config.schema import COMMANDS, MUST_BE_GIVEN, SCHEMAS, option
from linrnn.core.errors import ConfigError
from linrnn.runs.summary import names_of_run

OPTIONS = [(group, option) for group in [*menu_of(), "sweep"] for option in options_of(group)]
NEEDED = {"data=text": ["data.path=some.txt"], "model=fla": ["model.config=delta_net"]}


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_and_its_manual_has_its_keys_and_values(group, option):
    if group == "sweep":  # its points: tests/config/test_grids.py
        assert load_config([f"sweep={option}"], "run_sweep").sweep.name == option
        return
    config = load_config([f"{group}={option}", *NEEDED.get(f"{group}={option}", [])])
    title, text = manual_of(group, option)
    assert title in (f"{group}={option}", f"configs/{group}/{option}.yaml")
    assert text.startswith("# ")
    if group != "experiment":
        assert getattr(getattr(config, group), "name", option) == option
        composed = compose_config([f"{group}={option}"])[group]
        assert yaml.safe_load(text) == yaml.safe_load(OmegaConf.to_yaml(composed))


@pytest.mark.parametrize("group", sorted(SCHEMAS))
def test_a_group_has_a_file_for_every_option_or_for_none(group):
    files = {path.stem for path in (CONFIG_DIR / group).glob("*.yaml")}
    assert options_of(group) == sorted(files or SCHEMAS[group])
    assert "" in SCHEMAS[group] or not files or files == set(SCHEMAS[group])


DATACLASSES = dict(COMMANDS)
DATACLASSES |= {f"{group}={option}": schema for group, all in SCHEMAS.items() for option, schema in all.items()}


@pytest.mark.parametrize("owner", DATACLASSES)
def test_every_key_is_explained(owner):
    for field in dataclasses.fields(DATACLASSES[owner]):
        has_groups = owner in ("train", "run_sweep", "evaluate") or owner.startswith("logger=")
        if field.name not in {*SCHEMAS, "wandb"} or not has_groups:
            assert len(field.metadata["meaning"]) > 8, field.name


@pytest.mark.parametrize("command", ["train", "evaluate", "run_sweep", "generate"])
def test_the_manual_of_a_command_has_its_keys_and_defaults(command):
    shown = yaml.safe_load(manual_of_command(command)[1])
    for field in dataclasses.fields(COMMANDS[command]):
        assert field.name in shown or "meaning" not in field.metadata  # a group
    assert shown.get("seed", 0) == 0


def test_names_are_deterministic_and_complete():
    for model in ("gla", "gated_deltanet", "kda", "transformer"):
        plain = [f"model={model}", "size=mve", "loss=standard"]
        assert run_name(load_config(plain)) == f"{model}-mve-standard-s0"
        assert run_name(load_config([*plain, "trainer.batch_size=32", "seed=3"])) == f"{model}-mve-standard-b32-s3"


def test_a_distributed_run_is_named_after_the_sequences_of_its_steps():
    whole = load_config(["parallel=ddp", "trainer.batch_size=8"])
    cut = load_config(["parallel=ddp", "trainer.batch_size=2", "trainer.accumulation_steps=2"])
    assert run_name(whole, 1) == run_name(cut, 2) == "gla-smoke-cce_kahan-ddp-b8-s0"
    assert identity(whole, 1) == identity(cut, 2)
    assert run_name(cut, 4) == "gla-smoke-cce_kahan-ddp-b16-s0"
    assert identity(cut, 4) != identity(cut, 2)


def test_runs_of_different_identity_have_different_names():
    changes = "trainer.batch_size=4 trainer.seq_len=64 trainer.precision=bf16 trainer.compile=blocks "
    changes += "trainer.compile=model optimizer.lr=0.01 loss.accumulate=fp32 size.num_layers=3 init_from=one "
    changes += "continue_from=one seed=1 data.reset_at_document=true data=stdlib"
    variants = [[], *([change] for change in changes.split())]
    variants += [["data=text", f"data.path={path}"] for path in ("one.txt", "other.txt")]
    configs = [load_config(variant) for variant in variants]
    names = [run_name(config) for config in configs]
    assert len(set(names)) == len(variants), names
    assert len({repr(identity(config)) for config in configs}) == len(variants) - 1, "a text's place is a name alone"
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+", name) for name in names)


def test_how_a_run_is_watched_and_kept_is_no_part_of_its_name():
    plain = load_config()
    changes = ["device=cpu", "logger.wandb.mode=disabled", "trainer.resume=never", "trainer.checkpoint_every=5"]
    changes += ["trainer.valid_every=5", "trainer.log_every=5", "trainer.warmup_measurement_steps=9"]
    changes += ["trainer.keep_checkpoints=9", "trainer.profile_steps=1", "trainer.memory_snapshot=true"]
    changes += ["trainer.kernel_choices=tune"]
    other = load_config(changes)
    assert identity(plain) == identity(other)
    assert run_name(plain) == run_name(other)
    keys = {change.split("=")[0] for change in changes}
    before, after = operational_settings(plain), operational_settings(other)
    assert {key for key in before if before[key] != after[key]} == keys


def test_the_end_of_the_schedule_is_in_the_name_and_the_end_of_the_run_is_not():
    def name(*overrides: str) -> str:
        return run_name(load_config(overrides))

    assert name() == name("schedule.steps=200") == "gla-smoke-cce_kahan-s0"
    assert name("trainer.max_steps=400") == name("schedule.steps=400") == "gla-smoke-cce_kahan-steps400-s0"
    tokens = ("trainer.max_steps=null", f"trainer.max_tokens={400 * 8 * 128 + 9}")
    assert name(*tokens) == "gla-smoke-cce_kahan-steps400-s0"
    constant = name("schedule=constant")
    assert constant == name("schedule=constant", "trainer.max_steps=20") == "gla-smoke-cce_kahan-schedule_constant-s0"
    assert name("schedule=constant", "schedule.steps=20").count("steps20") == 1, "its warm-up follows from it"
    assert len({name(f"trainer.max_steps={steps}") for steps in (20, 60, 100)}) == 3


@pytest.mark.parametrize("loss", sorted(SCHEMAS["loss"]))
def test_a_written_configuration_reads_back_equal(loss, tmp_path):
    config = load_config([f"loss={loss}", "data=stdlib", "optimizer.lr=0.123"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_config(tmp_path / "config.yaml") == config


def test_a_configuration_that_lacks_a_key_is_refused(tmp_path):
    """The key's default may not be what the run had."""
    lines = to_yaml(load_config(["parallel=fsdp"])).splitlines()
    for key in ("seed", "batch_size", "keep_gathered", "entity", "head_k_dim"):
        kept = [line for line in lines if not line.strip().startswith(f"{key}:")]
        (tmp_path / "config.yaml").write_text("\n".join(kept))
        with pytest.raises(ConfigError, match=key):
            read_config(tmp_path / "config.yaml")


def test_data_to_read_is_the_runs_but_its_place_and_what_is_overridden():
    run = load_config(["data=text", "data.path=a b.txt", "data.max_tokens=7", "data.cache_dir=/gone"]).data
    default = load_config(["data=text", "data.path=x"]).data
    assert data_for(run, ()) == dataclasses.replace(run, cache_dir=default.cache_dir)
    # An override wins even if it equals the default. A key without an override keeps the run's value.
    here = data_for(run, ["data.cache_dir=/here", "data.max_tokens=null"])
    assert here == dataclasses.replace(run, cache_dir="/here", max_tokens=None)
    assert data_for(run, ["data=text", "data.path=x"]) == default  # other data of the same kind: nothing is the run's
    assert data_for(run, ["data.vocab_size=9", "data=markov"]).vocab_size == 9


def test_a_command_that_reads_runs_keeps_what_is_said_of_data():
    assert load_config(["checkpoint=x"], "evaluate").data == []
    data = ["data=text", "data.path=x=y.txt", "+data.more=1"]
    config = load_config([*data, "checkpoint=x", "device=cpu"], "evaluate")
    assert (config.data, config.device) == (data, "cpu")
    for wrong, cause in (("database=1", "database"), ("data.path=${oc.env:HOME}", "not computed")):
        with pytest.raises(ConfigError, match=cause):
            load_config(["checkpoint=x", wrong], "evaluate")


def test_the_command_line_beats_an_experiment():
    config = load_config(["experiment=mve", "data=stdlib", "trainer.batch_size=3", "size=smoke"])
    assert (config.trainer.batch_size, config.size.name, config.data.name) == (3, "smoke", "stdlib")
    assert config.trainer.seq_len == 2048


def test_a_command_of_another_package_is_a_dataclass(monkeypatch):
    @dataclasses.dataclass
    class Bench:
        """What it measures."""

        rounds: int = option(30, "timed calls", minimum=2)
        shapes: list[str] = option(["mve"], "shapes of the loss")
        output: str = option(MUST_BE_GIVEN, "where rows go", path="written")

    monkeypatch.setitem(COMMANDS, "bench_of_mine", Bench)
    config = load_config(["shapes=[a,b]", "output=it's, here"], "bench_of_mine")
    assert config == Bench(shapes=["a", "b"], output="it's, here")
    wrong = {("round=3",): "nearest: rounds", ("rounds=1", "output=x"): "minimum of 2", (): "output"}
    for overrides, cause in wrong.items():
        with pytest.raises(ConfigError, match=cause):
            load_config(overrides, "bench_of_mine")
    shown = manual_of_command("bench_of_mine")[1].splitlines()
    assert shown[0] == "# What it measures."
    assert shown[1].split(" # ") == ["rounds: 30                 ", "timed calls; ≥ 2"]


LONG = ["trainer.batch_size=3", "trainer.seq_len=777", "optimizer.beta1=0.81", "optimizer.beta2=0.91"]
LONG += ["optimizer.weight_decay=0.123", "schedule.min_lr_ratio=0.2", "trainer.valid_tokens=4321"]


def test_a_long_name_keeps_the_words_that_fit_and_tells_runs_apart():
    varied = ("optimizer.eps=1e-7", "optimizer.eps=1e-6", "trainer.valid_tokens=1", "trainer.valid_tokens=2")
    names = [run_name(load_config([*LONG, choice])) for choice in varied]
    assert len(set(names)) == len(varied), "a hash stands for the words that do not fit"
    for name in names:
        assert 60 < len(name) <= 80
        assert name.startswith("gla-smoke-cce_kahan-")
        assert "0.81" in name
        assert name.endswith("-s0")


def test_a_summary_lists_every_choice_as_overrides_that_make_the_run():
    config = load_config(LONG)
    choices = names_of_run(config)["choices"]
    assert load_config(shlex.split(choices)) == config
