"""The loss as a module: the function's own result, and FLA's module with its order of arguments."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case, draw, gradients
from cce_kernels import LinearCrossEntropyLoss, linear_cross_entropy
from cce_kernels.module import FusedLinearCrossEntropyLoss
from everywhere import devices_with
from torch import distributed as dist

from linrnn.models.fla_import import import_fla

BIASED = Case("module", shape=(30,), dim=24, bias=True, vocab=90)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "ignore_index": 3, "label_smoothing": 0.1},
    {"logit_scale": 0.3, "accumulate_grad_in_fp32": False},
    {"logit_scale": 0.3, "logit_softcapping": 2.0},  # Triton's interpreter has no tanh, so a formula stands for FLA
]


def flas() -> Any:
    return import_fla("fla.modules").FusedLinearCrossEntropyLoss


def test_the_module_is_the_function_with_its_options_stored():
    e, c, targets, bias = draw(BIASED, "cpu")
    options = {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 1e-3, "ignore_index": 5, "reduction": "none"}
    module = LinearCrossEntropyLoss(**options)
    want = linear_cross_entropy(e, c, targets.clamp_min(0), bias=bias, **options)
    for made in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(made(e, c, targets.clamp_min(0), bias), want)
    assert not module.state_dict()
    assert repr(module) == (
        "LinearCrossEntropyLoss(reduction='none', ignore_index=5, softcap=3.0, label_smoothing=0.1, z_loss=0.001)"
    )
    summed = torch.zeros_like(c)
    loss, lse = LinearCrossEntropyLoss(return_lse=True, shift=1)(e, c, targets, main_grad_c=summed)
    assert lse.shape == (len(e) - 1,)
    loss.backward()
    assert summed.any()
    assert c.grad is None


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (LinearCrossEntropyLoss, options, error, message)
    for options, error, message in (
        ({"label_smothing": 0.1}, TypeError, r"label_smothing: is no option .*did you mean label_smoothing\?"),
        ({"bias": None}, TypeError, r"bias: is no option of LinearCrossEntropyLoss"),
        ({"softcap": -1}, ValueError, "softcap: must be positive"),
        ({"shift": 1.0}, TypeError, "shift: must be an integer"),
        ({"preset": "cce_best"}, ValueError, "preset: must be one of"),
    )
]
REFUSED += [  # what FLA's has and this does not
    (FusedLinearCrossEntropyLoss, options, ValueError, message)
    for options, message in (
        ({"use_l2warp": True}, "use_l2warp: must be False"),
        ({"num_chunks": 4}, "num_chunks: must be 8 here, got 4; give workspace_mib"),
    )
]


@pytest.mark.parametrize(("kind", "options", "error", "message"), REFUSED, ids=str)
def test_wrong_options_fail_at_construction(kind, options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        kind(**options)


def test_the_signature_is_flas():
    for function in ("__init__", "forward"):
        of_both = [inspect.signature(getattr(kind, function)) for kind in (FusedLinearCrossEntropyLoss, flas())]
        ours, theirs = ([(p.name, p.default, p.kind) for p in x.parameters.values()] for x in of_both)
        assert ours[: len(theirs)] == theirs, function


def results(module: Any, options: dict[str, Any], device: str) -> list[torch.Tensor]:
    x, w, t, b = draw(BIASED, device)
    loss = module(x, t.clamp_min(3) if options.get("ignore_index") == 3 else t, w, b)
    return [loss.detach(), *gradients(loss, (x, w, b))]


@devices_with("options", [], OPTIONS[:-1], on_gpu=OPTIONS)
def test_losses_and_gradients_are_flas(options, device):
    both = (results(kind(**options), options, device) for kind in (FusedLinearCrossEntropyLoss, flas()))
    tolerance = 1e-5 if device == "cpu" else 1e-4
    for got, want in zip(*both, strict=True):
        torch.testing.assert_close(got, want.to(got.dtype).reshape(got.shape), rtol=tolerance, atol=tolerance)


def test_a_capped_loss_is_the_formulas():
    def formula(x, t, w, b):
        return F.cross_entropy(2 * torch.tanh(0.3 * F.linear(x, w, b) / 2), t)

    torch.testing.assert_close(
        results(FusedLinearCrossEntropyLoss(**OPTIONS[-1]), {}, "cpu"), results(formula, {}, "cpu")
    )


def test_flas_process_group_is_a_vocabulary_over_its_ranks(group_of_one):
    """One rank here: the group's way gives the loss of one device. Several ranks: tests/kernels/parallel."""
    e, c, targets, bias = draw(BIASED, "cpu")
    got, want = (
        gradients(FusedLinearCrossEntropyLoss(logit_scale=0.5, process_group=group)(e, targets, c, bias), (e, c, bias))
        for group in (dist.group.WORLD, None)
    )
    torch.testing.assert_close(got, want)
