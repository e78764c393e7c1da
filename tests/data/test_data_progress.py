"""What the user sees while data is prepared, and the command that prepares it."""

import io

import pytest
from data_helpers import sentences, write_jsonl, write_tokenizer

import linrnn.data.progress
from linrnn.data import ConsoleProgress, Progress
from linrnn.data.progress import Meter


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(linrnn.data.progress.time, "monotonic", lambda: clock.now)
    return clock


def test_speed_and_time_left_count_this_attempt_only(clock):
    reports: list[Progress] = []
    fresh, continued = Meter("a", reports.append), Meter("b", reports.append, tokens=1000)
    clock.now += 10
    fresh.update(5, 500, 0.25)
    continued.update(15, 1500, 0.5)
    clock.now += 10
    fresh.update(10, 1000, 0.5)
    continued.update(20, 2000, 0.6)
    assert [report.tokens_per_second for report in reports] == [50, 50, 50, 50]
    assert [report.seconds_left for report in reports] == [30, None, 20, pytest.approx(40)]


def test_without_a_terminal_a_line_comes_every_ten_seconds_and_at_the_end(clock):
    stream = io.StringIO()
    console = ConsoleProgress(stream)
    for second in range(25):
        clock.now = 100.0 + second
        console(Progress("tokenising", second + 1, 10, finished=second == 24))
    assert [line.split()[2] for line in stream.getvalue().splitlines()] == ["1", "11", "21", "25"]


def test_the_command_prepares_says_what_lies_where_and_checks_it_the_next_time(tmp_path, fresh_command, command):
    corpus = write_jsonl(tmp_path / "a.jsonl", sentences(100))
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    arguments = (
        "scripts/prepare_data.py",
        "data=text",
        f"data.path={corpus}",
        f"data.tokenizer={tokenizer}",
        f"data.cache_dir={tmp_path}/cache",
    )
    done = fresh_command(*arguments)
    assert done.returncode == 0, done.stderr
    assert "training: 99 documents" in done.stdout
    assert "validation: 1 documents" in done.stdout
    assert "end token <|endoftext|> = 0" in done.stdout
    (shard,) = (tmp_path / "cache").glob("text-*/train-00000.bin")
    data = bytearray(shard.read_bytes())
    data[7] ^= 1
    shard.write_bytes(data)
    damaged = command(*arguments)
    assert damaged.returncode == 3
    assert f"{shard} differs from its sha256" in damaged.stderr
    assert "Traceback" not in damaged.stderr
