"""A command keeps its exit code when its output fails, and calls only a bug a bug."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from linrnn.core.errors import described

COMMAND = """
import sys
from linrnn.config.cli import guarded
from linrnn.core.errors import DataError
from linrnn.core.output import say

def main():
    {body}

raise SystemExit(guarded(main))
"""


def call(
    body: str, redirect: str = "", cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """A command whose main function has this body, started by a shell."""
    return subprocess.run(
        ["/bin/sh", "-c", f'"$0" -c "$1" {redirect}', sys.executable, COMMAND.format(body=body)],
        capture_output=True,
        cwd=cwd,
        env={**os.environ, **environment},
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("redirect", [">&-", "<&- >&- 2>&-", "1</dev/null"])
def test_a_run_needs_no_open_stream(redirect, tmp_path):
    body = f"say('spoken'); say('an error', sys.stderr); open({str(tmp_path / 'file')!r}, 'w').write('mine')"
    done = call(body, redirect)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == "mine", "a file takes no closed stream's place"


def test_an_error_that_nobody_can_read_keeps_its_exit_code():
    for redirect in (">&- 2>&-", "2> /dev/full"):
        assert call("raise DataError('cause', 'remedy')", redirect).returncode == 3


def test_on_a_full_disk_a_run_goes_on_and_says_so_once():
    done = call("say('a'); say('b'); print('c')", "> /dev/full")
    assert done.returncode == 0
    assert done.stderr.decode().splitlines() == ["standard output is given up (No space left on device)"]


def test_on_a_full_disk_a_command_that_prints_its_result_fails_with_the_cause():
    done = call("print('result')", "> /dev/full")
    assert done.returncode == 7
    error, remedy = done.stderr.decode().splitlines()
    assert error == "error: No space left on device: standard output, or an open file"
    assert remedy.startswith("  -> free space")


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}],
    ids=["encoding", "locale"],
)
def test_a_terminal_without_the_letters_gets_escapes(environment):
    done = call(r"print('loss=\u2026, gr\xf6\xdfer'); raise DataError('\xfc', '\u2192')", **environment)
    assert done.returncode == 3, done.stderr
    assert done.stdout.decode("ascii") == "loss=\\u2026, gr\\xf6\\xdfer\n"
    assert done.stderr.decode("ascii") == "error: \\xfc\n  -> \\u2192\n"


@pytest.mark.parametrize(
    ("body", "code", "first"),
    [
        ("raise MemoryError('Unable to allocate 2 EiB')", 5, "error: out of memory: Unable to allocate 2 EiB"),
        ("import numpy; numpy.zeros(2**62)", 5, "error: out of memory: "),
        ("open('/nowhere/at/all/x')", 1, "unexpected error: FileNotFoundError"),
        ("raise ValueError('x')", 1, "unexpected error: ValueError: x"),
    ],
)
def test_a_bug_alone_is_called_a_bug(body, code, first):
    done = call(body)
    lines = done.stderr.decode().splitlines()
    assert (done.returncode, len(lines)) == (code, 2), lines
    assert lines[0].startswith(first)
    assert ("this is a bug" in lines[1]) == (code == 1)


def test_an_error_is_described_by_its_class_and_the_first_line_of_its_message():
    errors = (ValueError("\nthe cause\nmore"), ValueError(), ValueError(" "))
    assert [described(error) for error in errors] == ["ValueError: the cause", "ValueError", "ValueError"]


def test_a_reader_that_has_gone_ends_no_run():
    done = call("[say('x' * 1000) for _ in range(1000)]; say('done', sys.stderr)", "| head -1")
    assert b"done" in done.stderr
