"""FLA's models with this loss: as their criterion, and as a backend of FLA's own fused loss.

The decoders are replaced, because most of FLA's mixers need a GPU. Head, loss and the forward around them are FLA's.
"""

import ast
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from cce_kernels import patch, register_in_fla
from cce_kernels.huggingface import fla_backend
from cce_kernels.module import FusedLinearCrossEntropyLoss
from torch import Tensor, nn

from linrnn.models.fla_import import import_fla

VOCAB, WIDTH = 96, 32
EXTRA: dict[str, dict[str, Any]] = {
    "CATForCausalLM": {"num_heads": 2, "decoder_hidden_size": 32},
    "HGRNForCausalLM": {"num_hidden_layers": 1},
    "HGRN2ForCausalLM": {"num_hidden_layers": 1, "num_heads": 2, "expand_ratio": None},
    "RWKV7ForCausalLM": {"use_l2warp": False},  # a criterion replaces FLA's loss together with this penalty
}
# These read fuse_cross_entropy in place of fuse_linear_cross_entropy, and call the fused loss in training only.
OTHER_FLAG = [f"{name}ForCausalLM" for name in ("KDA", "LogLinearMamba2", "Mom", "PrecondKDA", "YOCO")]


def names() -> list[str]:
    """FLA's causal classes, read without importing them."""
    [folder] = importlib.util.find_spec("fla").submodule_search_locations
    tree = ast.parse((Path(folder) / "models" / "__init__.py").read_text())
    [listed] = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return [name for name in ast.literal_eval(listed) if name.endswith("ForCausalLM")]


class Decoder(nn.Module):
    """Hidden states that depend on a parameter alone."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.states = nn.Parameter(torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(0)))

    def forward(self, *_: Any, **__: Any) -> Any:
        output = importlib.import_module("fla.models.mom.modeling_mom").MomOutputWithPast
        return output(last_hidden_state=self.states, router_logits=(torch.linspace(-1, 1, 160).view(40, 4),))


def build(name: str, length: int, **flags: Any) -> Any:
    kind = getattr(importlib.import_module("fla.models"), name)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 0, "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(kind.config_class(**{**sizes, **flags, **EXTRA.get(name, {})}))
        model.lm_head = nn.Linear(WIDTH, VOCAB, bias=True)
    [decoder] = [part for part, _ in model.named_children() if part != "lm_head"]
    setattr(model, decoder, Decoder(length))
    model.get_output_embeddings = lambda: model.lm_head  # transformers asks the decoder for its embeddings first
    return model.train()


def batch() -> tuple[Tensor, Tensor]:
    """Not that of patch_models.py, which imports transformers: the interpreting process would wait for it."""
    ids = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :7] = -100
    return ids, labels


def fused(name: str) -> dict[str, bool]:
    """The options of a configuration with which the model calls FLA's fused linear loss."""
    return {"fuse_cross_entropy": name in OTHER_FLAG, "fuse_linear_cross_entropy": name not in OTHER_FLAG}


def step(model: Any, ids: Tensor, **call: Any) -> list[Tensor]:
    """Loss, and gradients of the hidden states and the head."""
    loss = model(input_ids=ids, use_cache=False, **call).loss
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def same(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", names())
def test_the_criterion_and_the_patch_of_every_causal_model(name):
    ids, labels = batch()
    own = build(name, 20, fuse_cross_entropy=False)
    want = step(own, ids, labels=labels)
    ours = build(name, 20, **fused(name))
    ours.criterion = FusedLinearCrossEntropyLoss()
    same(step(ours, ids, labels=labels), want)
    same(step(patch(own), ids, labels=labels), want)


def test_gradient_accumulation_gives_flas_criterion_a_count():
    """FLA copies the criterion and sets its reduction."""
    ids, labels = batch()
    own = build("GLAForCausalLM", 20, fuse_cross_entropy=False)
    ours = build("GLAForCausalLM", 20, **fused("GLAForCausalLM"))
    ours.criterion = FusedLinearCrossEntropyLoss(label_smoothing=0.1)
    own.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    call = {"labels": labels, "num_items_in_batch": torch.tensor(50)}
    same(step(ours, ids, **call), step(own, ids, **call))
    assert ours.criterion.reduction == "mean"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """FLA's function with this package among its backends, and removed from them again. Gives the calls of ours."""
    calls = spy(monkeypatch)
    yield calls
    for registry in importlib.import_module("fla.backends")._function_registries.values():
        registry._backends.pop("cce", None)


def spy(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    own = fla_backend._loss_and_gradients

    def watched(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return own(*args, **options)

    monkeypatch.setattr(fla_backend, "_loss_and_gradients", watched)
    import_fla("fla.backends")  # without FLA's models
    register_in_fla()
    return calls


def flas_loss(device: str, **options: Any) -> list[Tensor]:
    """FLA's own module, whichever backend it chooses: loss and gradients."""
    generator = torch.Generator().manual_seed(0)
    x, w, b = (
        torch.randn(*shape, generator=generator).to(device).requires_grad_() for shape in ((20, 24), (90, 24), (90,))
    )
    target = torch.randint(90, (20,), generator=generator).to(device)
    target[3] = -100
    loss = import_fla("fla.modules").FusedLinearCrossEntropyLoss(**options)(x, target, w, b)
    return [loss.detach(), *torch.autograd.grad(3 * loss, (x, w, b))]


def both_backends(calls: list[Any], device: str, monkeypatch: pytest.MonkeyPatch, tolerance: float) -> None:
    for options in ({}, {"reduction": "sum", "label_smoothing": 0.1, "logit_scale": 0.5, "num_chunks": 2}):
        got = flas_loss(device, **options)
        assert len(calls) == 1
        monkeypatch.setenv("FLA_CCE", "0")
        want = flas_loss(device, **options)
        monkeypatch.delenv("FLA_CCE")
        assert len(calls) == 1, "FLA_CCE=0 leaves the call to FLA"
        same(got, want, tolerance)
        calls.clear()
    flas_loss(device, use_l2warp=True)
    assert not calls, "L2Warp stays FLA's"


@pytest.mark.interpreter
def test_flas_fused_loss_takes_our_backend_unless_switched_off(monkeypatch):
    both_backends(spy(monkeypatch), "cpu", monkeypatch, 1e-5)


@pytest.mark.gpu
@pytest.mark.usefixtures("untuned")
def test_flas_fused_loss_takes_our_backend_unless_switched_off_on_a_gpu(monkeypatch, registered):
    both_backends(registered, "cuda", monkeypatch, 1e-4)


@pytest.mark.gpu
@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("name", names())
def test_every_causal_model_has_the_loss_of_flas_fused_one_on_a_gpu(name, registered, monkeypatch):
    ids, labels = (x.cuda() for x in batch())
    model = build(name, 20, **fused(name)).cuda()
    monkeypatch.setenv("FLA_CCE", "0")
    want = step(model, ids, labels=labels)
    assert not registered
    monkeypatch.delenv("FLA_CCE")
    same(step(model, ids, labels=labels), want, 1e-4)
    assert registered
    model.criterion = FusedLinearCrossEntropyLoss()
    same(step(model, ids, labels=labels), want, 1e-4)
