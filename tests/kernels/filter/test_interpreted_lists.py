"""The lists of the filter's Triton kernels, on CPU tensors in Triton's interpreter."""

import pytest
import torch
from cases import BF16, gradients
from cce_kernels import linear_cross_entropy
from filter_cases import FILTERED, SHORT, SMALL, TOGETHER, Filtered, check_filtered, drawn
from triton_interpreter import MARKS

pytestmark = MARKS


def test_lists_of_several_segments_and_blocks(monkeypatch):
    monkeypatch.setattr("cce_kernels.filter.select.EIGHTS", 32)
    monkeypatch.setattr("cce_kernels.filter.select.FOUND", 64)
    check_filtered(Filtered("segments", {"filter_unbiased": True}, shape=(20, 16, 610)), BF16, "cpu")


def test_lists_sorted_in_parts(monkeypatch):
    monkeypatch.setattr(*TOGETHER)
    monkeypatch.setattr("cce_kernels.filter.gather.list_parts", lambda *_: 4)
    check_filtered(Filtered("parts", {"filter_unbiased": True}, shape=(10, 300, 330)), BF16, "cpu")


def test_lists_too_long_for_their_slots(monkeypatch):
    monkeypatch.setattr("cce_kernels.filter.select.SLOTS", 8)
    check_filtered(Filtered("slots", {"filter_unbiased": True}, (20, 16, 610), overflows=True), BF16, "cpu")


def test_the_way_around_the_lists_is_launched_at_first_and_then_as_needed(monkeypatch):
    """On CPU tensors the host never knows the lists; here it knows them all."""
    from cce_kernels.filter import gather

    class Known:
        def __init__(self, flag):
            self.is_zero = lambda: flag.item() == 0

    launched, real = [], gather.gradients
    monkeypatch.setattr(gather, "gradients", lambda *args: launched.append(True) or real(*args))
    monkeypatch.setattr(*TOGETHER)
    monkeypatch.setattr(gather, "Glance", Known)
    monkeypatch.setattr(gather, "_launched", gather.Recent(gather.KINDS))
    e, c, targets, _ = drawn(Filtered("known", shape=SMALL), BF16, "cpu")

    def run(e):
        launched.clear()
        loss, stats = linear_cross_entropy(e, c, targets, return_stats=True, **SHORT)
        grads = gradients(loss, (e, c))
        return bool(launched), [*grads, *stats.values()]

    (at_first, found), (again, same) = run(e), run(e)
    assert (at_first, again) == (True, False)
    assert all(torch.equal(x, y) for x, y in zip(found, same, strict=True))
    assert run((e * 0).detach().requires_grad_())[0]  # uniform rows: the lists overflow


@pytest.mark.parametrize("case", [case for case in FILTERED if case.name in ("unbiased", "short_lists_kahan")], ids=str)
def test_another_backward_pass_through_lists_finds_the_same(case):
    e, c, targets, _ = drawn(case, BF16, "cpu")
    loss = linear_cross_entropy(e, c, targets, **{"filter_eps": 2.0**-8} | case.options)
    loss.backward(retain_graph=True)
    first, e.grad, c.grad = (e.grad, c.grad), None, None
    loss.backward()
    assert torch.equal(e.grad, first[0])
    assert torch.equal(c.grad, first[1])
