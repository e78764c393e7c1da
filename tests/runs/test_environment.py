"""environment.json is complete enough to repeat a run, and says nothing about people or places."""

import getpass
import json
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from linrnn.runs import environment
from linrnn.runs.environment import describe_environment
from linrnn.runs.origins import commit_in_words

ROOT = Path(__file__).resolve().parents[2]


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    """A repository with one commit of src/module.py."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "module.py").write_text("one")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    return tmp_path


def test_versions_hardware_and_what_the_allocator_was_told_are_there(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    described = describe_environment()
    assert described["cuda_allocator"] == "expandable_segments:True"
    assert described["packages"]["torch"] in (torch.__version__, torch.__version__.partition("+")[0])  # less the build
    assert described["packages"]["flash-linear-attention"]
    assert described["python"] == platform.python_version()
    assert described["cpu_cores"] >= 1
    assert len(described["gpus"]) == torch.cuda.device_count()


def test_it_is_strict_json_without_secrets_names_or_paths(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a-secret-key")
    text = json.dumps(describe_environment(), allow_nan=False)
    home = f"{Path.home()}/"
    for private in ("a-secret-key", "WANDB", platform.node(), str(ROOT), home, f'"{getpass.getuser()}"'):
        assert not private or private not in text


def test_the_code_of_both_packages_has_a_hash_of_its_source(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text("x = 1")
    (tmp_path / "a" / "notes.txt").write_text("no code")
    before = environment.hash_of_source(tmp_path)
    (tmp_path / "a" / "notes.txt").write_text("still none")
    assert environment.hash_of_source(tmp_path) == before
    (tmp_path / "a" / "b.py").write_text("x = 2")
    changed = environment.hash_of_source(tmp_path)
    (tmp_path / "a" / "b.py").rename(tmp_path / "a" / "c.py")
    assert len({before, changed, environment.hash_of_source(tmp_path)}) == 3
    assert describe_environment()["code"] == {
        "linrnn": environment.hash_of_source(ROOT / "src" / "linrnn"),
        "cce_kernels": environment.hash_of_source(ROOT / "kernels" / "cce_kernels"),
    }


def test_the_commit_is_that_of_the_code_and_changed_or_new_code_makes_it_dirty(repository, monkeypatch):
    module = repository / "src" / "module.py"
    state = environment._git_state(module)
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (repository / "notes.txt").write_text("no code")
    assert environment._git_state(module)["dirty"] is False
    (repository / "src" / "other.py").write_text("new")
    assert environment._git_state(module)["dirty"] is True
    (repository / "site-packages").mkdir()
    (repository / "site-packages" / "module.py").write_text("one")
    assert environment._git_state(repository / "site-packages" / "module.py") is None, "not tracked"
    monkeypatch.setattr(environment.shutil, "which", lambda program: None)
    assert environment._git_state(module) is None, "without git"
    monkeypatch.setenv("LINRNN_COMMIT", "abcdef")
    assert environment._git_state(module) == {"commit": "abcdef", "dirty": None}, "named by hand"


@pytest.mark.parametrize(
    ("dirty", "words"),
    [(False, "abcdef"), (True, "abcdef with uncommitted changes"), (None, "abcdef (uncommitted changes: unknown)")],
)
def test_pages_say_whether_files_were_changed_or_that_nobody_knows(dirty, words):
    assert commit_in_words({"commit": "abcdef", "dirty": dirty}) == words
    assert commit_in_words({"commit": "abcdef", "dirty": dirty}, digits=3) == words.replace("def", "")
    assert commit_in_words(None) == "unknown"


def test_the_state_of_a_gpu_is_read_and_missing_figures_are_null(monkeypatch):
    assert environment.gpu_state(torch.device("cpu")) is None
    answers = {"--query-gpu": "1980, 3201, [N/A], 41", "--query-compute-apps": "12\n34\n56"}
    gpu = type("GPU", (), {"uuid": "0"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(environment, "_answer", lambda *words: answers[words[2].split("=")[0]])
    state = environment.gpu_state(torch.device("cuda"))
    assert state == {"sm_mhz": 1980, "memory_mhz": 3201, "watts": None, "celsius": 41, "other_processes": 2}
    monkeypatch.setattr(environment, "_answer", lambda *words: None)
    assert set(environment.gpu_state(torch.device("cuda")).values()) == {None}


@pytest.mark.parametrize(
    ("script", "shown"),
    [(ROOT / "train.py", "train.py"), (ROOT / "scripts" / "sweep.py", "scripts/sweep.py"), ("a b", "'a b'")],
)
def test_a_command_names_this_repositorys_scripts_by_their_place_in_it(script, shown, monkeypatch):
    monkeypatch.setattr("sys.argv", [str(script), "model=gla", "data.path=a b"])
    assert environment.command_line() == f"python {shown} model=gla 'data.path=a b'"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert environment.command_line() == f"torchrun --nproc-per-node=8 {shown} model=gla 'data.path=a b'"
    monkeypatch.setenv("GROUP_WORLD_SIZE", "4")
    assert environment.command_line().startswith("torchrun --nnodes=4 --nproc-per-node=8 ")


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        (f"data.path={ROOT}/data/a.txt", "data.path=data/a.txt"),
        ("results_dir=/scratch/r", "results_dir=results"),
        ("init_from=/scratch/r/phase1/a", "init_from=results/phase1/a"),
        ("data.path=/data/a.txt", "data.path=/data/a.txt"),
    ],
)
def test_a_command_names_paths_relative_to_the_repository(argument, shown, monkeypatch):
    monkeypatch.setattr("sys.argv", [str(ROOT / "train.py"), "results_dir=/scratch/r", argument])
    assert environment.command_line() == f"python train.py results_dir=results {shown}"
