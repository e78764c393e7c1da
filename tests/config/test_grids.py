"""A sweep's points: each once, in order. The command line overrides the sweep's own values."""

from dataclasses import replace

import pytest

from linrnn.config import CONFIG_DIR, load_config, run_name
from linrnn.config.cli import split_overrides
from linrnn.config.fla import fla_models
from linrnn.config.grids import FROM_COMMAND_LINE, sweep_points
from linrnn.config.schema import SweepConfig
from linrnn.core.errors import ConfigError

SWEEPS = sorted({path.stem for path in (CONFIG_DIR / "sweep").glob("*.yaml")} - {FROM_COMMAND_LINE})
ONE = SweepConfig("one", ["group=one"], [{"loss": ["standard", "cce_kahan"], "seed": [0, 1]}])
OPTIONS = SweepConfig("options", [], [{"loss": ["standard"]}, {"loss": ["cce_kahan"], "loss.accumulate": ["fp32"]}])


def points(sweep: SweepConfig, *overrides: str) -> list[str]:
    return [" ".join(point) for point in sweep_points(sweep, overrides)]


def test_a_grid_is_crossed_in_full_the_last_key_fastest():
    assert points(ONE) == [
        f"group=one loss={loss} seed={seed}" for loss in ("standard", "cce_kahan") for seed in (0, 1)
    ]


def test_the_command_line_replaces_an_axis_and_crosses_lists_of_its_own():
    first = "group=one loss=standard seed=7"
    assert points(ONE, "seed=7", "loss=standard") == [first]
    batches = points(ONE, "seed=7", "loss=standard", "trainer.batch_size=1,2")
    assert batches == [f"{first} trainer.batch_size=1", f"{first} trainer.batch_size=2"]


def test_options_of_a_loss_go_with_that_loss_alone():
    both = points(OPTIONS, "loss=standard,cce_kahan")
    assert both == ["loss=standard", "loss=cce_kahan", "loss=cce_kahan loss.accumulate=fp32"]
    assert points(OPTIONS, "loss=standard") == ["loss=standard"]


def test_a_sweep_without_points_and_an_unreadable_override_are_refused():
    only = SweepConfig("only", [], OPTIONS.grids[1:])
    with pytest.raises(ConfigError, match="no point"):
        sweep_points(only, ["loss=standard"])
    with pytest.raises(ConfigError, match="key=a,b,c"):
        sweep_points(ONE, ["loss"])


@pytest.mark.parametrize("name", SWEEPS)
def test_every_point_of_every_sweep_composes_under_the_sweep_s_group(name):
    sweep = load_config([f"sweep={name}"], "run_sweep").sweep
    assert sweep.name == name
    for grid in sweep.grids:  # a few points of each, including first and last: all would take hundreds of compositions
        points = sweep_points(replace(sweep, grids=[grid]), [])
        lengths = [len(values) for key, values in grid.items() if key != "seed"]
        some = min(len(points), max([2, *lengths]))
        configs = [load_config(points[i * (len(points) - 1) // max(some - 1, 1)]) for i in range(some)]
        assert {config.group for config in configs} == {name}
        assert len(set(map(run_name, configs))) == len(configs)


def test_every_model_of_the_sweep_over_flas_models_is_one_of_flas():
    sweep = load_config(["sweep=fla_models"], "run_sweep").sweep
    models = {value for grid in sweep.grids for value in grid["model.config"]}
    assert models <= set(fla_models())
    assert len(models) == 26


def test_overrides_are_told_apart_by_their_first_word():
    given = ["sweep=mve", "jobs=2", "loss=standard", "trainer.seq_len=64"]
    of_jobs = ["sweep.name=x", "resources.slurm_partition=gpu"]
    own, runs = split_overrides([*given, "trainer.max_steps=3", *of_jobs], "run_sweep")
    assert own == ["sweep=mve", "jobs=2", *of_jobs]
    assert load_config(own, "run_sweep").resources == {"slurm_partition": "gpu"}
    assert runs == [*given[2:], "trainer.max_steps=3"]
