"""benchmarks/flame_run.py: what flame is told, with a stand-in for its package; rows become a page and a picture."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import flame_run
from benchmarks.flame_run import BenchConfig, Row, run_benchmark, write_report
from linrnn.config import load_config
from linrnn.core.errors import ConfigError, LinrnnError

# Reads what flame reads, and says which loss FLA would compute. It trains nothing.
STAND_IN = """
import json, sys, tomllib
from pathlib import Path
config = tomllib.loads(Path(sys.argv[sys.argv.index("--job.config_file") + 1]).read_text())
model = json.loads(Path(config["model"]["config"]).read_text())
folder = Path(config["job"]["dump_folder"]) / "tb"
folder.mkdir(parents=True)
ours = "cce_kernels" in sys.modules
(folder / "told.json").write_text(json.dumps({"config": config, "model": model, "ours": ours}))
"""
TOML = "[model]\n[job]\n[training]\nseed = 42\nsteps = 20480\n[optimizer]\neps = 1e-15\nlr = 3e-4\n[lr_scheduler]\n"
TOML += "[checkpoint]\nenable_checkpoint = true\n[profiling]\n[metrics]\nenable_wandb = true\n"


def config_of(folder: Path, *overrides: str) -> BenchConfig:
    small = ["steps=2", "hidden_size=64", "layers=1", "vocab_size=300", "text_mib=1", "device=cpu"]
    return load_config([*small, f"flame={folder / 'clone'}", f"output_dir={folder / 'out'}", *overrides], "bench_flame")


def clone(folder: Path, train: str = STAND_IN) -> None:
    package = folder / "clone" / "flame"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "train.py").write_text(train)
    (package / "models" / "fla.toml").write_text(TOML)


@pytest.fixture(autouse=True)
def _without_torchrun(monkeypatch) -> None:
    monkeypatch.setattr(flame_run, "LAUNCH", [sys.executable, "-m"])  # seconds less for every run


def test_every_loss_is_one_run_of_flame_and_only_ours_is_registered(tmp_path, monkeypatch):
    from transformers import AutoTokenizer  # seconds, which only this test shall pay

    clone(tmp_path)
    told = {}

    def logged(folder: Path, loss: str, run_id: str) -> list[Row]:
        told[loss] = json.loads((folder / "told.json").read_text())
        config = told[loss]["config"]
        first, *_ = Path(config["training"]["data_files"]).read_text().splitlines()
        text = json.loads(first)["text"]
        tokenizer = AutoTokenizer.from_pretrained(config["model"]["tokenizer_path"])
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        return [Row(loss, run_id, step, 9.0 - step + (loss == "cce_kahan") / 8, 1e3, 1.5, 2.0) for step in (1, 2)]

    monkeypatch.setattr(flame_run, "logged", logged)
    rows = run_benchmark(config_of(tmp_path))
    assert [(row.loss, row.step) for row in rows] == [(loss, step) for loss in flame_run.LOSSES for step in (1, 2)]
    fused = {loss: run["model"]["fuse_linear_cross_entropy"] for loss, run in told.items()}
    assert fused == {"fla": True, "cce_kahan": True, "fla_logits": False}
    assert {loss: run["ours"] for loss, run in told.items()} == {"fla": False, "cce_kahan": True, "fla_logits": False}
    theirs, ours = (told[loss]["config"] for loss in ("fla", "cce_kahan"))
    assert theirs.pop("job") != ours.pop("job")
    assert theirs == ours, "nothing differs but where a run writes, and the loss"
    assert (ours["optimizer"]["eps"], ours["training"]["seed"]) == (1e-15, 42), "as flame's own configuration says"
    assert (ours["training"]["steps"], ours["checkpoint"], ours["metrics"]["enable_wandb"]) == (
        2, {"enable_checkpoint": False}, False,
    )  # fmt: skip
    page, picture = write_report(tmp_path / "out")
    assert "| `cce_kahan` | 7.1250 | 0.1250 | 1,000 | 1.50 |" in page.read_text()
    assert picture.stat().st_size > 1000


def test_a_failed_run_is_an_error_that_shows_its_last_lines(tmp_path, capsys):
    clone(tmp_path, "raise SystemExit('no such thing')\n")
    with pytest.raises(LinrnnError, match="flame's run with fla failed"):
        run_benchmark(config_of(tmp_path, "losses=[fla]"))
    assert "no such thing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [("flame=/nowhere", "git clone"), ("losses=[liger]", "choose from fla, cce_kahan, fla_logits")],
)
def test_what_is_missing_or_unknown_is_an_error(tmp_path, override, message):
    clone(tmp_path)
    with pytest.raises(ConfigError, match=message):
        run_benchmark(config_of(tmp_path, override))
