"""kill -9 at random moments: data, checkpoints and final losses equal those of an unbroken run, bit for bit.

A few kills by default. A hundred, of which every tenth hits a whole sweep:

    LINRNN_KILLS=100 python -m pytest tests/faults/test_kill_at_random.py -s --timeout=3600
"""

import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from forked import ROOT, run_elsewhere, start
from safetensors.torch import load_file

from linrnn.config import last_of_each, load_config
from linrnn.config.cli import split_overrides
from linrnn.experiments.sweep import run_sweep
from linrnn.training.checkpoint import found

KILLS = int(os.environ.get("LINRNN_KILLS", "3"))
SEED = int(os.environ.get("LINRNN_KILLS_SEED", "0"))
MOST_OF_A_RUN = 5  # maximum number of kills of one run
TIMED = ("step", "train/loss_nats", "train/grad_norm", "train/lr", "valid/loss_nats")


class Trial:
    """A run with its own text. Everything that it writes lies below one directory."""

    def __init__(self, root: Path, corpus: Path, on_text: Callable[..., list[str]]) -> None:
        self.root, self.log = root, root / "log"
        root.mkdir()
        places = (f"data.path={corpus}", f"data.cache_dir={root}/data", f"results_dir={root}/results", "run_name=run")
        steps = ("trainer.max_steps=20", "trainer.checkpoint_every=2", "trainer.valid_every=7")
        self.overrides = on_text(*places, *steps)

    @property
    def run(self) -> Path:
        return self.root / "results/default/run"

    def moment(self) -> str:
        """The moment that a kill has hit, judged by the files left."""
        if list(self.run.glob("checkpoints/*.partial")):
            return "in a checkpoint"
        if list(self.root.glob("data/*.partial")):
            return "in data preparation"
        return "in training" if (self.run / "metrics.jsonl").exists() else "before the first step"

    def result(self) -> dict[str, object]:
        """Everything that must not depend on interruptions."""
        assert (self.run / "summary.json").exists(), self.log.read_text()
        records = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((self.run / "summary.json").read_text())
        names = [path.name for path in found(self.run / "checkpoints")]
        newest = found(self.run / "checkpoints")[-1]
        return {
            "metrics": [{key: record[key] for key in TIMED if key in record} for record in records],
            "checkpoints": names,
            "tensors": {
                f"{path.name}/{name}": tensor.numpy().tobytes()
                for path in sorted(newest.rglob("*.safetensors"))
                for name, tensor in load_file(path).items()
            },
            "summary": {key: summary[key] for key in ("status", "steps", "train_loss_nats", "valid_loss_nats")},
            "data": {path.name: path.read_bytes() for path in sorted(self.root.glob("data/text-*/*.*"))},
        }


def start_run(overrides: list[str], log: Path) -> BaseProcess:
    """Start `train.py` on one thread, with these overrides. Its output is added to `log`."""
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    return start(run_elsewhere, one_thread, ROOT, "train.py", last_of_each(overrides), log, log)


def kill(process: BaseProcess, wait: float, then: Callable[[], bool], and_then: float) -> bool:
    """Kill after `wait` seconds, then once `then` is true, then `and_then` seconds. Returns whether it still ran."""
    process.join(wait)
    while process.is_alive() and not then():
        time.sleep(0.0005)
    process.join(and_then)
    alive = process.is_alive()
    process.kill()
    process.join()
    return alive


def test_a_run_killed_at_random_moments(on_text, tmp_path):
    draw = random.Random(SEED)
    corpus = tmp_path / "corpus.txt"
    words = [f"word{i}" for i in range(200)]
    corpus.write_text("\n\n".join(" ".join(draw.choices(words, k=40)) for _ in range(1500)))
    unbroken = Trial(tmp_path / "unbroken", corpus, on_text)
    began = time.monotonic()
    start_run(unbroken.overrides, unbroken.log).join()
    duration = time.monotonic() - began
    expected = unbroken.result()
    assert expected["summary"]["status"] == "finished"

    hit: Counter[str] = Counter()
    number = 0
    while hit.total() < KILLS:
        number += 1
        trial = Trial(tmp_path / f"trial{number}", corpus, on_text)
        for _ in range(min(draw.randint(1, MOST_OF_A_RUN), KILLS - hit.total())):
            aims = ["results/default/run/checkpoints/*.partial", ""]  # "": anywhere
            aim = draw.choice(aims if any(trial.root.glob("data/*/meta.json")) else ["data/*.partial", *aims])
            wait = draw.uniform(0, duration if not aim else 0.6 * duration * aim.startswith("results"))
            process = start_run(trial.overrides, trial.log)
            if not kill(process, wait, lambda a=aim, t=trial: not a or any(t.root.glob(a)), draw.uniform(0, 0.01)):
                break  # it was through
            hit[trial.moment()] += 1
        start_run(trial.overrides, trial.log).join()
        assert trial.result() == expected, f"trial {number} of seed {SEED}: {trial.log.read_text()}"
        shutil.rmtree(trial.root)
    print(f"\n{hit.total()} kills of {number} runs: " + ", ".join(f"{n} {what}" for what, n in hit.items()))


@pytest.mark.usefixtures("quick_points")
def test_a_sweep_killed_at_random_moments(small, tmp_path, monkeypatch):
    """The killed sweep starts its points in new interpreters. The sweep after it, in this process, forks them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the unbroken runs
    draw = random.Random(SEED)
    common = small("model=transformer", "loss=standard", "size=smoke", "trainer.max_steps=30")
    common += ["trainer.checkpoint_every=2", "memory_budget_gib=null"]
    modes = ("none", "full") if KILLS >= 10 else ("none",)  # a point's process takes 4 s to come up
    for mode in modes:
        start_run([*common, "group=unbroken", f"trainer.activation_checkpointing={mode}"], tmp_path / "log").join()
    expected = finals(tmp_path / "results/unbroken")
    assert len(expected) == len(modes)
    for number in range(max(KILLS // 10, 1)):
        group = f"sweep{number}"
        overrides = ["sweep=checkpointing", "experiment=null", *common, f"group={group}"]
        overrides += [f"trainer.activation_checkpointing={','.join(modes)}"]
        log = tmp_path / f"{group}.log"
        killed = start(run_elsewhere, dict(os.environ), ROOT, "scripts/sweep.py", overrides, log, log)
        points = draw.randint(1, len(modes))
        while killed.is_alive() and not (log.exists() and log.read_text().count("started") >= points):
            time.sleep(0.01)
        if draw.random() < 0.7:  # as it comes up
            time.sleep(draw.uniform(0, 3))
        else:  # in its steps
            while not list((tmp_path / "results" / group).glob("*/metrics.jsonl")):
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 1))
        assert killed.is_alive(), f"the sweep was over before it was killed: {log.read_text()}"
        killed.kill()
        killed.join()
        own, runs = split_overrides(overrides, "run_sweep")
        run_sweep(load_config(own, "run_sweep"), runs)
        assert finals(tmp_path / "results" / group) == expected


def finals(group: Path) -> dict[str, tuple[object, ...]]:
    """Status, steps and losses of every run of a group."""
    keys = ("status", "steps", "train_loss_nats", "valid_loss_nats")
    summaries = {path.parent.name: json.loads(path.read_text()) for path in group.glob("*/summary.json")}
    return {name: tuple(summary[key] for key in keys) for name, summary in summaries.items()}
