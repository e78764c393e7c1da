"""Whatever happens to wandb, a run goes on, and everything can be sent later. What it receives, with a stand-in."""

import gzip
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from linrnn.config import load_config
from linrnn.config.schema import WandbConfig
from linrnn.runs import loggers
from linrnn.runs.loggers import WandbMirror
from linrnn.runs.metrics import read_jsonl
from linrnn.training.trainer import Trainer

STEPS = 6


class WandbServer:
    """What wandb's client needs to send a run. It listens until :meth:`stop`. `steps`: of the received history."""

    def __init__(self, port: int = 0) -> None:
        self.steps: set[int] = set()
        handler = type("Handler", (_Handler,), {"server_of_tests": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path.endswith("file_stream"):
            for line in json.loads(body).get("files", {}).get("wandb-history.jsonl", {}).get("content", []):
                self.steps.add(json.loads(line)["_step"])
        if not path.endswith("graphql"):
            return {}
        request = json.loads(body)
        if "upsertBucket" in request["query"]:
            project = {"id": "p", "name": "linrnn", "entity": {"id": "e", "name": "someone"}}
            run = {"id": "r", "name": request["variables"]["name"], "displayName": "run", "config": "{}"}
            bucket = {**run, "description": "", "sweepName": None, "historyLineCount": 0, "project": project}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if "createRunFiles" in request["query"]:
            files = [{"name": name, "uploadUrl": f"{self.url}/files"} for name in request["variables"]["files"]]
            return {"data": {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}}
        return {"data": {}}


class _Handler(BaseHTTPRequestHandler):
    server_of_tests: WandbServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        answer = json.dumps(self.server_of_tests.answer(self.path, body)).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_PUT = do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    """A server, and wandb in this process without leftovers of earlier tests."""
    import wandb  # takes a second, which only the worker that runs this file shall pay

    wandb.teardown()
    server = WandbServer()
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", secrets.token_hex(20))
    yield server
    wandb.teardown()
    server.stop()


def run(overrides: list[str], at_step: dict[int, Callable[[], None]]) -> tuple[Path, str]:
    """Train with wandb. Returns the directory and the log. `at_step` maps a step to the fault after it."""
    import wandb

    overrides = [override for override in overrides if not override.startswith("logger.")]
    trainer = Trainer(load_config([*overrides, f"trainer.max_steps={STEPS}", "logger.wandb.mode=auto"]))
    train_step = trainer.train_step

    def faulty() -> object:
        record = train_step()
        at_step.get(trainer.step, lambda: None)()
        return record

    trainer.train_step = faulty  # type: ignore[method-assign,assignment]
    assert trainer.fit()["status"] == "finished"
    wandb.teardown()  # as at the process's end: its own process writes the last records after finish()
    losses = [r["step"] for r in read_jsonl(trainer.directory.metrics) if "train/loss_nats" in r]
    assert losses == list(range(1, STEPS + 1)), "metrics.jsonl has lost something"
    return trainer.directory.path, (trainer.directory.path / "train.log").read_text()


def synced(port: int, directory: Path) -> set[int]:
    """Steps that `wandb sync` sends to a server that has come back."""
    again = WandbServer(port)
    recorded = [*sorted(directory.glob("wandb/run-*")), *sorted(directory.glob("wandb/offline-run-*"))]
    command = [sys.executable, "-m", "wandb", "sync", "--no-skip-online", str(recorded[-1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=directory)
    again.stop()
    assert done.returncode == 0, done.stdout + done.stderr
    return again.steps


def test_an_id_that_a_full_disk_left_empty_is_made_anew_and_then_stays(tmp_path, monkeypatch):
    ids: list[str] = []
    monkeypatch.setattr(WandbMirror, "_open", lambda self, mode, run_id: ids.append(run_id))
    config = load_config(["logger.wandb.mode=offline"]).logger.wandb
    (tmp_path / "wandb_id").touch()
    for _ in range(2):
        WandbMirror(config, tmp_path, history=list, say=print, tags=[])
    assert ids[0] == ids[1] == (tmp_path / "wandb_id").read_text()
    assert len(ids[0]) == 8


def test_all_is_well(server, small):
    directory, _ = run(small(), {})
    assert server.steps >= set(range(1, STEPS + 1))
    key = os.environ["WANDB_API_KEY"].encode()
    assert not [path for path in directory.rglob("*") if path.is_file() and key in path.read_bytes()]


def test_unreachable_at_the_start(server, small, monkeypatch):
    monkeypatch.setattr(loggers, "CONNECTION_SECONDS", 2)
    server.stop()
    directory, log = run(small(), {})
    assert "wandb cannot be reached" in log
    assert synced(server.port, directory) >= set(range(1, STEPS + 1))


def test_unreachable_in_the_middle_of_a_run(server, small, monkeypatch):
    monkeypatch.setattr(loggers, "CONNECTION_SECONDS", 8)
    directory, log = run(small(), {3: server.stop})
    assert "wandb has not taken everything" in log
    assert server.steps < set(range(1, STEPS + 1))
    assert synced(server.port, directory) >= set(range(1, STEPS + 1))


@pytest.mark.skipif(shutil.which("pgrep") is None, reason="pgrep finds the process")
def test_its_own_process_dies_in_the_middle_of_a_run(server, small):
    def kill() -> None:
        children = subprocess.run(["pgrep", "-P", str(os.getpid()), "wandb-core"], capture_output=True, text=True)
        os.kill(int(children.stdout), signal.SIGKILL)

    directory, log = run(small(), {3: kill})
    assert "wandb stopped" in log
    assert "the whole run is recorded offline" in log
    server.stop()
    assert synced(server.port, directory) >= set(range(1, STEPS + 1))


# ------------------------------------------------------------------------------------------------------- a stand-in
RECORD = {"step": 3, "time": "now", "train/loss_nats": 2.0, "speed/mfu": None}


class FakeRun:
    """Keeps what is logged. It can fail, as wandb does when its own process dies."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.summary: dict[str, Any] = {}
        self.fails = False

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if self.fails:
            raise BrokenPipeError("wandb is gone")
        self.logged.append((step, metrics))

    def finish(self, exit_code: int) -> None:
        pass


def mirror(directory: Path, mode: str = "offline") -> WandbMirror:
    config = WandbConfig(mode=mode, project="p", entity=None, tags=["own"])
    return WandbMirror(config, directory, history=lambda: [RECORD], say=lambda line: None, tags=["gla"])


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, FakeRun]]:
    """The runs that are opened, each with its mode."""
    runs: list[tuple[str, FakeRun]] = []

    def open_run(self: WandbMirror, mode: str, run_id: str) -> FakeRun:
        runs.append((mode, FakeRun()))
        return runs[-1][1]

    monkeypatch.setattr(WandbMirror, "_open", open_run)
    monkeypatch.setattr(loggers, "_end_service", lambda: None)
    return runs


def test_no_none_reaches_wandb_not_even_when_a_run_is_recorded_anew(opened, tmp_path):
    lost = mirror(tmp_path)
    lost.log(3, {"train/loss_nats": 2.0, "speed/mfu": None})
    opened[0][1].fails = True
    lost.log(4, {"train/loss_nats": 1.0})
    lost.finish({}, 0)
    assert [run.logged for _, run in opened] == [[(3, {"train/loss_nats": 2.0})]] * 2


@pytest.mark.parametrize(
    ("configured", "asked", "modes"),
    [("auto", "offline", ["offline"]), ("auto", "disabled", []), ("offline", "disabled", ["offline"])],
)
def test_wandbs_own_variable_decides_where_the_mode_is_auto(configured, asked, modes, opened, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", asked)
    monkeypatch.setattr(loggers, "has_wandb_key", lambda: True)
    mirror(tmp_path, configured)
    assert [mode for mode, _ in opened] == modes
