"""Every step of a run has one origin, however the run's processes ended."""

from typing import Any

import pytest

from linrnn.core.errors import DataError
from linrnn.runs.origins import differing, origins_of, read_processes, settled


def process(from_step: int, to_step: int | None) -> dict[str, Any]:
    return {"from_step": from_step, "to_step": to_step, "ended": None if to_step is None else "2026-01-01"}


def spans(processes: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(each["from_step"], each["to_step"]) for each in processes]


@pytest.mark.parametrize(
    ("earlier", "step", "left"),
    [
        ([(0, 30)], 30, [(0, 30)]),
        ([(0, None)], 20, [(0, 20)]),  # killed: what its last checkpoint has
        ([(0, 30)], 20, [(0, 20)]),  # it went on after that checkpoint, and those steps are trained again
        ([(0, None)], 0, []),  # no checkpoint: none of its steps is left
        ([(0, 20), (20, None)], 20, [(0, 20)]),  # killed before its first checkpoint
        ([(0, 20), (20, 30)], 25, [(0, 20), (20, 25)]),
    ],
)
def test_earlier_processes_keep_the_steps_that_are_left_of_each(earlier, step, left):
    kept = settled([process(*span) for span in earlier], step)
    assert spans(kept) == left
    assert [each["ended"] for each in kept] == [process(*span)["ended"] for span in earlier[: len(kept)]]


@pytest.mark.parametrize("content", ["", "{}", "[]"])
def test_a_record_of_another_kind_is_refused(content, tmp_path):
    path = tmp_path / "environment.json"
    assert read_processes(path) == []
    path.write_text(content)
    with pytest.raises(DataError, match=r"(?s)environment\.json.*move the run's directory away"):
        read_processes(path)


def environment(**choices: str) -> dict[str, Any]:
    fingerprint = str(hash(str(choices)))
    return {"packages": {"torch": "2.13"}, "kernel_choices": {"fingerprint": fingerprint, "choices": choices}}


CODE = {"linrnn": "a" * 12, "cce_kernels": "b" * 12}
RECORDED: dict[str, Any] = {
    "packages": {"torch": "2.13", "triton": "3.7", "flash-linear-attention": "0.6.0", "wandb": "0.27"},
    "gpus": [{"name": "H200"}],
    "gpu_driver": "580",
    "cpu": "Xeon",
    "code": CODE,
    "git": {"commit": "1" * 40, "dirty": False},
}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"git": {"commit": "2" * 40, "dirty": True}}, []),  # a commit in between, or a file beside the code
        ({"packages": {**RECORDED["packages"], "wandb": "0.28"}}, []),
        ({"gpu_driver": "590", "cpu": "EPYC"}, []),
        ({"code": {**CODE, "linrnn": "c" * 12}}, ["code of linrnn"]),  # at one commit, uncommitted
        ({"packages": {**RECORDED["packages"], "triton": "3.6"}}, ["triton"]),
        ({"gpus": [{"name": "H100"}]}, ["device"]),
        ({"cuda_allocator": "expandable_segments:True"}, ["cuda_allocator"]),
    ],
)
def test_two_origins_are_told_apart_by_what_computes(change, found):
    assert differing([RECORDED, {**RECORDED, **change}]) == found


def test_the_commit_stands_for_code_that_was_not_recorded():
    one, other = ({"git": {"commit": commit}} for commit in ("1", "2"))
    assert differing([one, one]) == []
    assert differing([one, other]) == ["commit"]


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (environment(norm="BT=32", rotary="B=1"), ["kernel_choices"]),
        ({**environment(norm="BT=32"), "packages": {"torch": "2.11"}}, ["torch", "kernel_choices"]),
        (environment(scan="BK=64"), []),  # another model or batch has other kernels
        ({"packages": {"torch": "2.13"}, "kernel_choices": None}, []),  # of a CPU
    ],
)
def test_kernels_that_ran_with_two_configurations_are_two_origins(other, found):
    one = environment(norm="BT=16", rotary="B=1")
    assert differing([one, other]) == differing([one, one, other]) == found
    assert differing([]) == differing([other]) == []


def test_a_run_has_an_origin_for_each_way_in_which_its_processes_computed():
    first, other = environment(norm="BT=16"), environment(norm="BT=32")
    processes = [{**first, "from_step": 0, "to_step": 30}, {**other, "from_step": 30, "to_step": 60}]
    assert origins_of(processes) == [first, other]
    assert origins_of([processes[0], {**processes[1], "to_step": 30}]) == [first], "the second trained no step"
    assert origins_of([{**first, "from_step": 0, "to_step": 0}]) == [first]
    assert origins_of([]) == []
