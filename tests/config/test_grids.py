"""A sweep's points: each once, in order. The command line overrides the sweep's own values."""

from collections import Counter
from dataclasses import replace

import pytest

from linrnn.config import CONFIG_DIR, load_config, run_name
from linrnn.config.cli import split_overrides
from linrnn.config.fla.names import fla_models
from linrnn.config.grids import FROM_COMMAND_LINE, sweep_points
from linrnn.config.schema import SweepConfig
from linrnn.core.errors import ConfigError

SWEEPS = sorted({path.stem for path in (CONFIG_DIR / "sweep").glob("*.yaml")} - {FROM_COMMAND_LINE})
ONE = SweepConfig("one", ["group=one"], [{"loss": ["standard", "cce_kahan"], "seed": [0, 1]}])
OPTIONS = SweepConfig("options", [], [{"loss": ["standard"]}, {"loss": ["cce_kahan"], "loss.accumulate": ["fp32"]}])


def points(sweep: SweepConfig, *overrides: str) -> list[str]:
    return [" ".join(point) for point in sweep_points(sweep, overrides)]


def test_a_grid_is_crossed_in_full_the_last_key_fastest() -> None:
    assert points(ONE) == [
        "group=one loss=standard seed=0",
        "group=one loss=standard seed=1",
        "group=one loss=cce_kahan seed=0",
        "group=one loss=cce_kahan seed=1",
    ]


def test_the_command_line_replaces_an_axis_and_crosses_lists_of_its_own() -> None:
    assert points(ONE, "seed=7", "loss=standard") == ["group=one loss=standard seed=7"]
    assert points(ONE, "seed=7", "loss=standard", "trainer.batch_size=1,2") == [
        "group=one loss=standard seed=7 trainer.batch_size=1",
        "group=one loss=standard seed=7 trainer.batch_size=2",
    ]


def test_options_of_a_loss_go_with_that_loss_alone() -> None:
    assert points(OPTIONS, "loss=standard,cce_kahan") == [
        "loss=standard",
        "loss=cce_kahan",
        "loss=cce_kahan loss.accumulate=fp32",
    ]
    assert points(OPTIONS, "loss=standard") == ["loss=standard"]


def test_a_sweep_without_points_and_an_unreadable_override_are_refused() -> None:
    only = SweepConfig("only", [], OPTIONS.grids[1:])
    with pytest.raises(ConfigError, match="no point"):
        sweep_points(only, ["loss=standard"])
    with pytest.raises(ConfigError, match="key=a,b,c"):
        sweep_points(ONE, ["loss"])


@pytest.mark.parametrize("name", SWEEPS)
def test_every_point_of_every_sweep_composes_under_the_sweep_s_group(name: str) -> None:
    sweep = load_config([f"sweep={name}"], "run_sweep").sweep
    assert sweep.name == name
    for grid in sweep.grids:  # a few points of each, including first and last: all would take hundreds of compositions
        points = sweep_points(replace(sweep, grids=[grid]), [])
        longest = max(len(values) for values in grid.values())
        configs = [load_config(points[i * (len(points) - 1) // max(longest - 1, 1)]) for i in range(longest)]
        assert {config.group for config in configs} == {name}
        assert len(set(map(run_name, configs))) == len(configs)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("same_loss", {"compiled", "compiled_nudged", "standard", "liger", "fla", "cce_kahan"}),
        ("summation", {"compiled", "compiled_nudged", "kahan", "fp32", "bf16"}),
        ("apple", {"compiled", "compiled_nudged", "cce_kahan", "cce_filter", "dropped", "cce_apple"}),
    ],
)
def test_a_question_about_losses_has_its_baseline_its_control_and_twelve_seeds(name: str, kinds: set[str]) -> None:
    sweep = load_config([f"sweep={name}"], "run_sweep").sweep
    found = [dict(word.split("=", 1) for word in point) for point in sweep_points(sweep, [])]
    for point in found:
        point["kind"] = "dropped" if "loss.filter_unbiased" in point else point.get("loss.accumulate", point["loss"])
    seeds = Counter((point["kind"], point["seed"]) for point in found)
    assert set(seeds) == {(kind, str(seed)) for kind in kinds for seed in range(12)}
    assert len(found) == len(seeds)
    assert {(point["experiment"], point["model"]) for point in found} == {("mve", "gla")}


def test_the_question_at_350m_has_its_baseline_its_control_and_five_seeds() -> None:
    kinds = {"compiled", "compiled_nudged", "cce_kahan", "cce_filter"}
    found = sweep_points(load_config(["sweep=pretrain_filter"], "run_sweep").sweep, [])
    configs = [load_config([*point, "data=text", "data.path=any"]) for point in found]
    assert Counter(config.loss.name for config in configs) == dict.fromkeys(kinds, 5)
    assert {config.size.name for config in configs} == {"350m"}
    assert {(config.trainer.max_steps, config.trainer.max_tokens) for config in configs} == {(512, None)}
    tokens = {c.trainer.batch_size * c.trainer.accumulation_steps * c.trainer.seq_len for c in configs}
    assert tokens == {8 * 2048}
    filters = [config.loss.filter_if_faster for config in configs if config.loss.name == "cce_filter"]
    assert not any(filters)


def test_every_model_of_the_sweep_over_flas_models_is_one_of_flas() -> None:
    sweep = load_config(["sweep=fla_models"], "run_sweep").sweep
    models = {value for grid in sweep.grids for value in grid["model.config"]}
    assert models <= set(fla_models())
    assert len(models) == 26


def test_overrides_are_told_apart_by_their_first_word() -> None:
    given = ["sweep=mve", "jobs=2", "loss=standard", "hydra/launcher=submitit_local", "hydra.launcher.nodes=1"]
    own, launcher, runs = split_overrides([*given, "trainer.max_steps=3", "sweep.name=x"], "run_sweep")
    assert own == ["sweep=mve", "jobs=2", "sweep.name=x"]
    assert launcher == ["hydra/launcher=submitit_local", "hydra.launcher.nodes=1"]
    assert runs == ["loss=standard", "trainer.max_steps=3"]
