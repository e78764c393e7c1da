"""Shared fixtures: small runs in temporary directories, the command line as a user calls it."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads sleep: runners share their cores

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Three steps of the smallest model, wandb off: the overrides that most end-to-end tests start from.
SMALL = (
    "device=cpu",
    "trainer.max_steps=3",
    "trainer.batch_size=2",
    "trainer.seq_len=80",
    "trainer.valid_tokens=400",
    "data.n_tokens=20000",
    "data.n_valid_tokens=2000",
    "logger.wandb.mode=disabled",
)


@pytest.fixture
def small(tmp_path: Path, data_cache: Path) -> Callable[..., list[str]]:
    """Overrides of a small run that writes below the test's own directory."""
    return lambda *more: [*SMALL, f"results_dir={tmp_path}/results", f"data.cache_dir={data_cache}", *more]


@pytest.fixture(scope="session")
def data_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One data cache for all tests: the same small data is generated once."""
    return tmp_path_factory.mktemp("data_cache")


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script of the repository in a process of its own, as a user would."""

    def call(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return call
