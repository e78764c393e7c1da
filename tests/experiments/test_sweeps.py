"""What a sweep does if its points end well, badly, or not at all. Points are small scripts here."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from linrnn.config import load_config
from linrnn.core.errors import ConfigError, InterruptedRun, SweepFailure, UnsupportedError
from linrnn.core.machine import SHARED_GPU
from linrnn.experiments import points as points_of_sweeps
from linrnn.experiments import sweep as sweep_of_runs
from linrnn.experiments.points import START_SECONDS, Point, plan_points, write_summary
from linrnn.experiments.sweep import _judge, in_another_process, listing, run_points, slots_of, threads_of
from linrnn.runs.metrics import JsonlWriter
from linrnn.runs.summary import duration
from linrnn.training import plan

Small = Callable[..., list[str]]
FINISHES = """
import json, os, pathlib, sys
target = pathlib.Path(sys.argv[1]); target.mkdir(parents=True, exist_ok=True)
summary = dict(status="finished", steps=3, tokens_per_second=10.0, peak_memory_bytes=2**30, train_loss_nats=1.0)
summary["gpu"] = os.environ.get("CUDA_VISIBLE_DEVICES")
(target / "summary.json").write_text(json.dumps(summary))
"""
CRASHES = "raise SystemExit('error: the disk is on fire')"
KILLED = "import os; os.kill(os.getpid(), 9)"
HANGS = "import time; print('tuning', flush=True); time.sleep(600)"


@pytest.fixture
def make_points(small: Small) -> Callable[..., list[Point]]:
    """Points that differ in their seed, each of so many ranks."""

    def make(count: int, ranks: int = 1) -> list[Point]:
        options = ["loss=standard", *(["parallel=fsdp"] if ranks > 1 else [])]
        return plan_points([small(f"seed={seed}", *options) for seed in range(count)], ranks=ranks)

    return make


def scripts(**by_seed: str) -> Callable[[Point], Sequence[str]]:
    """The command of a point: the script for its seed, or one that finishes."""
    return lambda p: [sys.executable, "-c", by_seed.get(f"s{p.config.seed}", FINISHES), str(p.directory)]


def run(points: Sequence[Point], slots: Sequence[dict[str, str]] = ({},), **by_seed: str) -> list[str]:
    said: list[str] = []
    commands = patch.object(points_of_sweeps, "command_of", scripts(**by_seed))
    with commands, patch.object(sweep_of_runs, "REPORT_SECONDS", 0.1), patch.object(sweep_of_runs, "say", said.append):
        run_points(points, slots)
    return said


def stop_once(ready: Callable[[], bool]) -> None:
    """Send this process SIGTERM as soon as it is ready."""

    def wait() -> None:
        while not ready():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def statuses(points: Sequence[Point]) -> list[str | None]:
    return [(point.summary() or {}).get("status") for point in points]


def test_a_crash_and_a_kill_leave_a_summary_with_the_reason_and_the_others_go_on(make_points):
    points = make_points(4)
    said = run(points, s0=CRASHES, s2=KILLED)
    assert statuses(points) == ["failed", "finished", "failed", "finished"]
    assert "the disk is on fire" in points[0].summary()["reason"]
    assert "SIGKILL" in points[2].summary()["reason"]
    assert any("[4/4 done] seed=3: finished: 10 tokens/s, 1.00 GiB" in line for line in said)
    with pytest.raises(SweepFailure, match=r"2 of 4 points.*seed=0 \(failed\), seed=2 \(failed\)") as failure:
        _judge(points)
    assert failure.value.exit_code == 8
    logs = points[0].log.parent
    assert failure.value.remedy == f"the reasons are in {logs}/*.log; the same command runs them again"


def test_a_point_that_another_sweep_began_at_the_same_moment_is_waited_for(make_points, tmp_path):
    """A process takes seconds until it claims its directory. The slower one ends with an error."""
    [point] = make_points(1)
    began, taken, other = tmp_path / "began", tmp_path / "taken", point.run_directory()
    point.log.parent.mkdir(parents=True)
    point.log.write_text("error: of the other sweep\n")
    slower = f"""
import pathlib, time
if not pathlib.Path({str(began)!r}).exists():
    pathlib.Path({str(began)!r}).touch()
    while not pathlib.Path({str(taken)!r}).exists():
        time.sleep(0.01)
    raise SystemExit("error: another process is writing")
"""

    def another_sweep() -> None:
        while not began.exists():
            time.sleep(0.01)
        other.open()
        taken.touch()
        time.sleep(1)
        other.close()

    thread = threading.Thread(target=another_sweep)
    thread.start()
    said = run([point], s0=slower + FINISHES)
    thread.join()
    assert statuses([point]) == ["finished"]
    assert not [line for line in said if "failed" in line]
    assert "of the other sweep" in point.log.read_text()
    point.run_directory().path.joinpath("summary.json").unlink()
    run([point], s0="raise SystemExit(3)")
    assert "of the other sweep" not in point.summary()["reason"]


def test_running_again_runs_only_what_has_no_answer(make_points, monkeypatch):
    points = make_points(3)
    run(points[:1])
    finished = points[0].summary()
    assert write_summary(points[0], "failed", "another process was writing") == finished == points[0].summary()
    write_summary(points[1], "out_of_memory", "too large")
    assert [point.is_done(retry=False) for point in points] == [True, True, False]
    assert [point.is_done(retry=True) for point in points] == [True, False, False]
    longer = replace(points[0], total_steps=4)  # more steps asked for than were run
    assert not longer.is_done(retry=False)
    write_summary(points[2], "failed", "a crash")
    assert not points[2].is_done(retry=False)
    said: list[str] = []
    monkeypatch.setattr(sweep_of_runs, "say", said.append)
    _judge(points[:2])  # a point that does not fit into memory is an outcome, no failure
    assert said[0] == "1 finished, 1 out_of_memory; retry=true repeats out_of_memory and diverged"
    assert said[1].startswith(f"compare the runs: python scripts/report.py group={points[0].config.group} ")
    with pytest.raises(SweepFailure, match="1 of 3 points did not finish: seed=2") as failure:
        _judge(points)
    assert failure.value.exit_code == 8
    write_summary(points[2], "diverged", "NaN")
    with pytest.raises(SweepFailure) as failure:
        _judge(points)
    assert failure.value.exit_code == 6


def test_a_sweep_without_a_point_that_can_run_here_says_so(make_points):
    points = make_points(2)
    for point in points:
        write_summary(point, "unsupported", "no GPU")
    with pytest.raises(UnsupportedError, match="none of 2 points can run here") as refusal:
        _judge(points)
    assert refusal.value.exit_code == 4
    run(points[:1])
    _judge(points)  # one has finished


def test_what_is_said_of_a_run_from_outside_leaves_its_own_files_and_the_steps_that_it_trained(make_points):
    [point] = make_points(1)
    directory = point.run_directory()
    directory.open()
    directory.begin()
    directory.write_text("config.yaml", "of its own process")
    metrics = JsonlWriter(directory.metrics)
    metrics.write({"step": 2, "train/tokens": 320})
    metrics.close()
    directory.close()
    before = {path: path.read_bytes() for path in point.directory.iterdir()}
    killed = write_summary(point, "failed", "killed by SIGKILL")
    assert (killed["steps"], killed["tokens"]) == (2, 320)
    assert "results_dir=results" in killed["command"]
    assert str(point.directory.parents[1]) not in killed["command"], "no path of this machine"
    assert {path: path.read_bytes() for path in before} == before
    assert write_summary(point, "unsupported", "no GPU")["status"] == "unsupported"
    assert statuses([point]) == ["failed"], "a machine that cannot run it takes nothing from what it did"


def test_several_jobs_share_the_cores_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(sweep_of_runs, "cores", lambda: 24)
    assert [threads_of(jobs) for jobs in (1, 5, 32)] == [{}, {"OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS": "1"}]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_of(5) == {}


def test_memory_that_ran_out_on_a_shared_gpu_is_no_answer(make_points):
    """Every way in which memory runs out makes its error with out_of_memory(), which decides the exit code."""
    [point, alone] = make_points(2)
    full = "from linrnn.config.cli import guarded\ndef main(): raise MemoryError('CUDA out of memory')\n"
    full += "raise SystemExit(guarded(main))"
    run([point], slots_of(2, ["0"], share=True), s0=full)
    run([alone], s1=full)
    assert statuses([point, alone]) == ["failed", "out_of_memory"]
    assert "other runs share this GPU" in point.summary()["reason"]
    assert "lower jobs" in point.log.read_text()
    assert [one.is_done(retry=False) for one in (point, alone)] == [False, True]


def test_a_point_ends_when_the_sweep_is_killed(make_points, tmp_path):
    point = make_points(1)[0]
    program = (
        "import sys, time, pickle\nfrom linrnn.experiments import points\n"
        "points.command_of = lambda point: [sys.executable, '-c', sys.argv[2]]\n"
        "process = points.Process(pickle.load(open(sys.argv[1], 'rb')), {})\n"
        "print(process._ranks[0].pid, flush=True); time.sleep(600)"
    )
    (tmp_path / "point").write_bytes(pickle.dumps(point))
    arguments = [sys.executable, "-c", program, str(tmp_path / "point"), HANGS]
    parent = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "\nState:\tZ" in Path(f"/proc/{child}/status").read_text():
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the point outlived its sweep")


def test_what_cannot_run_here_is_foreseen_with_memory_and_reason(small):
    overrides = [small(f"model={m}", f"loss={loss}") for m, loss in (("gla", "liger"), ("kda", "standard"))]
    liger, chunks, fine = plan_points([overrides[0], [*overrides[1], "model.chunk_size=128"], overrides[1]])
    assert "GPU" in liger.refusal
    assert "chunk_size=128" in chunks.refusal
    assert fine.refusal is None
    assert fine.seconds > START_SECONDS
    assert liger.memory_bytes > 4 * 4 * 461_000  # parameters, gradients and two moments in fp32
    lines = listing([liger, chunks, fine], [fine], [liger, chunks], 1)
    assert [line.rpartition("  ")[2] for line in lines[1:4]] == ["unsupported", "unsupported", "to run"]
    assert lines[5] == "3 points: 2 unsupported, 1 to run"
    assert lines[6].endswith(f"; in all {duration(fine.seconds)}")


def test_points_without_their_text_cannot_run_here(small, tmp_path):
    (tmp_path / "my.txt").write_text("some text")
    own = [override for override in small("loss=standard", "data=text") if "data.n_" not in override]
    own.append(f"data.path={tmp_path}/my.txt")
    absent = [f"{key}={tmp_path}/no.txt" for key in ("data.path", "data.valid_path")]
    points = plan_points([own, *([*own, override] for override in absent)])
    assert points[0].refusal is None
    for override, point in zip(absent, points[1:], strict=True):
        assert f"{override} does not exist" in point.refusal


@pytest.mark.skipif(torch.cuda.is_available(), reason="a login node has no GPU")
@pytest.mark.usefixtures("quick_points")
def test_a_cluster_s_job_decides_what_depends_on_its_machine(small, monkeypatch):
    on_gpus = [["memory_budget_gib=80"], ["device=cuda"], ["loss=liger"], ["loss=standard"]]
    monkeypatch.setattr(plan, "available_memory", lambda: 2**20)
    points = plan_points([small(*overrides) for overrides in on_gpus])
    submitted: list[Point] = []
    monkeypatch.setattr(sweep_of_runs, "_look_ahead", lambda *_: (points, []))
    monkeypatch.setattr(sweep_of_runs, "run_on_cluster", lambda _, jobs, *more: submitted.extend(jobs))
    config = load_config(["cluster=slurm", "sweep=mve"], "run_sweep")
    with pytest.raises(SweepFailure, match="4 of 4 points did not finish"):
        sweep_of_runs.run_sweep(config, [])
    assert len(submitted) == 4
    assert all(point.refusal for point in points), "this machine runs none of them"


def test_errors_come_whole_out_of_another_process():
    with pytest.raises(ConfigError, match="model=gal: there is no such model") as error:
        in_another_process(load_config, ["model=gal"])
    assert error.value.remedy.startswith("nearest: gla")
    assert error.value.exit_code == 2


RANKS_FINISH = f"""
import os, pathlib, sys
target = pathlib.Path(sys.argv[1]); target.mkdir(parents=True, exist_ok=True)
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT CUDA_VISIBLE_DEVICES".split()
(target / ("rank" + os.environ["RANK"])).write_text(" ".join(os.environ.get(name, "-") for name in names))
if os.environ["RANK"] == "0":
    exec({FINISHES!r})
"""


def test_every_rank_of_a_point_gets_its_place_and_every_point_its_port_and_gpus(make_points):
    points = make_points(2, ranks=2)
    run(points, slots_of(2, ["3", "5", "6", "7"], ranks=2), s0=RANKS_FINISH, s1=RANKS_FINISH)
    assert statuses(points) == ["finished"] * 2
    told = [[(point.directory / f"rank{rank}").read_text().split() for rank in range(2)] for point in points]
    for ranks in told:
        assert [facts[:5] for facts in ranks] == [[str(rank), str(rank), "2", "2", "127.0.0.1"] for rank in range(2)]
        assert ranks[0][5:] == ranks[1][5:]
    assert len({ranks[0][5] for ranks in told}) == 2
    assert {ranks[0][6] for ranks in told} == {"3,5", "6,7"}


def test_what_a_rank_of_a_point_does_is_known_of_the_point(make_points):
    points = make_points(3, ranks=2)
    killed = "import os; os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else exit(1)"
    full = "import os; exit(5 if os.environ['RANK'] == '1' else 'error: rank 1 stopped: out of memory at step 3')"
    run(points, s0=killed, s1=full, s2=RANKS_FINISH)
    assert statuses(points) == ["failed", "out_of_memory", "finished"]
    assert points[0].summary()["reason"].startswith("rank 1: killed by SIGKILL")
    assert points[1].summary()["reason"] == "rank 1 stopped: out of memory at step 3"


def test_a_stop_reaches_every_rank_and_leaves_other_points_waiting(make_points, tmp_path):
    points = make_points(2, ranks=2)
    hangs = f"import os; open({str(tmp_path)!r} + '/pid' + os.environ['RANK'], 'w').write(str(os.getpid()))\n{HANGS}"
    stop_once(lambda: len([*tmp_path.glob("pid*")]) == 2)
    with pytest.raises(InterruptedRun, match="running: seed=0; waiting: 1") as stopped:
        run(points, s0=hangs)
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert statuses(points) == [None, None]
    for rank in range(2):
        assert not Path("/proc", (tmp_path / f"pid{rank}").read_text()).exists()


def test_points_get_gpus_of_their_own_unless_they_share_them_and_know_it():
    packed = slots_of(2, ["0", "1", "2", "3", "4"], ranks=2)
    assert packed == [{"CUDA_VISIBLE_DEVICES": gpus} for gpus in ("0,1", "2,3")]
    assert slots_of(2, [], ranks=2) == [{}, {}]
    shared = slots_of(16, ["3", "5"], share=True)
    assert Counter(slot["CUDA_VISIBLE_DEVICES"] for slot in shared) == {"3": 8, "5": 8}
    assert {slot[SHARED_GPU] for slot in shared} == {"1"}


@pytest.mark.parametrize(
    ("jobs", "gpus", "ranks", "cause", "remedy"),
    [
        (3, 2, 1, "jobs=3: there are 2 GPUs", "use jobs=2, or share_gpus=true if only the losses matter"),
        (1, 2, 4, "4 ranks: 2 GPUs are visible", "use 2 ranks or fewer, or device=cpu"),
        (2, 3, 2, "jobs=2 of 2 ranks: there are 3 GPUs", "use jobs=1"),
    ],
)
def test_too_few_gpus_are_refused(jobs, gpus, ranks, cause, remedy):
    with pytest.raises(ConfigError, match=cause) as refusal:
        slots_of(jobs, [str(gpu) for gpu in range(gpus)], ranks)
    assert refusal.value.remedy == remedy


def test_ranks_that_cannot_share_a_point_are_refused(small):
    with pytest.raises(ConfigError, match="2 ranks, and parallel=none is a run of one process"):
        plan_points([small("loss=standard")], ranks=2)
    [uneven] = plan_points([small("loss=standard", "parallel=fsdp", "parallel.shard_ranks=3")], ranks=2)
    assert "parallel.shard_ranks=3 does not divide 2 ranks" in uneven.refusal
    with pytest.raises(ConfigError, match="shard_ranks=4 does not divide 2 ranks"):  # its steps would hold 0 sequences
        plan_points([small("parallel=vocab", "parallel.shard_ranks=4", "trainer.max_tokens=9999")], ranks=2)
    with pytest.raises(ConfigError, match=r"shard_ranks=4 does not divide 1 rank\n"):
        load_config(["parallel=vocab", "parallel.shard_ranks=4"]).parallel.data_ranks(1)
    [single] = plan_points([small("loss=standard", "parallel=fsdp")])
    assert "sweep.ranks=N" in single.refusal
    assert "RANK" not in os.environ


def test_ranks_that_wait_for_one_that_never_came_are_ended(make_points, monkeypatch):
    [point] = make_points(1, ranks=2)
    monkeypatch.setattr(points_of_sweeps, "LEFT_BEHIND_SECONDS", 0.5)
    waits = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"  # until SIGKILL
    run([point], s0=f"import os\nif os.environ['RANK'] == '1': exit('error: no GPU is free')\n{waits}\n{HANGS}")
    summary = point.summary()
    assert summary["status"] == "failed"
    assert summary["reason"] == "rank 1: no GPU is free"


def test_a_job_that_slurm_ends_lets_its_run_save(make_points, tmp_path, monkeypatch):
    """submitit answers Slurm's signal with SystemExit."""
    ready, saved = tmp_path / "ready", tmp_path / "saved"
    saves = f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), pathlib.Path({str(saved)!r}).touch(), sys.exit()))
pathlib.Path({str(ready)!r}).touch()
time.sleep(600)
"""
    monkeypatch.setattr(points_of_sweeps, "command_of", scripts(s0=saves))
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(-1))
    stop_once(ready.exists)
    with pytest.raises(SystemExit):
        sweep_of_runs.run_alone(make_points(1)[0])
    signal.signal(signal.SIGTERM, before)
    assert saved.exists()


def test_a_job_that_never_ran_does_not_keep_the_status_of_an_earlier_sweep(make_points, monkeypatch):
    points = make_points(4)
    write_summary(points[0], "unsupported", "no GPU")
    write_summary(points[1], "out_of_memory", "too large")
    run([points[2]])

    def lost(*_: object) -> None:
        run([points[1]])
        raise RuntimeError("job 7 was lost")

    monkeypatch.setattr(sweep_of_runs, "run_on_cluster", lost)
    said: list[str] = []
    monkeypatch.setattr(sweep_of_runs, "say", said.append)
    sweep_of_runs._submit(points, load_config(["cluster=slurm", "sweep=mve"], "run_sweep"))
    assert statuses(points) == ["failed", "finished", "finished", "failed"]
    assert sum("the job was lost: job 7 was lost" in line for line in said) == 2
