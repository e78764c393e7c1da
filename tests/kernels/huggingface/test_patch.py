"""`patch`: models of transformers and FLA give the same loss and gradients with our loss as before."""

import copy
import functools
import inspect
import json
import pickle
import types
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import accelerate
import cce_kernels
import pytest
import torch
import transformers
from cce_kernels.huggingface import deferred
from patch_models import MIXERS, VOCAB, assert_same, batch, build_fla, build_hf, initialised, same_step, step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

CLASSES = [
    *("Cohere", "Cohere2", "Gemma2", "Gemma3", "Glm4", "Granite", "Llama", "Olmo3", "Phi", "Qwen3"),
    *("GPTNeoX", "OPT", "Bloom", "Falcon"),  # decoders and heads of other names
]


def mamba(name: str, **options: Any) -> Any:
    """A forward that reads the dtype of its head."""
    config = getattr(transformers, f"{name}Config")(hidden_size=32, num_hidden_layers=1, vocab_size=VOCAB, **options)
    return initialised(lambda: getattr(transformers, f"{name}ForCausalLM")(config))


class Own(transformers.LlamaForCausalLM):
    """A user's class: what counts is its forward."""

    def forward(self, input_ids=None, labels=None, **call):
        hidden = self.model(input_ids, **call).last_hidden_state
        logits = torch.tanh(3 * self.lm_head(hidden).float() / 5) * 2
        return transformers.modeling_outputs.CausalLMOutputWithPast(self.loss_function(logits, labels, VOCAB), logits)


def own(bias: bool) -> Any:
    model = Own(build_hf("Llama").config).eval()
    model.lm_head = nn.Linear(32, VOCAB, bias=bias)
    return model


def checkpointing() -> Any:
    model = build_hf("Llama").train()
    model.gradient_checkpointing_enable()
    return model


ids, labels = batch()
LONG = dict(zip(("input_ids", "labels"), batch(80), strict=True))  # above 64, where GLA takes its chunked kernel
# A model, and what its call differs in from one with ids and labels
SAME: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    **{name: (partial(build_hf, name), {}) for name in CLASSES},
    "GPT2": (partial(build_hf, "GPT2", "GPT2LMHeadModel"), {}),
    "Mamba": (partial(mamba, "Mamba"), {}),
    "Mamba2": (partial(mamba, "Mamba2", num_heads=4, head_dim=16, expand=2, n_groups=1), {}),
    "tied": (partial(build_hf, "Llama", tie_word_embeddings=True), {}),
    "checkpointing": (checkpointing, {}),
    "a user's own class": (partial(own, False), {}),
    "a user's own class, bias": (partial(own, True), {}),
    **{f"FLA {name}": (partial(build_fla, name), LONG) for name in MIXERS},
    "FLA GLA, tied": (partial(build_fla, "GLA", tie_word_embeddings=True), LONG),
    **{
        f"{name}, {items} items": (build, {"num_items_in_batch": items})
        for name, build in (("Gemma2", partial(build_hf, "Gemma2")), ("FLA GLA", partial(build_fla, "GLA")))
        for items in (50, torch.tensor(50))
    },
    "shift_labels": (partial(build_hf, "Qwen2"), {"shift_labels": labels.roll(-2, 1)}),
    "ignore_index": (partial(build_hf, "Qwen2"), {"labels": ids, "ignore_index": int(ids[0, 5])}),
    "FLA GLA, both": (  # whose forward passes over both
        partial(build_fla, "GLA"),
        {"labels": ids, "ignore_index": int(ids[0, 5]), "shift_labels": labels.roll(-2, 1)},
    ),
    "labels that are all ignored": (partial(build_hf, "Llama"), {"labels": torch.full_like(ids, -100)}),
    "FLA GLA, labels that are all ignored": (partial(build_fla, "GLA"), {"labels": torch.full_like(ids, -100)}),
}


# ------------------------------------------------------------------------------------------ the same as before
@pytest.mark.parametrize("name", SAME)
def test_loss_and_gradients_are_the_models_own(name):
    build, call = SAME[name]
    model = build()
    assert name != "Phi" or model.lm_head.bias.any()
    if "tied" in name:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    same_step(model, **{"input_ids": ids, "labels": labels} | call)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GraniteMoe"])
def test_experts_keep_their_auxiliary_loss(name):
    model = build_hf(name)
    same_step(model, input_ids=ids, labels=labels)
    own = model(ids, labels=labels)
    without = model(ids, labels=labels, output_router_logits=False)
    assert own.aux_loss is not None
    assert own.loss > without.loss
    got = cce_kernels.patch(model)(ids, labels=labels)
    torch.testing.assert_close(got.aux_loss, own.aux_loss)
    torch.testing.assert_close(got.router_logits, own.router_logits)
    torch.testing.assert_close(model(ids, labels=labels, output_router_logits=False).loss, without.loss)


# ------------------------------------------------------------------------------------------ predictions
@pytest.mark.parametrize("scale", [2.0, -2.0])
def test_predictions_are_the_largest_logits(scale, monkeypatch):
    model = build_hf("Cohere", logit_scale=scale)
    model.lm_head = nn.Linear(32, VOCAB)
    with torch.no_grad():
        want = model(ids).logits.argmax(-1)
        cce_kernels.patch(model, predictions=True)
        got = model(ids, labels=labels, output_hidden_states=True)
        assert torch.equal(got.predictions, want)
        assert list(got)[:2] == ["loss", "predictions"]
        hidden = deferred.DeferredLogits(got.hidden_states[-1], model.lm_head) * scale
        assert torch.equal(hidden.predictions(), want)
        assert torch.equal((hidden / 7).tanh().predictions(), want)
    assert "predictions" not in model(ids, labels=labels), "gradients are wanted: this is training"
    assert "predictions" not in model.train()(ids, labels=labels)


def test_predictions_that_nobody_asked_for_are_refused_when_used():
    model = cce_kernels.patch(build_hf("Llama"))
    with torch.no_grad():
        output = model(ids, labels=labels)
    assert output.predictions.shape == (0,)
    assert "NoPredictions()" in repr(output)
    assert repr(output.predictions.detach()) == "NoPredictions()"  # DeepSpeed's hooks detach every output
    for use in (torch.Tensor.cpu, lambda x: x.argmax(-1), lambda x: x == labels):
        with pytest.raises(ValueError, match=r"predictions: .*cce_kernels.patch\(model, predictions=True\)"):
            use(output.predictions)
    with pytest.raises(TypeError, match="predictions: must be True or False"):
        cce_kernels.patch(build_hf("Llama"), predictions="yes")


# ------------------------------------------------------------------------------------------ its calls
def test_arguments_by_position_masks_and_states():
    model = build_hf("Llama")
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    same_step(model, ids, mask, labels=labels, output_hidden_states=True)
    names = list(inspect.signature(model.forward).parameters)
    before = [ids, mask, None, None, None, labels]
    assert names[: len(before)][-1] == "labels"
    same_step(model, *before)
    want = model(ids, mask, labels=labels, output_hidden_states=True, use_cache=True)
    got = cce_kernels.patch(model)(ids, mask, labels=labels, output_hidden_states=True, use_cache=True)
    torch.testing.assert_close(got.hidden_states, want.hidden_states)
    assert got.past_key_values.get_seq_length() == ids.shape[1]


@pytest.mark.parametrize("build", [lambda: build_hf("Gemma2"), lambda: build_fla("Transformer")])
def test_without_labels_nothing_changes_and_nothing_after_unpatch(build):
    model = build()
    call = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        logits, last, text = model(ids).logits, model(ids, logits_to_keep=1).logits, model.generate(ids, **call)
        cce_kernels.patch(model)
        assert torch.equal(model(ids).logits, logits)
        assert torch.equal(model(ids, logits_to_keep=1).logits, last)
        assert torch.equal(model.generate(ids, **call), text)
        assert torch.equal(cce_kernels.unpatch(model)(ids, labels=labels).logits, logits)
    with pytest.raises(ValueError, match="has not patched"):
        cce_kernels.unpatch(model)


@pytest.mark.parametrize("name", ["Gemma2", "FLA's Transformer"])
def test_compiles(name):
    """In one graph; FLA's forward calls super(), which breaks it."""
    ours = build_hf(name, num_hidden_layers=1) if name.isalnum() else build_fla("Transformer", num_hidden_layers=1)
    model = cce_kernels.patch(ours)  # the head and the loss are the same for one layer
    want, gradients, _ = step(model, input_ids=ids, labels=labels, use_cache=False)
    options = {"backend": "aot_eager", "fullgraph": True} if name.isalnum() else {"backend": "eager"}
    model.zero_grad()
    loss = torch.compile(model, **options)(input_ids=ids, labels=labels, use_cache=False).loss
    loss.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close({n: p.grad for n, p in model.named_parameters()}, gradients, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------ a patch lasts
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("build", [lambda: build_hf("Granite"), lambda: build_fla("GLA")])
def test_copies_and_pickles_are_patched(copied, build):
    model = build()
    want = step(copy.deepcopy(model), input_ids=ids, labels=labels)
    twin = copied(cce_kernels.patch(model, label_smoothing=0.0))
    assert cce_kernels.is_patched(twin)
    got = step(twin, input_ids=ids, labels=labels)
    assert_same(got, want)
    assert "logits" not in got[2]
    with pytest.raises(ValueError, match="patched already"):
        cce_kernels.patch(twin)
    assert "logits" in cce_kernels.unpatch(twin)(ids, labels=labels)
    assert cce_kernels.is_patched(cce_kernels.patch(twin))
    assert cce_kernels.is_patched(model)
    if copied is not copy.copy:  # a copy has a head of its own
        twin.lm_head.weight.data.zero_()
        torch.testing.assert_close(twin(ids, labels=labels).loss, torch.tensor(VOCAB).log())
        torch.testing.assert_close(model(ids, labels=labels).loss, want[0])


def test_what_transformers_reads_of_a_class_stays(tmp_path):
    model = build_hf("Llama")
    kind, text = type(model), repr(model)
    cce_kernels.patch(model).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert isinstance(model, kind)
    assert repr(model) == text
    assert inspect.signature(model.forward) == inspect.signature(kind(model.config).forward)
    model.set_attn_implementation("eager")  # reads the source of the class's module
    loaded = kind.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


@pytest.fixture
def accelerator():
    reset = accelerate.state.AcceleratorState._reset_state
    reset(reset_partial_state=True)  # of an earlier test's Trainer in this process
    found = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    yield found
    found.free_memory()
    reset(reset_partial_state=True)


def test_mixed_precision_of_accelerate(accelerator):
    model, call = build_hf("Granite"), {"input_ids": ids, "labels": labels}
    own = accelerator.prepare_model(copy.deepcopy(model))
    want = step(own, **call)
    model = accelerator.prepare_model(cce_kernels.patch(model))
    for twin in (model, copy.deepcopy(model)):
        assert cce_kernels.is_patched(twin)
        got = step(twin, **call)
        assert "logits" not in got[2]
        torch.testing.assert_close(got[0], want[0], rtol=1e-3, atol=1e-3)
    assert cce_kernels.is_patched(pickle.loads(pickle.dumps(model)))
    cce_kernels.unpatch(model)
    undone = step(model, **call)  # under accelerate's wrapper still
    assert torch.equal(undone[0], want[0])
    assert "logits" in undone[2]
    cce_kernels.patch(model)
    assert torch.equal(step(model, **call)[0], got[0])
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert cce_kernels.is_patched(model)
    assert "logits" not in model(**call)
    with pytest.raises(ValueError, match=r"replaced already, by accelerate.utils.operations.*patch first"):
        cce_kernels.patch(own)
    assert torch.equal(step(own, **call)[0], want[0])


@pytest.mark.parametrize("wrapped", ["TRL's", "accelerate's over TRL's"])
def test_a_forward_over_patchs_is_told(wrapped, accelerator):
    model = cce_kernels.patch(build_hf("Llama"))

    @functools.wraps(type(model).forward)  # as TRL's add_fused_lm_head, which calls the decoder
    def fused(self, *args, **call):
        return self.model(*args, **call)

    with pytest.warns(UserWarning, match=r"fused replaces the forward of a model patched by cce_kernels"):
        model.forward = types.MethodType(fused, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once
        if wrapped == "accelerate's over TRL's":
            accelerator.prepare_model(model)
    assert not cce_kernels.is_patched(model)
    cce_kernels.unpatch(model)
    with pytest.raises(ValueError, match="forward is replaced already"):
        cce_kernels.patch(model)
    assert not cce_kernels.is_patched(model)
    del model.forward
    assert "logits" not in cce_kernels.patch(model)(ids, labels=labels)


@pytest.mark.parametrize("build", [lambda: build_hf("Llama"), lambda: build_fla("GLA")])
def test_a_model_that_fsdp2_has_sharded(group_of_one, build):
    model, mesh = build(), init_device_mesh("cpu", (1,))
    want, _, _ = step(copy.deepcopy(model), input_ids=ids, labels=labels)
    cce_kernels.patch(model)
    for layer in (*model.model.layers, model):  # the head belongs to the last group
        fully_shard(layer, mesh=mesh)
    assert type(model).__name__.startswith("FSDP")
    got, _, output = step(model, input_ids=ids, labels=labels)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert "logits" not in output
    assert cce_kernels.is_patched(model)
    with pytest.raises(ValueError, match="unpatch first"):
        cce_kernels.unpatch(model)
    with pytest.raises(ValueError, match="patched already"):
        cce_kernels.patch(model)
    model.criterion = model.loss_function = lambda logits, labels, **_: logits.sum()
    with pytest.raises(ValueError, match="of its own, which patch"):
        model(input_ids=ids, labels=labels)


# ------------------------------------------------------------------------------------------ options
def test_the_filter_changes_gradients_and_not_the_loss():
    model = build_hf("Llama")
    want_loss, want, _ = step(model, input_ids=ids, labels=labels)
    loss, gradients, _ = step(cce_kernels.patch(model, filter_eps=0.5), input_ids=ids, labels=labels)
    torch.testing.assert_close(loss, want_loss)
    assert not torch.allclose(gradients["lm_head.weight"], want["lm_head.weight"], rtol=1e-2)
    cce_kernels.unpatch(model)
    drawn = {"filter_eps": 0.5, "filter_unbiased": True, "filter_mass": 1e-3}  # so little that the call is exact
    _, gradients, _ = step(cce_kernels.patch(model, **drawn), input_ids=ids, labels=labels)
    torch.testing.assert_close(gradients["lm_head.weight"], want["lm_head.weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "cce_best"}, "preset: must be one of"),
        ({"workspace_mib": -1}, "workspace_mib: must be positive"),
        ({"workspace_mib": "100"}, "workspace_mib: must be a number or None, got '100'"),
        ({"softcap": 30.0}, "softcap: patch takes only preset"),
        ({"workspace": 3}, "workspace: patch takes only"),
    ],
)
def test_wrong_options_fail_when_patching(options, message):
    model = build_hf("Llama")
    with pytest.raises((ValueError, TypeError), match=message):
        cce_kernels.patch(model, **options)
    assert not cce_kernels.is_patched(model)


# ------------------------------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    "ask", [lambda out: out.logits, lambda out: out["logits"], lambda out: out[1], lambda out: out[:2]]
)
def test_asking_the_output_for_logits(ask):
    output = cce_kernels.patch(build_hf("Llama"))(ids, labels=labels)
    assert output[0] is output["loss"] is output.loss
    assert output.to_tuple()[0] is output.loss
    with pytest.raises((AttributeError, KeyError), match="call it without labels"):
        ask(output)
    with pytest.raises(AttributeError, match="has no lse"):
        output.lse  # noqa: B018
    assert "loss=" in repr(output)


@pytest.mark.parametrize("build", [lambda: build_hf("Llama"), lambda: build_fla("KDA")])
@pytest.mark.parametrize(
    "call",
    [{"logits_to_keep": 1}, {"logits_to_keep": torch.tensor([0])}, {"num_logits_to_keep": 2}, {"return_dict": False}],
)
def test_asking_the_forward_for_logits(build, call):
    model = cce_kernels.patch(build())
    with pytest.raises(ValueError, match="call it without labels"):
        model(ids, labels=labels, **call)
    assert model(ids, labels=labels, logits_to_keep=0, return_dict=True).loss.isfinite()


class Super(transformers.LlamaForCausalLM):
    def forward(self, *args, **call):
        return super().forward(*args, **call)


class NoLoss(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **call):
        hidden = self.model(input_ids, **call)[0]
        return transformers.modeling_outputs.CausalLMOutputWithPast(hidden.mean(), self.lm_head(hidden))


def changing(change):
    """A model whose forward changes its logits; the class is named Changing."""

    class Changing(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **call):
            logits = change(self.lm_head(self.model(input_ids, **call)[0]))
            loss = self.loss_function(logits, labels, logits.shape[-1])
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss, logits)

    return lambda: Changing(build_hf("Llama").config)


def masked(logits):
    logits[..., 3] = -1e9
    return logits


def build_t5():
    return build_hf("T5", kind="T5ForConditionalGeneration", d_model=32, d_kv=8, decoder_start_token_id=0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(2, 2), r"modules.linear.Linear is not supported; give the model .* before it is wrapped"),
        (lambda: build_hf("Llama").model, r"LlamaModel is not supported: it has no head; give .*ForCausalLM"),
        (changing(lambda logits: logits.square()), r"model: its forward uses .square of"),
        (changing(lambda logits: logits[..., :48]), r"model: its forward takes a part of"),
        (changing(masked), r"model: its forward changes a part of its"),
        (changing(lambda logits: 1 + logits), r"model: its forward adds to its logits"),
        (lambda: Super(build_hf("Llama").config), r"Super is not supported: its forward calls super\(\)"),
        (lambda: NoLoss(build_hf("Llama").config), r"model: its forward computes no loss from its head's logits"),
        (lambda: build_hf("Bert", kind="BertLMHeadModel", is_decoder=True), r"computes its logits elsewhere than"),
        (build_t5, r"uses .view of its logits"),
    ],
)  # fmt: skip
def test_models_of_another_structure_are_refused_with_the_reason(build, message):
    with pytest.raises((TypeError, ValueError), match=message) as error:
        cce_kernels.patch(build())(input_ids=ids, labels=labels)
    assert "\n" not in str(error.value)


def test_a_sharded_head_is_refused(group_of_one):
    model = build_hf("Llama")
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"lm_head": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"DTensor.*sharding"):
        cce_kernels.patch(model)
