"""`patch` together with what users and libraries do to a model.

A patched model gives the loss and the gradients of the unpatched one, or raises a one-line error. New alterations
belong in ALTERATIONS.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import cce_kernels
import pytest
import torch
import transformers
from patch_models import assert_same, batch, build_fla, build_hf, step
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers.loss import loss_utils

HOOKS = "head has forward or backward hooks"
LOSS = "loss_function, criterion or use_l2warp of its own"
NOT_LINEAR = "its head is a .*, not a torch.nn.Linear"
REPLACED = "the forward of its head was replaced by"
EQUAL = None  # in place of an error's words


class Adapted(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def new_head(kind: type = nn.Linear, bias: bool = True) -> Callable[[Any], None]:
    """Another kind of head with the model's weight; a head with a bias gets a large one."""

    def alter(model: Any) -> None:
        old, head = model.lm_head, kind(model.lm_head.in_features, model.lm_head.out_features, bias=bias)
        head.weight = old.weight
        if bias:
            head.bias.data = torch.linspace(-3, 3, old.out_features)
        model.lm_head = head

    return alter


def sets(path: str, value: Any) -> Callable[[Any], None]:
    def alter(model: Any) -> None:
        *places, name = path.split(".")
        setattr(functools.reduce(getattr, places, model), name, value)

    return alter


def double(_: Any, __: Any, output: Any) -> Any:
    return 2 * output


def on_head(function: Callable[..., Any], *args: Any, **options: Any) -> Callable[[Any], None]:
    return lambda model: function(model.lm_head, *args, **options)


def replaced_forward(model: Any) -> None:
    head = model.lm_head
    head.forward = lambda x: 2 * nn.functional.linear(x, head.weight)


def pruned_for_good(model: Any) -> None:
    prune.l1_unstructured(model.lm_head, "weight", amount=0.5)
    prune.remove(model.lm_head, "weight")


def zero3(model: Any) -> None:
    """Marked as by DeepSpeed, and hooked by somebody else."""
    model.lm_head.weight.ds_id = 0
    model.lm_head.register_forward_pre_hook(lambda _, x: (2 * x[0],))


def class_forward(_: Any) -> None:
    """A wrapper that claims to be the class's own forward."""
    kind = transformers.LlamaForCausalLM
    original = kind.forward

    @functools.wraps(original)
    def forward(self, *args, **call):
        output = original(self, *args, **call)
        output.loss = 2 * output.loss
        return output

    kind.forward = forward


def every_linear(_: Any) -> None:
    nn.Linear.forward = lambda self, x: 2 * nn.functional.linear(x, self.weight, self.bias)


def every_module(_: Any) -> None:
    nn.modules.module.register_module_forward_hook(
        lambda module, _, out: 2 * out if isinstance(module, nn.Linear) else None
    )


def every_cross_entropy(_: Any) -> None:
    loss_utils.fixed_cross_entropy = lambda *args, **call: 2 * CROSS_ENTROPY(*args, **call)


def learned_scale(model: Any) -> None:
    del model.logit_scale
    model.logit_scale = nn.Parameter(torch.tensor(2.0))


def own_logits(model: Any) -> None:
    def double(hidden_states, *args, **call):
        return type(model)._compute_logits_and_loss(model, 2 * hidden_states, *args, **call)

    model._compute_logits_and_loss = double


def llama(**options: Any) -> Any:
    return build_hf("Llama", **options)


def gla() -> Any:
    return build_fla("GLA")


def model_of(name: str) -> Callable[[], Any]:
    return lambda: build_hf(name)


# name: the model, what is done to it, the words it is refused with or EQUAL.
ALTERATIONS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str | None]] = {
    # the head's parts
    **{f"bias, {name}": (model_of(name), new_head(), EQUAL) for name in ("Llama", "Gemma2", "Cohere")},
    "bias, FLA": (gla, new_head(), EQUAL),
    "weight set": (llama, lambda model: model.lm_head.weight.data.mul_(2), EQUAL),
    "weight replaced": (
        llama,
        sets("lm_head.weight", nn.Parameter(torch.ones(96, 32).cumsum(0) / 96)),
        EQUAL,
    ),
    "weight's own hook": (llama, lambda model: model.lm_head.weight.register_hook(lambda grad: 3 * grad), EQUAL),
    "head frozen": (llama, lambda model: model.lm_head.requires_grad_(False), EQUAL),
    "pruned for good": (llama, pruned_for_good, EQUAL),
    # between the decoder and the logits
    "decoder's hook": (llama, lambda m: m.model.norm.register_forward_hook(double), EQUAL),
    "softcap set": (model_of("Gemma2"), sets("config.final_logit_softcapping", 2.0), EQUAL),
    "scale set": (model_of("Cohere"), sets("logit_scale", 0.5), EQUAL),
    "scale learned": (model_of("Cohere"), learned_scale, "logit_scale: must be a number"),
    # the head itself
    "forward hook": (llama, on_head(nn.Module.register_forward_hook, double), HOOKS),
    "forward pre-hook": (llama, on_head(nn.Module.register_forward_pre_hook, lambda _, x: (2 * x[0],)), HOOKS),
    "backward hook": (llama, on_head(nn.Module.register_full_backward_hook, lambda _, dx, __: (2 * dx[0],)), HOOKS),
    "hooks of every module": (llama, every_module, HOOKS),
    "replaced forward": (llama, replaced_forward, REPLACED),
    "replaced forward of nn.Linear": (llama, every_linear, REPLACED),
    "subclass": (llama, new_head(Adapted), NOT_LINEAR),
    "sequence": (llama, lambda m: sets("lm_head", nn.Sequential(m.lm_head, nn.Softplus()))(m), NOT_LINEAR),
    "compiled": (llama, lambda m: sets("lm_head", torch.compile(m.lm_head, backend="eager"))(m), NOT_LINEAR),
    "parametrized spectral_norm": (llama, on_head(parametrizations.spectral_norm), NOT_LINEAR),
    "ZeRO-3, and a hook beside DeepSpeed's": (llama, zero3, HOOKS),
    "pruned": (llama, on_head(prune.l1_unstructured, "weight", amount=0.5), HOOKS),
    # the loss
    "loss_function": (llama, sets("loss_function", lambda logits, labels, **_: logits.square().mean()), LOSS),
    "loss_type": (llama, sets("loss_type", "ForMaskedLM"), LOSS),
    "transformers' cross-entropy": (llama, every_cross_entropy, LOSS),
    "criterion": (gla, sets("criterion", nn.CrossEntropyLoss(label_smoothing=0.3)), LOSS),
    "use_l2warp": (gla, sets("config.use_l2warp", True), LOSS),
    "FLA's loss": (gla, own_logits, LOSS),
    "the class's forward": (llama, class_forward, r"LlamaForCausalLM.forward was replaced by .*class_forward"),
}


CROSS_ENTROPY = loss_utils.fixed_cross_entropy
FORWARDS = {kind: kind.forward for kind in (nn.Linear, transformers.LlamaForCausalLM)}


def altered_step(model: Any, alter: Callable[[Any], Any], call: dict[str, Any]) -> Any:
    try:
        alter(model)
        return step(model, **call)
    finally:  # of alterations to classes, functions and every module
        for kind, forward in FORWARDS.items():
            kind.forward = forward
        nn.modules.module._global_forward_hooks.clear()
        loss_utils.fixed_cross_entropy = CROSS_ENTROPY


@pytest.mark.parametrize("first", ["patched", "altered"])
@pytest.mark.parametrize("name", ALTERATIONS)
def test_an_altered_model_is_equal_or_refused(name, first):
    build, alter, words = ALTERATIONS[name]
    ids, labels = batch()
    model, call = build(), {"input_ids": ids, "labels": labels}
    want = altered_step(copy.deepcopy(model), alter, call)
    with pytest.raises(AssertionError):  # an alteration that alters nothing would test nothing
        assert_same(want, step(copy.deepcopy(model), **call))

    def both() -> Any:
        if first == "patched":
            return altered_step(cce_kernels.patch(model), alter, call)
        return altered_step(model, lambda model: (alter(model), cce_kernels.patch(model)), call)

    if words is EQUAL:
        assert_same(both(), want)
    else:
        with pytest.raises((ValueError, TypeError), match=words) as error:
            both()
        assert "\n" not in str(error.value)
