"""The loss as a module: the function's own result, and FLA's and Liger's modules with their orders of arguments."""

import copy
import importlib
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Case, draw, gradients
from cce_kernels import LinearCrossEntropyLoss, linear_cross_entropy
from cce_kernels.module import FusedLinearCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
from torch import distributed as dist

from linrnn.models.fla_import import import_fla

BIASED = Case("module", shape=(30,), dim=24, bias=True, vocab=90)
# The library's module, ours, how ours is called, and the options that both are tried with.
THEIRS: dict[str, tuple[str, Any, list[dict[str, Any]]]] = {
    "fla.modules.FusedLinearCrossEntropyLoss": (
        "xtwb",
        FusedLinearCrossEntropyLoss,
        [
            {},
            {"reduction": "sum", "ignore_index": 3, "label_smoothing": 0.1},
            {"logit_scale": 0.3, "accumulate_grad_in_fp32": False},
            {"logit_scale": 0.3, "logit_softcapping": 2.0},
        ],
    ),
    "liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss": (
        "wxtb",
        LigerFusedLinearCrossEntropyLoss,
        [
            {},
            {"reduction": "sum", "ignore_index": 3, "label_smoothing": 0.1, "lse_square_scale": 1e-2},
            {"accum_dtype": torch.float32},
            {"ce_weight": torch.linspace(0.5, 2, 90)},
            {"softcap": 2.0},
        ],
    ),
}
CALLS = [(name, options) for name, (_, _, tried) in THEIRS.items() for options in tried]
# Triton's interpreter has no tanh and cannot run Liger's class weights; a formula stands for these.
BY_FORMULA = [call for call in CALLS if {"softcap", "logit_softcapping", "ce_weight"} & call[1].keys()]


def library(name: str) -> Any:
    module, kind = name.rsplit(".", 1)
    importing = import_fla if module.startswith("fla.") else importlib.import_module
    return getattr(importing(module), kind)


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
REFUSED += [  # what the other libraries' modules have and these do not
    (FusedLinearCrossEntropyLoss, options, ValueError, message)
    for options, message in (
        ({"use_l2warp": True}, "use_l2warp: must be False"),
        ({"num_chunks": 4}, "num_chunks: must be 8 here, got 4; give workspace_mib"),
    )
]
REFUSED += [
    (LigerFusedLinearCrossEntropyLoss, options, error, message)
    for options, error, message in (
        ({"ce_weight": torch.ones(3), "label_smoothing": 0.1}, ValueError, "ce_weight: cannot combine with label_smo"),
        ({"ce_weight": [1.0]}, TypeError, "ce_weight: must be a tensor, got list"),
        ({"ce_weight": torch.ones(9).double()}, ValueError, "ce_weight: must be bfloat16, float16 or float32"),
        ({"ce_weight": torch.ones(9, requires_grad=True)}, ValueError, "ce_weight: requires a gradient, .*detach"),
        ({"accum_dtype": torch.float16}, ValueError, "accum_dtype: must be None or torch.float32"),
        ({"return_z_loss": True}, ValueError, "return_z_loss: must be False .*return_lse"),
        ({"return_token_accuracy": True}, ValueError, "return_token_accuracy: must be False .*return_metrics"),
    )
]


@pytest.mark.parametrize(("kind", "options", "error", "message"), REFUSED, ids=str)
def test_wrong_options_fail_at_construction(kind, options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        kind(**options)


def test_class_weights_of_any_label():
    weights = torch.linspace(0.5, 2, 90)
    e, c, targets, bias = draw(BIASED, "cpu")
    want = F.cross_entropy(F.linear(e, c, bias), targets, weight=weights)
    narrow = targets.to(torch.int8)  # V < 128
    torch.testing.assert_close(LigerFusedLinearCrossEntropyLoss(weights)(c, e, narrow, bias), want)
    unsigned = targets.clamp(min=0).to(torch.uint8)  # as an index, torch takes it for a mask
    want = F.cross_entropy(F.linear(e, c, bias), targets.clamp(min=0), weight=weights)
    torch.testing.assert_close(LigerFusedLinearCrossEntropyLoss(weights)(c, e, unsigned, bias), want)
    with pytest.raises(ValueError, match=r"^targets: 90 lies outside \[0, 90\)"):
        LigerFusedLinearCrossEntropyLoss(weights)(c, e, torch.full_like(targets, 90), bias)
    with pytest.raises(ValueError, match=r"^ce_weight: must be \(V,\) = \(90,\), got \(91,\)"):
        LigerFusedLinearCrossEntropyLoss(torch.ones(91))(c, e, targets, bias)
    with pytest.raises(TypeError, match=r"^target: must be a tensor, got list"):
        LigerFusedLinearCrossEntropyLoss(weights)(c, e, [1], bias)


def test_class_weights_move_with_the_module_and_are_not_saved():
    """A copy from the host at every call would wait for the device."""
    module = LigerFusedLinearCrossEntropyLoss(torch.ones(9)).to("meta")
    assert module.ce_weight.is_meta
    assert not module.state_dict()


@pytest.mark.parametrize("name", THEIRS)
def test_signatures_are_the_librarys(name):
    ours, theirs = THEIRS[name][1], library(name)
    for function in ("__init__", "forward"):
        [got, want] = [inspect.signature(getattr(kind, function)).parameters.values() for kind in (ours, theirs)]
        described = [[(p.name, p.default, p.kind) for p in parameters] for parameters in (got, want)]
        assert described[0][: len(described[1])] == described[1], f"{name}.{function}"


def same_as_the_library(name: str, options: dict[str, Any], device: str, tolerance: float) -> None:
    order, kind, _ = THEIRS[name]
    x, w, t, b = draw(BIASED, device)
    if options.get("ignore_index") == 3:
        t = t.clamp_min(3)
    leaves = {"x": x, "w": w, "t": t, "b": b}
    results = []
    options = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    for module in (kind(**options), library(name)(**options)):
        loss = module(*(leaves[letter] for letter in order))
        results.append([loss.detach(), *gradients(loss, (x, w, b))])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want.to(got.dtype).reshape(got.shape), rtol=tolerance, atol=tolerance)


@pytest.mark.interpreter
@pytest.mark.parametrize(("name", "options"), [call for call in CALLS if not any(call is x for x in BY_FORMULA)])
def test_losses_and_gradients_are_the_librarys(name, options):
    same_as_the_library(name, options, "cpu", 1e-5)


@pytest.mark.parametrize(("name", "options"), BY_FORMULA)
def test_a_capped_or_weighted_loss_is_the_formulas(name, options):
    order, kind, _ = THEIRS[name]
    x, w, t, b = draw(BIASED, "cpu")
    leaves = {"x": x, "w": w, "t": t, "b": b}
    logits = options.get("logit_scale", 1) * F.linear(x, w, b)
    if "ce_weight" not in options:
        logits = 2 * torch.tanh(logits / 2)
    want = F.cross_entropy(logits, t, weight=options.get("ce_weight"))
    got = kind(**options)(*(leaves[letter] for letter in order))
    for ours, theirs in zip([got, *gradients(got, (x, w, b))], [want, *gradients(want, (x, w, b))], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "options"), CALLS)
def test_losses_and_gradients_are_the_librarys_on_a_gpu(name, options):
    same_as_the_library(name, options, "cuda", 1e-4)


def test_flas_process_group_is_a_vocabulary_over_its_ranks(tmp_path):
    """One rank here: the group's way gives the loss of one device. Several ranks: tests/kernels/parallel."""
    e, c, targets, bias = draw(BIASED, "cpu")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        got, want = [
            FusedLinearCrossEntropyLoss(logit_scale=0.5, process_group=group)(e, targets, c, bias)
            for group in (dist.group.WORLD, None)
        ]
        for ours, theirs in zip(gradients(got, (e, c, bias)), gradients(want, (e, c, bias)), strict=True):
            torch.testing.assert_close(ours, theirs)
    finally:
        dist.destroy_process_group()
