"""`patch`: models of transformers and FLA with our loss give the loss and the gradients that they gave before."""

import copy
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import cce_kernels
import pytest
import torch
import torch.distributed.tensor.parallel
import transformers
from torch import Tensor, nn

from linrnn import cpu_ops
from linrnn.models.attention import install_sdpa

patching = importlib.import_module("cce_kernels.patch")  # the package's attribute of that name is the function
VOCAB = 96
DENSE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL = {
    **DENSE,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXTRA = {
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 0.5},
    "Gemma3": {"head_dim": 8, "final_logit_softcapping": 0.5},
    "Glm4": {"head_dim": 8},
    "Cohere": {"logit_scale": 3.0},
    "Cohere2": {"logit_scale": 3.0},
    "Granite": {"logits_scaling": 0.2},
    "Qwen3": {"head_dim": 8},
}
MIXERS = {
    "GLA": {"num_heads": 2},
    "GatedDeltaNet": {"num_heads": 2, "head_dim": 16},
    "KDA": {"num_heads": 2, "head_dim": 16},
    "Transformer": {"num_heads": 4},
}


def build_hf(name: str, **options: Any) -> Any:
    kind = "Gemma3Text" if name == "Gemma3" else name
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **EXTRA.get(name, {}), **options})
    return initialised(lambda: getattr(transformers, f"{name}ForCausalLM")(config))


def build_fla(name: str, **options: Any) -> Any:
    cpu_ops.install()
    install_sdpa()
    models = importlib.import_module("fla.models")
    shared = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": VOCAB}
    # FLA's own fused losses are Triton kernels.
    config = getattr(models, f"{name}Config")(**{**shared, "fuse_cross_entropy": False, **MIXERS[name], **options})
    return initialised(lambda: getattr(models, f"{name}ForCausalLM")(config))


def initialised(build: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build().eval()
        for parameter in model.parameters():  # logits large enough for a softcap or a scale to show
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def batch(length: int = 20) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :7] = -100
    labels[1, -1] = -100
    return ids, labels


def step(model: Any, *args: Any, **call: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
    """Loss, gradients and output of one call."""
    model.zero_grad()
    output = model(*args, **call)
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.loss.detach(), gradients, output


def same_step(model: Any, *args: Any, options: dict[str, Any] | None = None, **call: Any) -> None:
    """The patched copy of a model gives the model's own loss and gradients, and no logits."""
    want_loss, want, _ = step(model, *args, **call)
    loss, gradients, output = step(cce_kernels.patch(copy.deepcopy(model), **(options or {})), *args, **call)
    assert torch.isfinite(want_loss)
    torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, want, rtol=1e-5, atol=1e-5)
    assert "logits" not in output
    assert getattr(output, "logits", None) is None


# ------------------------------------------------------------------------------------------ the same as before
@pytest.mark.parametrize("name", sorted(patching.SUPPORTED["transformers"]))
def test_loss_and_gradients_of_every_transformers_class(name):
    ids, labels = batch()
    same_step(build_hf(name), input_ids=ids, labels=labels)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_of_fla_classes(name, tied):
    ids, labels = batch(80)  # above 64, where GLA takes its chunked kernel
    same_step(build_fla(name, tie_word_embeddings=tied), input_ids=ids, labels=labels)


@pytest.mark.parametrize("name", sorted(patching.SUPPORTED["fla"]))
def test_every_fla_class_has_the_forward_that_patch_assumes(name):
    models = importlib.import_module("fla.models")
    base = importlib.import_module("fla.models.modeling_utils").FLAForCausalLM
    kind = getattr(models, f"{name}ForCausalLM")
    assert issubclass(kind, base)
    assert kind.forward is base.forward or name in MIXERS


@pytest.mark.parametrize("tied", [False, True])
def test_tied_and_untied_weights(tied):
    model = build_hf("Llama", tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    ids, labels = batch()
    same_step(model, input_ids=ids, labels=labels)


def test_head_with_bias():
    model = build_hf("Phi")
    assert model.lm_head.bias is not None
    assert model.lm_head.bias.any()
    ids, labels = batch()
    same_step(model, input_ids=ids, labels=labels)


@pytest.mark.parametrize("build", [lambda: build_hf("Gemma2"), lambda: build_fla("GLA")])
@pytest.mark.parametrize("items", [50, torch.tensor(50)])
def test_num_items_in_batch_divides_the_sum(build, items):
    ids, labels = batch()
    model = build()
    same_step(model, input_ids=ids, labels=labels, num_items_in_batch=items)
    cce_kernels.patch(model)
    mean = model(input_ids=ids, labels=labels).loss
    given = model(input_ids=ids, labels=labels, num_items_in_batch=items).loss
    torch.testing.assert_close(given * 50, mean * (labels[:, 1:] != -100).sum())


def test_two_micro_steps_make_the_large_batch():
    ids, labels = batch()
    model = cce_kernels.patch(build_hf("Llama"))
    _, want, _ = step(model, input_ids=ids, labels=labels)
    items = (labels[:, 1:] != -100).sum()
    model.zero_grad()
    for row in range(2):
        model(input_ids=ids[[row]], labels=labels[[row]], num_items_in_batch=items).loss.backward()
    torch.testing.assert_close({n: p.grad for n, p in model.named_parameters()}, want, rtol=1e-5, atol=1e-6)


def test_what_transformers_passes_to_its_own_loss():
    ids, labels = batch()
    model = build_hf("Qwen2")
    same_step(model, input_ids=ids, labels=labels, shift_labels=labels.roll(-2, 1))
    same_step(model, input_ids=ids, labels=ids, ignore_index=int(ids[0, 5]))


def test_arguments_by_position_masks_and_states():
    ids, labels = batch()
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


def test_training_mode_with_gradient_checkpointing():
    model = build_hf("Llama").train()
    model.gradient_checkpointing_enable()
    ids, labels = batch()
    same_step(model, input_ids=ids, labels=labels)


@pytest.mark.parametrize("build", [lambda: build_hf("Gemma2"), lambda: build_fla("Transformer")])
def test_without_labels_nothing_changes(build):
    ids, _ = batch()
    model = build()
    call = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        logits, last, text = model(ids).logits, model(ids, logits_to_keep=1).logits, model.generate(ids, **call)
        cce_kernels.patch(model)
        assert torch.equal(model(ids).logits, logits)
        assert torch.equal(model(ids, logits_to_keep=1).logits, last)
        assert torch.equal(model.generate(ids, **call), text)


def test_unpatch_gives_the_class_its_forward_back():
    ids, labels = batch()
    model = build_hf("Llama")
    want = model(ids, labels=labels)
    assert cce_kernels.patch(model) is model
    assert cce_kernels.unpatch(model) is model
    got = model(ids, labels=labels)
    assert torch.equal(got.logits, want.logits)
    assert torch.equal(got.loss, want.loss)
    with pytest.raises(ValueError, match="not the one"):
        cce_kernels.unpatch(model)


def test_a_deep_copy_is_patched_by_itself():
    ids, labels = batch()
    model = cce_kernels.patch(build_hf("Llama"))
    twin = copy.deepcopy(model)
    twin.lm_head.weight.data.zero_()
    torch.testing.assert_close(twin(ids, labels=labels).loss, torch.tensor(VOCAB).log())
    assert model(ids, labels=labels).loss != twin(ids, labels=labels).loss


def test_compiles_in_one_graph():
    ids, labels = batch()
    model = cce_kernels.patch(build_hf("Llama"))
    want, gradients, _ = step(model, input_ids=ids, labels=labels, use_cache=False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    loss = compiled(input_ids=ids, labels=labels, use_cache=False).loss
    loss.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close({n: p.grad for n, p in model.named_parameters()}, gradients, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------ options
def test_options_reach_the_loss(monkeypatch):
    calls = []

    def spy(*args, **options):
        calls.append(options)
        return cce_kernels.linear_cross_entropy(*args, **options)

    monkeypatch.setattr(patching, "linear_cross_entropy", spy)
    ids, labels = batch()
    same_step(
        build_hf("Gemma2"), input_ids=ids, labels=labels, options={"preset": "paper/cce_exact", "workspace_mib": 4}
    )
    assert calls[-1]["preset"] == "paper/cce_exact"
    assert calls[-1]["workspace_mib"] == 4
    assert calls[-1]["softcap"] == 0.5


def test_the_filter_changes_gradients_and_not_the_loss():
    ids, labels = batch()
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
        ({"softcap": 30.0}, "softcap: patch takes only preset"),
        ({"return_lse": True}, "return_lse: patch takes only"),
        ({"workspace": 3}, "workspace: patch takes only"),
    ],
)
def test_wrong_options_fail_when_patching(options, message):
    model = build_hf("Llama")
    with pytest.raises(ValueError, match=message):
        cce_kernels.patch(model, **options)
    assert "forward" not in vars(model)


# ------------------------------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    "ask", [lambda out: out.logits, lambda out: out["logits"], lambda out: out[1], lambda out: out[:2]]
)
def test_asking_the_output_for_logits(ask):
    ids, labels = batch()
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
    ids, labels = batch()
    model = cce_kernels.patch(build())
    with pytest.raises(ValueError, match="call it without labels"):
        model(ids, labels=labels, **call)
    assert model(ids, labels=labels, logits_to_keep=0, return_dict=True).loss.isfinite()


def test_other_models_are_refused_by_name():
    class OwnForCausalLM(transformers.LlamaForCausalLM):
        pass

    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=VOCAB)
    llama = build_hf("Llama")
    others = [
        nn.Linear(2, 2),
        transformers.GPT2LMHeadModel(config),
        llama.model,
        OwnForCausalLM(llama.config),
        torch.compile(llama),
    ]
    for model in others:
        with pytest.raises(TypeError, match=r"not supported.*before it is wrapped.*Llama.*Qwen3.*fla: .*GLA"):
            cce_kernels.patch(model)


def test_patching_twice_is_refused():
    model = cce_kernels.patch(build_hf("Llama"))
    with pytest.raises(ValueError, match=r"replaced already.*unpatch"):
        cce_kernels.patch(model, preset="cce_filter")


def test_losses_of_the_users_own_are_refused():
    llama, gla = build_hf("Llama"), build_fla("GLA")
    llama.loss_function = lambda logits, labels, **_: logits.sum()
    gla.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for model in (llama, gla, build_fla("GLA", use_l2warp=True)):
        with pytest.raises(ValueError, match="of its own, which patch"):
            cce_kernels.patch(model)


def test_heads_that_are_more_than_a_weight_are_refused_also_later():
    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    ids, labels = batch()
    model = cce_kernels.patch(build_hf("Llama"))
    model.set_output_embeddings(Adapted(32, VOCAB, bias=False))
    with pytest.raises(ValueError, match="Adapted"):
        model(ids, labels=labels)
    with pytest.raises(ValueError, match="Adapted"):
        cce_kernels.patch(cce_kernels.unpatch(model))


def test_a_sharded_head_is_refused():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        model = build_hf("Llama")
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        torch.distributed.tensor.parallel.parallelize_module(
            model, mesh, {"lm_head": torch.distributed.tensor.parallel.ColwiseParallel()}
        )
        with pytest.raises(ValueError, match=r"DTensor.*sharding"):
            cce_kernels.patch(model)
    finally:
        torch.distributed.destroy_process_group()


def test_the_package_imports_neither_transformers_nor_fla():
    code = "import sys, cce_kernels; print(sorted({'transformers', 'fla'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
