"""Worker processes end with the process that started them, whichever signal ends it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background command has SIGINT ignored
from linrnn.core.interrupts import worker_processes

def work(number):
    os.write(1, f"{number} {os.getpid()}\\n".encode())  # at once, so that no line is read in part
    time.sleep(60)

if __name__ == "__main__":
    with worker_processes(2) as pool:
        [future.exception() for future in [pool.submit(work, number) for number in range(6)]]
"""


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("number", "send"),
    [(signal.SIGINT, os.killpg), (signal.SIGTERM, os.kill), (signal.SIGKILL, os.kill)],  # the first as a terminal does
)
def test_a_signal_ends_the_workers_and_begins_no_waiting_task(number, send, tmp_path):
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text(PROGRAM)
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, program], stdout=file, stderr=file, start_new_session=True)
    until = time.monotonic() + 60
    while len(log.read_text().splitlines()) < 2:
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.1)
    workers = [int(line.split()[1]) for line in log.read_text().splitlines()]
    send(process.pid, number)
    assert process.wait(20) == -number
    until = time.monotonic() + 20
    while any(map(alive, workers)):
        assert time.monotonic() < until, "a worker goes on"
        time.sleep(0.1)
    assert {line.split()[0] for line in log.read_text().splitlines() if line[:1].isdigit()} == {"0", "1"}
