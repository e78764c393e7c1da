"""Bad input ends in a line of cause, a line of remedy and the documented exit code. Nothing is written or lost."""

import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from linrnn.config import last_of_each, load_config
from linrnn.config.bounds import check_outputs
from linrnn.core.errors import DataError, LinrnnError, OutOfMemoryError, StorageError, UnsupportedError
from linrnn.report.runs import read_runs
from linrnn.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def error_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """A command's standard error without the progress of data preparation."""
    return [line for line in done.stderr.strip().splitlines() if not line.startswith("data: ")]


@pytest.mark.parametrize(
    ("overrides", "code", "cause", "remedy"),
    [
        (["trainer.max_steps=null"], 2, "no end", "give one"),
        (["init_from=nowhere/at_all"], 3, "nowhere/at_all", ""),
        (["loss=liger"], 4, "liger", "loss="),
        (["data=text", "data.path=missing.txt"], 3, "missing.txt", ""),
        (["trainer.seq_len=50000"], 3, "50,001", "seq_len"),
        (["results_dir=/proc/nowhere"], 7, "cannot be written", ""),
        pytest.param(["device=cuda"], 4, "sees no GPU", "device=cpu", marks=WITHOUT_GPU),
    ],
)
def test_refused(overrides, code, cause, remedy, command_here, small, tmp_path):
    if any(o.startswith("data=") for o in overrides):
        base = [o for o in small() if not o.startswith(("data.n_",))]
    else:
        base = small()
    done = command_here("train.py", *last_of_each([*base, *overrides]))
    error = error_lines(done)
    assert done.returncode == code, done.stderr + done.stdout
    assert len(error) == 2, done.stderr
    assert cause in error[0]
    assert error[1].startswith("  -> ")
    assert remedy in error[1]
    runs = [path for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert not runs, f"nothing is left behind: {runs}"


@pytest.mark.parametrize(
    ("script", "argument", "cause", "remedy"),
    [
        ("breakdown", "dry_run=true", "dry_run", "train.py … dry_run=true"),
        ("evaluate", "results/summaries", "'results/summaries' cannot be read", "KEY=results/summaries"),
        ("evaluate", "checkpoint=nowhere", "checkpoint=nowhere is no directory", "name a run's directory"),
        ("../benchmarks/parallel", "steps=1", "torchrun", "torchrun --nproc-per-node=N benchmarks/parallel.py"),
    ],
)
def test_what_a_script_does_not_take_is_refused(script, argument, cause, remedy, command_here):
    done = command_here(f"scripts/{script}.py", *argument.split())
    error, hint = done.stderr.strip().splitlines()
    assert done.returncode == 2
    assert cause in error
    assert remedy in hint


def test_a_reader_that_has_gone_is_no_error():
    """In a new interpreter, which also flushes its output when it ends."""
    command = [sys.executable, "train.py", "--help"]
    fresh = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert fresh.stdout
    assert fresh.stderr
    fresh.stdout.close()
    assert fresh.stderr.read() == ""
    assert fresh.wait() == 128 + signal.SIGPIPE


def test_the_traceback_is_there_for_the_asking(command_here):
    assert "Traceback" not in command_here("train.py", "model=gal").stderr
    assert "Traceback" in command_here("train.py", "model=gal", HYDRA_FULL_ERROR="1").stderr


ENDS = {"out_of_memory": (OutOfMemoryError, 5), "unsupported": (UnsupportedError, 4), "failed": (LinrnnError, 1)}
FULL_CPU = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
ILLEGAL = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("raised", "status", "cause", "remedy"),
    [
        (torch.OutOfMemoryError("20 GiB"), "out_of_memory", "memory at step 1: .*20 GiB", "trainer.batch_size=1"),
        (FULL_CPU, "out_of_memory", "DefaultCPUAllocator", "trainer.batch_size=1"),
        ("shared memory", "unsupported", r"gla with model\.chunk_size=128 .*30000.*23244", "smaller model.chunk_size"),
        (ILLEGAL, "failed", "memory that is not its own, at step 1 or just before", "CUDA_LAUNCH_BLOCKING=1"),
    ],
)
def test_an_error_in_a_step_ends_the_run_with_its_status_and_what_to_do(
    raised, status, cause, remedy, small, monkeypatch, capsys
):
    from triton.runtime.errors import OutOfResources

    kind, code = ENDS[status]
    if raised == "shared memory":
        raised = OutOfResources(30_000, 23_244, raised)
    trainer = Trainer(load_config(small("model.chunk_size=128", "trainer.seq_len=300")))
    monkeypatch.setattr(trainer, "_forward_backward", Mock(side_effect=raised))
    with pytest.raises(kind, match=cause) as error:
        trainer.fit()
    assert remedy in error.value.remedy
    assert error.value.exit_code == code
    assert ("memory by component when it ran out" in capsys.readouterr().out) == (status == "out_of_memory")
    assert trainer.directory.read_summary()["status"] == status
    if status == "failed":
        assert error.value.__cause__ is raised, "the traceback shows the call"


def test_a_results_directory_on_a_file_is_noticed_before_anything_is_imported(command, small, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place in ("file", "file/below/it", "link"):
        with pytest.raises(StorageError, match="is a file or a broken link"):
            check_outputs(load_config(small(f"results_dir={tmp_path}/{place}")))
    check_outputs(load_config(small(f"results_dir={tmp_path}/not/yet/there")))
    assert not (tmp_path / "not").exists()
    program = (
        "import sys, runpy; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: print('torch' in sys.modules)"
    )
    arguments = [sys.executable, "-c", program, "train.py", *small(f"results_dir={tmp_path}/file/x")]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "False\n"), done.stderr
    assert command("scripts/export.py", "checkpoint=x", f"output={tmp_path}/file/x").returncode == 7
    assert command("scripts/report.py", f"output_dir={tmp_path}/file", "group=x").returncode == 7


def test_a_broken_summary_is_named_by_the_report(small, tmp_path):
    for seed in range(2):
        Trainer(load_config(small(f"seed={seed}", "run_name=run" + str(seed)))).fit()
    group = tmp_path / "results" / "default"
    for text, cause in (('{"status": ', "cannot be read"), ('{"a": 1}', "lacks status"), ("[" * 100_000, "be read")):
        (group / "run1" / "summary.json").write_text(text)
        with pytest.raises(DataError, match=cause) as error:
            read_runs(group)
        assert str(group / "run1" / "summary.json") in error.value.cause
        assert "trainer.resume=never" in error.value.remedy
        with pytest.raises(DataError, match=cause):
            Trainer(load_config(small("seed=1", "run_name=run1"))).fit()


def test_a_dry_run_says_what_a_gpu_changes_and_what_is_unknown(command_here, small, tmp_path):
    done = command_here("train.py", *small("dry_run=true", "trainer.float8=blocks"))
    assert done.returncode == 0, done.stderr
    assert "unknown: the formulas describe bf16, not trainer.float8" in done.stdout
    assert "here in fp32; trainer.precision=bf16_autocast shows what a GPU takes" in done.stdout
    done = command_here("train.py", *small("dry_run=true", "trainer.precision=bf16_autocast"))
    assert "here in" not in done.stdout
    assert "cce_kahan, bf16_autocast on cpu" in done.stdout
    assert "nothing was run" in done.stdout
    assert not (tmp_path / "results").exists()
