"""Bad input ends in a line of cause, a line of remedy and the documented exit code. Nothing is written or lost."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import run_script, start

from linrnn.config import last_of_each, load_config
from linrnn.config.bounds import check_outputs
from linrnn.core.errors import DataError, LinrnnError, OutOfMemoryError, StorageError, UnsupportedError
from linrnn.report.runs import read_runs
from linrnn.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
Command = Callable[..., subprocess.CompletedProcess[str]]


def error_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """A command's standard error without the progress of data preparation."""
    return [line for line in done.stderr.strip().splitlines() if not line.startswith("data: ")]


@pytest.mark.parametrize(
    ("overrides", "code", "cause", "remedy"),
    [
        (["model=gal"], 2, "model=gal", "gla"),
        (["trainer.batchsize=4"], 2, "trainer.batchsize", "trainer.batch_size"),
        (["trainer.batch_size=0"], 2, "trainer.batch_size=0", "1 or more"),
        (["trainer.max_steps=null"], 2, "no end", "give one"),
        (["trainer.max_tokens=7"], 2, "less than one step", "raise trainer.max_tokens"),
        (["size.vocab_size=8"], 2, "smaller than the data's vocabulary", "size.vocab_size="),
        (["schedule.warmup_steps=500"], 2, "warmup_steps=500", "lower"),
        (["init_from=nowhere/at_all"], 3, "nowhere/at_all", ""),
        (["memory_budget_gib=80"], 2, "needs a GPU", "use memory_budget_gib=null"),
        (["trainer.memory_snapshot=true"], 4, "memory_snapshot", "memory_snapshot=false"),
        (["loss=liger"], 4, "liger", "loss="),
        (["logger.wandb.mode=online"], 4, "no API key", "offline"),
        (["data=text", "data.path=missing.txt"], 3, "missing.txt", ""),
        (["trainer.seq_len=50000"], 3, "50,001", "seq_len"),
    ],
)
def test_refused(
    overrides: list[str],
    code: int,
    cause: str,
    remedy: str,
    command_here: Command,
    small: Callable[..., list[str]],
    tmp_path: Path,
) -> None:
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
        ("find_max_batch", "dry_run=true", "dry_run", "train.py … dry_run=true"),
        ("breakdown", "dry_run=true", "dry_run", "train.py … dry_run=true"),
        ("prepare_data", "dry_run=true", "dry_run", "drop"),
        ("maintain/parameter_table", "size=mve", "size=mve", "without any"),
        ("profile_sparsity", "checkpoints=results/x", "is a list", "checkpoints=[results/x]"),
        ("profile_sparsity", "checkpoints=[]", "names no run", "checkpoints=[results/default/RUN]"),
        ("evaluate", "checkpoint=x split=train checkpoint=y", "checkpoint is given twice (x, y)", "keep one"),
        ("sweep", "sweep=mve loss=liger jobs=2 loss=fla,kahan", "loss is given twice (liger, fla,kahan)", "keep one"),
        ("evaluate", "results/summaries", "results/summaries stands without its key", "checkpoint=results/summaries?"),
        ("report", "results/summaries", "results/summaries stands without its key", "summary=results/summaries?"),
        ("evaluate", "checkpoint=nowhere", "checkpoint=nowhere is no directory", "name a run's directory"),
        ("../benchmarks/parallel", "steps=1", "torchrun", "torchrun --nproc-per-node=N benchmarks/parallel.py"),
        ("../benchmarks/steps", "roundes=3", "roundes: there is no such key", "nearest: rounds"),
    ],
)
def test_what_a_script_does_not_take_is_refused(
    script: str, argument: str, cause: str, remedy: str, command_here: Command
) -> None:
    done = command_here(f"scripts/{script}.py", *argument.split())
    error, hint = done.stderr.strip().splitlines()
    assert done.returncode == 2
    assert cause in error
    assert remedy in hint


@pytest.mark.parametrize("script", ["maintain/parameter_table", "generate"])
def test_help_says_what_a_command_does_and_runs_nothing(script: str, command_here: Command) -> None:
    done = command_here(f"scripts/{script}.py", "--help")
    assert done.returncode == 0
    assert f"usage: python scripts/{script}.py" in done.stdout
    assert "\nwrote" not in f"\n{done.stdout}"
    assert "groups:\n\n" not in done.stdout


def test_a_script_without_a_configuration_answers_help(command_here: Command) -> None:
    done = command_here("scripts/maintain/fuzz_loss.py", "--help")
    assert done.returncode == 0
    assert "scripts/maintain/fuzz_loss.py" in done.stdout


def _without_a_reader(script: str, arguments: list[str], errors: Path) -> None:
    """In another process: run a command whose output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    run_script(script, arguments, Path(f"/dev/fd/{writer}"), errors)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [("train.py", "--help"), ("scripts/maintain/parameter_table.py",)])
def test_a_reader_that_has_gone_is_no_error(arguments: tuple[str, ...], tmp_path: Path) -> None:
    if "--help" in arguments:  # quick in a new interpreter, which also flushes its output when it ends
        fresh = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert fresh.stdout
        assert fresh.stderr
        fresh.stdout.close()
        errors, code = fresh.stderr.read(), fresh.wait()
    else:
        process = start(_without_a_reader, arguments[0], list(arguments[1:]), tmp_path / "errors")
        process.join()
        errors, code = (tmp_path / "errors").read_text(), process.exitcode
    assert errors == ""
    assert code == 128 + signal.SIGPIPE


def test_a_gpu_where_there_is_none(command: Command, small: Callable[..., list[str]]) -> None:
    done = command("train.py", *small("device=cuda"))
    assert done.returncode == 4
    assert "sees no GPU" in done.stderr
    assert "device=cpu" in done.stderr


def test_the_traceback_is_there_for_the_asking(command_here: Command) -> None:
    assert "Traceback" not in command_here("train.py", "model=gal").stderr
    assert "Traceback" in command_here("train.py", "model=gal", HYDRA_FULL_ERROR="1").stderr


def test_a_full_disk_ends_the_run_with_its_cause(
    small: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from linrnn.training.checkpoint import write

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    trainer = Trainer(load_config(small()))
    monkeypatch.setattr(write, "save_file", no_space)
    with pytest.raises(StorageError, match="No space left") as error:
        trainer.fit()
    assert error.value.exit_code == 7
    assert trainer.directory.read_summary()["status"] == "failed"
    assert not list(trainer.directory.checkpoints.iterdir()), "no half-written checkpoint"


@pytest.mark.parametrize(
    "exception",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: Tried to allocate 20 bytes"),
        MemoryError("Tried to allocate"),
    ],
    ids=["cuda", "cpu", "python"],
)
def test_out_of_memory_names_components_and_what_to_lower(
    exception: Exception,
    small: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = Trainer(load_config(small()))

    def exhausted(*_: object) -> None:
        raise exception

    monkeypatch.setattr(trainer, "_forward_backward", exhausted)
    with pytest.raises(OutOfMemoryError, match="Tried to allocate") as error:
        trainer.fit()
    assert error.value.exit_code == 5
    assert "trainer.batch_size=1" in error.value.remedy
    assert "parameters" in capsys.readouterr().out
    assert trainer.directory.read_summary()["status"] == "out_of_memory"


def test_a_kernel_too_large_for_the_gpu_is_unsupported_with_the_chunk_size_to_lower(
    small: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = pytest.importorskip("triton.runtime.errors", reason="Triton is on Linux")
    trainer = Trainer(load_config(small("model.chunk_size=128", "trainer.seq_len=300")))

    def too_large(*_: object) -> None:
        raise errors.OutOfResources(300_000, 232_448, "shared memory")

    monkeypatch.setattr(trainer, "_forward_backward", too_large)
    with pytest.raises(UnsupportedError, match=r"gla with model\.chunk_size=128 .*300000.*232448") as error:
        trainer.fit()
    assert "smaller model.chunk_size" in error.value.remedy
    summary = trainer.directory.read_summary()
    assert (summary["status"], "shared memory" in summary["reason"]) == ("unsupported", True)


def test_an_illegal_access_on_the_gpu_says_how_to_find_the_kernel(
    small: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(load_config(small()))

    def faulty(*_: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(trainer, "_forward_backward", faulty)
    with pytest.raises(LinrnnError, match="accessed memory that is not its own, at step 1 or just before") as error:
        trainer.fit()
    assert error.value.exit_code == 1
    assert "CUDA_LAUNCH_BLOCKING=1" in error.value.remedy
    assert isinstance(error.value.__cause__, RuntimeError), "the traceback shows the call"
    summary = trainer.directory.read_summary()
    assert (summary["status"], "illegal memory access" in summary["reason"]) == ("failed", True)


def test_two_processes_do_not_share_a_run_directory(command: Command, small: Callable[..., list[str]]) -> None:
    holder = Trainer(load_config(small()))
    holder.directory.open()
    done = command("train.py", *small())
    assert done.returncode == 2
    assert "another process" in done.stderr
    holder.directory.close()
    assert holder.fit()["status"] == "finished"


def test_a_read_only_results_directory(command: Command, small: Callable[..., list[str]]) -> None:
    done = command("train.py", *small("results_dir=/proc/nowhere"))
    assert done.returncode == 7
    assert "cannot be written" in done.stderr
    assert len(error_lines(done)) == 2


def test_a_results_directory_on_a_file_is_noticed_before_anything_is_imported(
    command: Command, small: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place, cause in (("file", "is a file"), ("file/below/it", "is a file"), ("link", "is a link to nothing")):
        with pytest.raises(StorageError, match=cause):
            check_outputs(load_config(small(f"results_dir={tmp_path}/{place}")))
    check_outputs(load_config(small(f"results_dir={tmp_path}/not/yet/there")))
    assert not (tmp_path / "not").exists()
    program = (
        "import sys, runpy; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "train.py", *small(f"results_dir={tmp_path}/file/x")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "False\n"), done.stderr
    assert "results_dir: " in done.stderr
    for arguments in (
        ("export", "checkpoint=x", f"output={tmp_path}/file/x"),
        ("report", f"output_dir={tmp_path}/file"),
    ):
        needed = ["group=x"] if arguments[0] == "report" else []
        assert command(f"scripts/{arguments[0]}.py", *arguments[1:], *needed).returncode == 7


def test_a_broken_summary_is_named_by_the_report(small: Callable[..., list[str]], tmp_path: Path) -> None:
    for seed in range(2):
        Trainer(load_config(small(f"seed={seed}", "run_name=run" + str(seed)))).fit()
    group = tmp_path / "results" / "default"
    for text, cause in (
        ('{"status": ', "cannot be read"),
        ("[]", "holds no JSON object"),
        ('{"a": 1}', "lacks status"),
        ("[" * 100000, "nested too deeply"),
        ("\x00", "cannot be read"),
    ):
        (group / "run1" / "summary.json").write_text(text)
        with pytest.raises(DataError, match=cause) as error:
            read_runs(group)
        assert str(group / "run1" / "summary.json") in error.value.cause
        assert "trainer.resume=never" in error.value.remedy
        with pytest.raises(DataError, match=cause):
            Trainer(load_config(small("seed=1", "run_name=run1"))).fit()


def test_a_deeply_nested_json_line_is_named(small: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "deep.jsonl").write_text('{"text": "x"}\n{"text": ' + "[" * 100000 + "]" * 100000 + "}\n")
    options = [o for o in small("data=text", f"data.path={tmp_path}/deep.jsonl") if not o.startswith("data.n_")]
    with pytest.raises(DataError, match=r"deep\.jsonl, line 2: JSON nested too deeply"):
        Trainer(load_config(options))


def test_an_infinite_gradient_norm_trains_as_null_does(small: Callable[..., list[str]]) -> None:
    losses = [
        Trainer(load_config(small(f"optimizer.max_grad_norm={limit}", f"run_name={limit}"))).fit()["train_loss_nats"]
        for limit in ("inf", "null")
    ]
    assert losses[0] == losses[1]


def test_a_dry_run_foresees_and_writes_nothing(
    command: Command, small: Callable[..., list[str]], tmp_path: Path
) -> None:
    done = command("train.py", *small("dry_run=true", "size=350m"))
    assert done.returncode == 0, done.stderr
    for word in ("parameters", "memory", "time", "nothing was run"):
        assert word in done.stdout
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("model", "compiled", "known"),
    [("gla", "none", True), ("gla", "blocks", True), ("gla", "model", False), ("kda", "blocks", False)],
)
def test_a_dry_run_says_where_the_memory_is_that_of_uncompiled_blocks(
    model: str, compiled: str, known: bool, command_here: Command, small: Callable[..., list[str]]
) -> None:
    done = command_here("train.py", *small("dry_run=true", f"model={model}", f"trainer.compile={compiled}"))
    assert done.returncode == 0, done.stderr
    assert ("as with trainer.compile=none" in done.stdout) != known


def test_a_dry_run_says_what_is_not_on_this_machine_and_what_a_gpu_changes(
    command_here: Command, small: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "my.txt").write_text("some text")
    own = [override for override in small("dry_run=true", "data=text", "device=cpu") if "data.n_" not in override]
    absent = (f"data.path={tmp_path}/no.txt", "init_from=nowhere", "trainer.float8=blocks")
    done = command_here("train.py", *own, *absent)
    assert done.returncode == 0, done.stderr
    assert f"not on this machine: data.path={tmp_path}/no.txt does not exist" in done.stdout
    assert "not on this machine: init_from=nowhere is no directory" in done.stdout
    assert "unknown: the formulas describe bf16, not trainer.float8" in done.stdout
    assert "here in fp32; trainer.precision=bf16_autocast shows what a GPU takes" in done.stdout
    done = command_here("train.py", *own, f"data.path={tmp_path}/my.txt", "trainer.precision=bf16_autocast")
    assert "not on this machine" not in done.stdout
    assert "here in" not in done.stdout
    assert "cce_kahan, bf16_autocast on cpu" in done.stdout


def test_help_names_groups_options_and_keys(command: Command) -> None:
    done = command("train.py", "--help")
    assert done.returncode == 0
    for word in ("gated_deltanet", "cce_kahan", "experiment", "batch_size", "exit", "usage"):
        assert word in done.stdout, word


@pytest.mark.parametrize(
    ("script", "option", "words"),
    [
        ("train.py", "loss=fla", ("--- loss=fla", "num_chunks: 8")),
        ("scripts/evaluate.py", "loss=liger", ("--- loss=liger", "accumulate: native")),
        ("scripts/sweep.py", "sweep=vocab", ("--- configs/sweep/vocab.yaml",)),
    ],
)
def test_help_behind_an_option_shows_its_keys(
    script: str, option: str, words: tuple[str, ...], command: Command
) -> None:
    done = command(script, option, "--help")
    assert done.returncode == 0
    for word in words:
        assert f"\n{word}" in done.stdout, word


def test_help_shows_no_sweep_that_nobody_chose(command_here: Command) -> None:
    shown = command_here("scripts/sweep.py", "--help").stdout
    assert "--- configs/sweep/" not in shown
    assert "\nsweep=NAME must be given; sweep=NAME --help shows its keys\n" in shown


def test_summary_has_every_promised_key(small: Callable[..., list[str]]) -> None:
    trainer = Trainer(load_config(small()))
    trainer.fit()
    summary = json.loads((trainer.directory.path / "summary.json").read_text())
    promised = (
        "status model size loss data seed n_parameters batch_size seq_len steps tokens train_loss_nats "
        "valid_loss_nats valid_perplexity valid_bits_per_byte peak_memory_bytes tokens_per_second "
        "step_time_ms_median loss_layer_ms mfu mfu_6n device"
    )
    assert set(promised.split()) <= summary.keys()


def test_a_benchmark_below_a_file_is_refused(
    tmp_path: Path, command_here: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "file").write_text("x")
    options = ["shapes=[8x8x8]", "backends=[cce_kahan]", "rounds=2", "device=cpu", f"results_dir={tmp_path}/file"]
    done = command_here("benchmarks/loss.py", *options)
    assert done.returncode == 7, done.stderr
    assert f"error: Not a directory: {tmp_path}/file" in done.stderr
