"""The four models on the CPU: their results, and how they are built, saved, loaded and rejected."""

import dataclasses
import functools
import importlib.metadata
import json
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from linrnn.config.schema import MixerDims, ModelConfig, SizeConfig
from linrnn.core.errors import ConfigError, DataError, UnsupportedError
from linrnn.models import LanguageModel, build_model, check_supported, find_pretrained, load_weights, support
from linrnn.models.architecture import MODELS, Architecture, resolve
from linrnn.models.cpu_ops import mixers
from linrnn.models.facts import FACTS
from linrnn.models.fla_import import import_fla
from linrnn.models.language_model import KEPT_PRODUCTS
from linrnn.profiling.components import part_modules

CPU = torch.device("cpu")
TINY = SizeConfig(
    "tiny", hidden_size=64, num_layers=2, layer_parameters_per_d2=16, vocab_size=None, tie_embeddings=True,
    mixers={
        "gla": MixerDims(2, 16, 32), "gated_deltanet": MixerDims(2, 16, 32), "kda": MixerDims(2, 16, 16),
        "transformer": MixerDims(2, 32, 32),
    },
)  # fmt: skip


def architecture(model: str, chunk_size: int | None = None, **size: Any) -> Architecture:
    return resolve(ModelConfig(model, chunk_size), dataclasses.replace(TINY, **size), vocab_size=96)


def build(model: str, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> LanguageModel:
    return build_model(architecture(model, **options), device="cpu", dtype=dtype, seed=seed)


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 96, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: LanguageModel, ids: Tensor, **options: Any) -> Tensor:
    logits = model(ids, **options) @ model.head_weight.T
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gradients(model: LanguageModel, ids: Tensor, **options: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model, ids, **options).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


# ------------------------------------------------------------------------------------------ what they compute
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("length", [5, 64, 90])
def test_every_parameter_gets_a_finite_gradient_at_any_length(model, length):
    network = build(model)
    ids = tokens(2, length)
    assert network(ids).shape == (2, length, 64)
    grads = gradients(network, ids)
    assert grads.keys() == dict(network.named_parameters()).keys()
    assert all(grad.isfinite().all() and grad.any() for grad in grads.values())


@pytest.mark.parametrize("model", MODELS)
def test_a_token_changes_no_hidden_state_before_it(model):
    network = build(model)
    ids = tokens(1, 80)
    changed = ids.clone()
    changed[0, 50] = (ids[0, 50] + 1) % 96
    before, after = network(ids)[0], network(changed)[0]
    assert torch.equal(before[:50], after[:50])
    assert (before[50:] - after[50:]).abs().amax(-1).gt(0).all()


@pytest.mark.parametrize("model", MODELS)
def test_packed_documents_equal_separate_ones(model):
    network = build(model)
    ids = tokens(2, 70)
    bounds = [0, 3, 66, 70, 71, 140]
    with_an_empty_one = torch.tensor([0, 3, *bounds[1:]], dtype=torch.int32)
    packed = network(ids, cu_seqlens=with_an_empty_one)
    assert packed.shape == (2, 70, 64)
    flat = ids.reshape(1, -1)
    separate = torch.cat([network(flat[:, a:b]) for a, b in pairwise(bounds)], 1)
    torch.testing.assert_close(packed.reshape(1, 140, 64), separate, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(separate)
    parameters = list(network.parameters())
    ours = torch.autograd.grad((packed.reshape(1, 140, 64) * weights).sum(), parameters)
    theirs = torch.autograd.grad((separate * weights).sum(), parameters)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4 * float(y.abs().max()))


@pytest.mark.parametrize("model", MODELS)
def test_evaluation_mode_gives_the_same_hidden_states_at_short_and_long_lengths(model):
    """In evaluation, FLA's layers use other kernels at 64 tokens or fewer."""
    network = build(model)
    for length in (20, 90):
        ids = tokens(1, length)
        expected = network(ids).detach()
        network.eval()
        with torch.no_grad():
            torch.testing.assert_close(network(ids), expected, rtol=1e-4, atol=1e-5)
        network.train()


@pytest.mark.parametrize("model", MODELS)
def test_generation_with_a_cache_follows_the_full_forward_pass(model):
    hf, ids = build(model).hf.eval(), tokens(1, 20)
    with torch.no_grad():
        step = hf(ids[:, :12], use_cache=True)  # all others come one by one
        logits = [step.logits]
        for token in ids[:, 12:].split(1, dim=1):
            step = hf(token, use_cache=True, past_key_values=step.past_key_values)
            logits.append(step.logits)
        torch.testing.assert_close(torch.cat(logits, 1), hf(ids, use_cache=False).logits, rtol=1e-3, atol=1e-4)


def test_the_transformer_equals_transformers_llama_with_the_same_weights():
    from transformers import LlamaConfig, LlamaForCausalLM

    network = build("transformer")
    arch = network.arch
    sizes = {"vocab_size": arch.vocab_size, "hidden_size": arch.hidden_size, "num_hidden_layers": arch.num_layers}
    sizes |= {"intermediate_size": arch.intermediate_size, "num_attention_heads": arch.num_heads}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, rms_norm_eps=1e-6, tie_word_embeddings=True))
    renamed = {"embeddings": "embed_tokens", ".attn.": ".self_attn."}
    renamed |= {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    weights = {}
    for name, tensor in network.hf.state_dict().items():
        for ours, theirs in renamed.items():
            name = name.replace(ours, theirs)
        weights[name] = tensor
    llama.load_state_dict(weights)
    ids = tokens(2, 70)
    with torch.no_grad():
        ours, theirs = network.hf.eval()(ids).logits, llama.eval()(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


# ----------------------------------------------------------------------------------------- how they are built
@pytest.mark.parametrize("model", MODELS)
def test_a_seed_decides_the_weights_and_leaves_the_generator_alone(model):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = build(model, seed=1), build(model, seed=1), build(model, seed=2)
    assert torch.equal(torch.rand(1), expected)
    a, b, c = (network.hf.state_dict() for network in (first, again, other))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.embeddings.weight"], c["model.embeddings.weight"])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_parts_hold_every_parameter_once_and_the_formulas_count_them(model, tied):
    network = build(model, tie_embeddings=tied)
    arch = network.arch
    parts = {
        name: [p for module in modules for p in module.parameters()] for name, modules in part_modules(network).items()
    }
    parts["head"] = [] if tied else [network.head_weight]
    everything = [id(parameter) for part in parts.values() for parameter in part]
    assert sorted(everything) == sorted(id(parameter) for parameter in network.parameters())
    counts = {name: sum(p.numel() for p in part) for name, part in parts.items()}
    assert counts["embedding"] == arch.embedding_parameters
    assert counts["mixer"] == arch.num_layers * arch.mixer_parameters
    assert counts["mlp"] == arch.num_layers * arch.mlp_parameters
    assert sum(counts.values()) == arch.n_parameters
    assert (network.head_weight is network.hf.model.embeddings.weight) == tied


@pytest.mark.parametrize("model", MODELS)
def test_bf16_parameters_keep_decay_rates_in_fp32_and_still_train(model):
    network = build(model, dtype=torch.bfloat16)
    for name, parameter in network.named_parameters():
        assert parameter.dtype == (torch.float32 if name.endswith(("A_log", "dt_bias")) else torch.bfloat16)
    grads = gradients(network, tokens(2, 70))
    assert all(grad.isfinite().all() for grad in grads.values())
    exact = gradients(build(model), tokens(2, 70))
    cosines = [
        torch.nn.functional.cosine_similarity(grads[name].float().flatten(), exact[name].flatten(), dim=0)
        for name in exact
        if exact[name].ndim == 2
    ]
    assert min(cosines) > 0.98


@pytest.mark.parametrize("model", MODELS)
def test_checkpointed_activations_give_the_same_gradients(model):
    network, ids = build(model), tokens(2, 70)
    kept = gradients(network, ids)
    for mode in ("full", "selective"):
        network.set_activation_checkpointing(mode)
        computed_again = gradients(network, ids)
        assert all(torch.equal(kept[name], computed_again[name]) for name in kept)


class Products(TorchDispatchMode):
    """Counts the products of linear layers."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(operation) in KEPT_PRODUCTS
        return operation(*args, **(kwargs or {}))


def test_selective_checkpointing_computes_no_linear_layer_again():
    network, ids = build("gla"), tokens(2, 90)

    def products(mode: str) -> int:
        network.set_activation_checkpointing(mode)
        with Products() as found:
            loss_of(network, ids).backward()
        return found.count

    none, selective, full = (products(mode) for mode in ("none", "selective", "full"))
    assert selective == none
    assert full > none


def test_compiled_and_checkpointed_blocks_give_the_same_gradients(monkeypatch):
    """With Dynamo only (no C++ compiler needed), around a kernel with a chunk size set."""
    network, ids = build("kda", chunk_size=32), tokens(2, 70)
    eager = gradients(network, ids)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    network.set_activation_checkpointing("full")
    network.set_compile("blocks")
    for name, grad in gradients(network, ids).items():
        torch.testing.assert_close(grad, eager[name], rtol=1e-4, atol=1e-6)


CHUNKED = {name: facts.chunks for name, facts in FACTS.items() if facts.chunks}


@pytest.mark.parametrize(("model", "size"), [(name, size) for name in CHUNKED for size in CHUNKED[name].sizes])
def test_chunk_size_reaches_the_kernel_and_changes_no_result(model, size, monkeypatch):
    seen = []
    in_chunks = mixers.in_chunks
    monkeypatch.setattr(mixers, "in_chunks", lambda *args: seen.append(args[-1]) or in_chunks(*args))
    usual, sized = build(model), build(model, chunk_size=size)
    ids = tokens(2, 70)
    torch.testing.assert_close(sized(ids), usual(ids), rtol=1e-4, atol=1e-5)
    assert seen == [size] * 2 + [None] * 2


@pytest.mark.parametrize(
    ("model", "chunk_size", "layer"),
    [("kda", 32, "fla.layers.kda.KimiDeltaAttention"), ("transformer", None, "fla.layers.attn.Attention")],
)
def test_chunk_sizes_and_torch_s_attention_leave_fla_as_it_is(model, chunk_size, layer):
    """Each layer has a forward of its own, or a class below FLA's."""
    module, _, name = layer.rpartition(".")
    fla, usual = import_fla(module), build("kda")
    before, forward = dict(vars(fla)), vars(fla)[name].forward
    changed = build(model, chunk_size=chunk_size)
    changed(tokens(2, 70))
    assert isinstance(changed.mixers[0], vars(fla)[name])
    assert (dict(vars(fla)), vars(fla)[name].forward) == (before, forward)
    assert "forward" not in vars(usual.mixers[0])


# --------------------------------------------------------------------------------------------------- refusals
def test_other_settings_and_a_missing_directory_are_refused(tmp_path):
    network = build("transformer")
    with pytest.raises(DataError, match="no such directory"):
        find_pretrained(str(tmp_path / "nothing here"))
    build("transformer").hf.save_pretrained(source := tmp_path / "model")
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**settings, "window_size": 32}))
    with pytest.raises(ConfigError, match="window_size=32"):
        load_weights(network, source, "here")
    (source / "config.json").write_text("[]")
    with pytest.raises(DataError, match="no JSON object"):
        load_weights(network, source, "here")


@pytest.mark.parametrize(
    ("model", "chunk_size", "cause"),
    [
        ("mamba", None, "no such model"),
        ("transformer", 64, "has no chunks"),
        ("gla", 32, "not one that FLA's gla kernel takes"),
        ("kda", 128, "not one that FLA's kda kernel takes"),
    ],
)
def test_impossible_choices_are_refused(model, chunk_size, cause):
    with pytest.raises(ConfigError, match=cause):
        check_supported(ModelConfig(model, chunk_size), CPU)
    for name in MODELS:
        check_supported(ModelConfig(name, None), CPU)


def test_a_gpu_that_is_not_there_and_other_devices_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="sees no GPU"):
        check_supported(ModelConfig("gla", None), torch.device("cuda"))
    with pytest.raises(UnsupportedError, match="device mps"):
        check_supported(ModelConfig("gla", None), torch.device("mps"))


def test_fla_missing_or_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(support, "FLA_VERSION", "0.5.9")
    with pytest.raises(UnsupportedError, match="linrnn calls into"):
        check_supported(ModelConfig("gla", None), CPU)
    monkeypatch.setattr(importlib.metadata, "version", Mock(side_effect=importlib.metadata.PackageNotFoundError))
    with pytest.raises(UnsupportedError, match="not installed"):
        check_supported(ModelConfig("gla", None), CPU)


@pytest.mark.parametrize(
    ("triton", "capability", "refused"), [("3.6.0", 9, True), ("3.7.1", 9, False), ("3.6.0", 8, False)]
)
def test_gated_deltanet_is_refused_on_hopper_with_the_tritons_that_compute_it_wrongly(
    triton, capability, refused, monkeypatch
):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: triton if name == "triton" else version(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    cuda = torch.device("cuda")
    check_supported(ModelConfig("kda", None), cuda)
    if not refused:
        return check_supported(ModelConfig("gated_deltanet", None), cuda)
    with pytest.raises(UnsupportedError, match=f"Triton {triton}"):
        check_supported(ModelConfig("gated_deltanet", None), cuda)
    return None


# ---------------------------------------------------------------------------------------------------- the GPU
def skip_unless_supported(model: str) -> None:
    try:
        check_supported(ModelConfig(model, None), torch.device("cuda"))
    except UnsupportedError as error:
        pytest.skip(error.cause)


def assert_near(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, grad in theirs.items():
        error = (ours[name].cpu() - grad.cpu()).norm() / grad.cpu().norm()
        assert error < 2e-2, f"{name}: {error:.1e}"


@pytest.mark.gpu
@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("model", MODELS)
def test_the_gpu_kernels_agree_with_the_cpu_versions_checkpointed_or_not(model):
    skip_unless_supported(model)
    ids, bounds = tokens(2, 130), torch.tensor([0, 100, 130, 140, 260])
    on_cpu, on_gpu = build(model), build(model).to("cuda")
    assert_near(gradients(on_gpu, ids.cuda(), cu_seqlens=bounds.cuda()), gradients(on_cpu, ids, cu_seqlens=bounds))
    expected = gradients(on_cpu, ids)
    for mode in ("none", "selective", "full"):
        on_gpu.set_activation_checkpointing(mode)
        assert_near(gradients(on_gpu, ids.cuda()), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize(("model", "size"), [("gla", 64), ("gla", 128), ("kda", 32)])
def test_chunk_sizes_agree_on_the_gpu(model, size):
    ids = tokens(2, 520).cuda()
    usual, sized = (
        build_model(architecture(model, chunk_size=chunks), device="cuda", seed=0) for chunks in (None, size)
    )
    assert_near(gradients(sized, ids), gradients(usual, ids))
