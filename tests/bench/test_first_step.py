"""benchmarks/first_step.py: a real run of train.py up to its first step, its page, and what is refused."""

import json
from pathlib import Path

import pytest

from benchmarks import first_step
from benchmarks.first_step import CACHES, BenchConfig, read_rows, run_benchmark, write_report
from linrnn.config import load_config
from linrnn.core.errors import DataError, LinrnnError


def config_of(folder: Path, line: str, *overrides: str) -> BenchConfig:
    own = [f"lines=['{line}']", "repeats=1", "device=cpu", f"output_dir={folder}"]
    return load_config([*own, *overrides], "bench_first_step")


def small(folder: Path) -> str:
    return (
        "model=gla size=smoke loss=standard trainer.batch_size=2 trainer.seq_len=16 trainer.valid_tokens=512 "
        f"data=markov data.n_tokens=4096 data.n_valid_tokens=1024 data.cache_dir={folder}"
    )


def test_a_run_is_ended_after_its_first_step_and_its_stages_follow_each_other(tmp_path, capsys):
    run_benchmark(config_of(tmp_path, small(tmp_path / "data")))
    [row] = read_rows(tmp_path)
    assert (row.model, row.size, row.loss, row.number) == ("gla", "smoke", "standard", 1)
    assert list(row.seconds_to) == ["libraries", "model", "weights", "first_step"], "a CPU has no kernels to compile"
    assert list(row.seconds_to.values()) == sorted(row.seconds_to.values())
    assert 0 < row.seconds - row.seconds_to["first_step"] < 5, "Python's own start"
    assert (row.stored, row.near, row.tuned) == (None, None, None)
    assert capsys.readouterr().out == f"1 of 1, gla smoke: first step after {row.seconds:.1f} s\n"
    [page] = write_report(tmp_path)
    assert "GLA smoke, standard: " in page.read_text()
    [run] = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert f"1. `{run['command']}`: commit" in page.read_text()


def test_a_run_finds_no_compiled_kernel(tmp_path, monkeypatch, capsys):
    """Whatever the machine has compiled before."""
    program = tmp_path / "train.py"
    program.write_text(
        "import os, sys\n"
        f"print([(name, os.environ[name], os.listdir(os.path.dirname(os.environ[name]))) for name in {CACHES!r}])\n"
        "sys.exit(3)\n"
    )
    monkeypatch.setattr(first_step, "TRAIN", program)
    for name in CACHES:
        monkeypatch.setenv(name, str(tmp_path / "filled"))
    with pytest.raises(LinrnnError, match="ended with exit code 3 before the end of its first step") as failure:
        run_benchmark(config_of(tmp_path, small(tmp_path / "data")))
    assert failure.value.exit_code == 3, "the kind of failure is that of the run"
    said = capsys.readouterr().out
    assert str(tmp_path / "filled") not in said
    assert said.count("[])") == len(CACHES), "folders of this run alone, and empty"
    with pytest.raises(DataError, match="no rows"):
        read_rows(tmp_path)
