"""benchmarks/first_call.py without a GPU: it compiles the kernels of calls for an H100, and runs nothing."""

import pytest

pytest.importorskip("triton")


def test_kernels_of_first_calls_are_counted_and_timed(fresh_command):
    sizes = ("--dim", "64", "--vocab", "512", "--tokens", "100", "90")
    done = fresh_command("benchmarks/first_call.py", "exact", *sizes)
    assert done.returncode == 0, done.stderr
    heading, *rows = [line.split() for line in done.stdout.splitlines()]
    assert heading == ["setting", "call", "kernels", "seconds"]
    kernels = {" ".join(call): int(count) for _setting, *call, count, _seconds in rows}
    assert kernels.keys() == {"first", "other N", "again"}
    assert kernels["first"] >= 8
    assert kernels["other N"] <= 2
    assert kernels["again"] == 0
