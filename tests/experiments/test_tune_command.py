"""scripts/tune.py: what it calls, what it stores, and what it says when a model cannot run here."""

from collections.abc import Callable
from importlib.metadata import version

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner

from linrnn.config import load_config
from linrnn.config.schema import Config, TuneConfig
from linrnn.core.errors import ConfigError, UnsupportedError
from linrnn.experiments import tuning as tune_kernels
from linrnn.models.tuning.choices import Choices
from linrnn.models.tuning.table import Table, read_table, table_path

VERSIONS = {name: version(name) for name in ("triton", "flash-linear-attention")}
OPTIONS = ("models=[gla,kda]", "sizes=[smoke]", "batch_sizes=[4,8]")


def kernel(x: object, B: int, BT: int) -> None:
    """What is tuned."""


class Called:
    def __init__(self) -> None:
        self.fn, self.arg_names = kernel, ["x", "B", "BT"]
        self.tiles: list[int] = []

    def run(self, *, BT: int, **kwargs: object) -> None:
        self.tiles.append(BT)


def config(*overrides: str) -> TuneConfig:
    loaded: TuneConfig = load_config(overrides, "tune")
    return loaded


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """The only kernel of every model, on a GPU that is not there. KDA cannot run on it."""
    called = Called()
    configs = [triton.Config({"BT": 16}), triton.Config({"BT": 32})]

    tuner = Autotuner(called, called.arg_names, configs, ["B"], None, None)
    Choices(tuner)

    def do_bench(call: Callable[[], None], quantiles: object, **_: object) -> list[float]:
        call()
        return [1.0 / called.tiles[-1]] * 3

    monkeypatch.setattr("triton.testing.do_bench", do_bench)

    def call_kernels(run: Config) -> None:
        if run.model.name == "kda":
            raise UnsupportedError("it cannot run here", "elsewhere")
        tuner.run(x=torch.empty(1), B=run.trainer.batch_size, grid=(1,), warmup=False)

    monkeypatch.setattr(tune_kernels, "gpu_name", lambda: "a GPU")
    monkeypatch.setattr(tune_kernels, "gpu_capability", lambda: "9.0")
    monkeypatch.setattr(tune_kernels, "compile_all", lambda *_: None)
    monkeypatch.setattr(tune_kernels, "call_kernels", call_kernels)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return called


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_tuned():
    with pytest.raises(UnsupportedError, match="sees none"):
        tune_kernels.tune(config(), [], print)


def test_choices_are_stored_and_what_failed_is_named(called, tmp_path):
    lines: list[str] = []
    options = (*OPTIONS, f"output_dir={tmp_path}")
    with pytest.raises(ConfigError, match="2 of 4 failed: kda smoke, B = 4, kda smoke, B = 8") as failure:
        tune_kernels.tune(config(*options, "models=[gla,kda]"), [], lines.append)
    assert "choices of all others are stored; leave these out, or mend them" in failure.value.remedy
    stored = read_table("a GPU", version("triton"), tmp_path)
    assert stored is not None
    assert stored.versions == VERSIONS
    name, keys = next(iter(stored.kernels.items()))
    assert name == f"{__name__}:kernel"
    assert {key: choice.split()[0] for key, choice in keys.items()} == {"B=4 float32": "BT=32", "B=8 float32": "BT=32"}
    assert "kda smoke, B = 4 failed: it cannot run here" in lines
    assert lines[-1].startswith(f"wrote {table_path('a GPU', version('triton'), tmp_path)}: 2 choices of 1 kernels")
    called.tiles.clear()
    only_gla = config(*options, "models=[gla]", "batch_sizes=[4,8,16]")
    tune_kernels.tune(only_gla, [], lines.append)
    assert called.tiles == [32, 32, 16, 32, 32], "only the new batch is measured"
    called.tiles.clear()
    tune_kernels.tune(config(*options, "models=[gla]", "again=true"), [], lines.append)
    assert len(called.tiles) == 6, "again measures all"


def test_a_table_of_other_versions_is_not_mixed_with_new_choices(called, tmp_path):
    Table("a GPU", {**VERSIONS, "flash-linear-attention": "0.1"}, {"old:kernel": {"": "BT=1"}}).write(tmp_path)
    options = (*OPTIONS, "models=[gla]", f"output_dir={tmp_path}")
    with pytest.raises(ConfigError, match=r"was made with triton .*, flash-linear-attention 0\.1"):
        tune_kernels.tune(config(*options), [], print)
    tune_kernels.tune(config(*options, "again=true"), [], print)
    stored = read_table("a GPU", version("triton"), tmp_path)
    assert stored is not None
    assert stored.versions == VERSIONS
    assert list(stored.kernels) == [f"{__name__}:kernel"]
    assert called.tiles


def test_targets_are_all_combinations_with_few_layers():
    found = tune_kernels.targets(config(*OPTIONS), ["trainer.seq_len=64"])
    assert [target.name for target in found] == [f"{m} smoke, B = {b}" for m in ("gla", "kda") for b in (4, 8)]
    run: Config = load_config([*found[0].overrides, "device=cpu"])
    assert (run.size.num_layers, run.trainer.batch_size, run.trainer.seq_len) == (tune_kernels.LAYERS, 4, 64)
    one = ["model=fla", "model.config=delta_net", "size=mve", "trainer.batch_size=2"]
    assert [target.name for target in tune_kernels.targets(config(), one)] == ["fla mve, B = 2"]
    with pytest.raises(ConfigError, match="at least one value"):
        tune_kernels.targets(config("models=[]"), [])


@pytest.mark.parametrize("reset", [False, True])
def test_a_step_of_the_blocks_runs(reset):
    options = ["device=cpu", "size.num_layers=2", "trainer.batch_size=2", "trainer.seq_len=16"]
    run: Config = load_config([*options, f"data.reset_at_document={str(reset).lower()}"])
    batch = tune_kernels.batch_of(run)
    assert batch.input_ids.shape == ((1, 32) if reset else (2, 16))
    assert (None if batch.cu_seqlens is None else batch.cu_seqlens.tolist()) == ([0, 8, 16, 24, 32] if reset else None)
    tune_kernels.call_kernels(run)
