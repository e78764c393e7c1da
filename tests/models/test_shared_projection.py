"""`model.shared_projection_rank`: what the model computes and counts, that a run resumes, and what is refused."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from fitting import fitted
from torch import Tensor
from torch.func import functional_call

from linrnn.config import load_config, run_name
from linrnn.config.schema import SHARING, Config
from linrnn.core.errors import ConfigError, UnsupportedError
from linrnn.inference.export import export
from linrnn.inference.generate import samples
from linrnn.inference.load import load_trained
from linrnn.models import LanguageModel, build_model, load_weights
from linrnn.models.architecture import Architecture, resolve
from linrnn.models.build import fla_model
from linrnn.training.trainer import Trainer

MODELS = SHARING
CPU = torch.device("cpu")
RANK = 32


def configured(model: str, rank: int | None = RANK, *more: str) -> Config:
    config = load_config([f"model={model}", f"model.shared_projection_rank={rank or 'null'}", *more])
    assert isinstance(config, Config)
    return config


def architecture(model: str, rank: int | None = RANK, *more: str) -> Architecture:
    config = configured(model, rank, *more)
    return resolve(config.model, config.size, config.size.vocab_size or 96)


def build(model: str, dtype: torch.dtype = torch.float32) -> LanguageModel:
    return build_model(architecture(model), device="cpu", dtype=dtype, seed=0)


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, 96, (batch, length), generator=torch.Generator().manual_seed(0))


def gradients(network: LanguageModel, ids: Tensor) -> dict[str, Tensor]:
    network.zero_grad()
    (network(ids) @ network.head_weight.T).square().mean().backward()
    return {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}


def counted(network: LanguageModel) -> Counter[str]:
    """How often each linear layer of a shared projection is called from now on, over all mixers."""
    calls: Counter[str] = Counter()
    for mixer in network.mixers:
        for name, layer in mixer.qkv.named_children():  # type: ignore[union-attr]
            layer.register_forward_hook(lambda *_, name=name: calls.update([name]))
    return calls


# ------------------------------------------------------------------------------------------ what they compute
@pytest.mark.parametrize("model", MODELS)
def test_hidden_states_and_gradients_are_those_of_full_projections_that_are_the_product(model):
    """FLA's own model gets W_q W_down and so on as its projections, at lengths of the short and the long kernel."""
    network = build(model)
    full = build_model(dataclasses.replace(network.arch, shared_projection_rank=None), device="cpu", seed=1)
    named = dict(network.hf.named_parameters())

    def as_full() -> dict[str, Tensor]:
        weights = {name: tensor for name, tensor in named.items() if ".qkv." not in name}
        for down in (name for name in named if name.endswith(".qkv.down.weight")):
            mixer = down.removesuffix("qkv.down.weight")
            for one in "qkv":
                weights[f"{mixer}{one}_proj.weight"] = named[f"{mixer}qkv.{one}.weight"] @ named[down]
        return weights

    assert as_full().keys() == dict(full.hf.named_parameters()).keys()
    for length in (20, 90):
        ids = tokens(2, length)
        ours = network.hf(ids, use_cache=False).logits
        theirs = functional_call(full.hf, as_full(), (ids,), {"use_cache": False}, strict=False).logits
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        weights = torch.randn_like(ours)
        of_ours, of_theirs = (torch.autograd.grad((x * weights).sum(), list(named.values())) for x in (ours, theirs))
        for name, x, y in zip(named, of_ours, of_theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4 * float(y.abs().max()), msg=name)
            assert x.any(), name


@pytest.mark.parametrize("model", MODELS)
def test_the_projection_down_is_one_product_for_each_call_of_a_mixer(model):
    network = build(model)
    layers, calls = network.arch.num_layers, counted(network)
    gradients(network, tokens(2, 70))
    assert calls == dict.fromkeys(("down", "q", "k", "v"), layers)
    network.eval()
    with torch.no_grad():
        network(tokens(2, 70))
        network(tokens(2, 70))
    assert calls == dict.fromkeys(("down", "q", "k", "v"), 3 * layers), "no call takes another call's result"


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("model", MODELS)
def test_checkpointed_activations_give_the_same_gradients_bit_for_bit(model, mode):
    network, ids = build(model), tokens(2, 70)
    kept = gradients(network, ids)
    network.set_activation_checkpointing(mode)
    calls = counted(network)
    again = gradients(network, ids)
    assert kept.keys() == again.keys() == dict(network.named_parameters()).keys()
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    assert calls["down"] == calls["q"] == 2 * network.arch.num_layers


@pytest.mark.parametrize(
    ("model", "mode", "checkpointing"), [("gla", "blocks", "full"), ("transformer", "model", "none")]
)
def test_compiled_models_give_the_same_gradients_and_compile_once(model, mode, checkpointing, monkeypatch):
    """With Dynamo only (no C++ compiler needed). Attention's graphs break, so FLA's forward resumes within a call."""
    network, ids = build(model), tokens(2, 70)
    eager = gradients(network, ids)
    graphs: list[int] = []

    def counting(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(1)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counting))
    network.set_activation_checkpointing(checkpointing)
    network.set_compile(mode)
    gradients(network, ids)
    gradients(network, ids)
    compiled = len(graphs)
    for name, grad in gradients(network, ids).items():
        torch.testing.assert_close(grad, eager[name], rtol=1e-4, atol=1e-6)
    assert compiled == len(graphs) > 0, "a new call needs no new graph"


# ----------------------------------------------------------------------------------------- how they are built
@pytest.mark.parametrize(("size", "rank"), [("350m", 256), ("1b3", 1024)])
@pytest.mark.parametrize("model", MODELS)
def test_formulas_count_the_parameters_of_the_built_modules_and_bodies_stay_matched(model, size, rank):
    arch, full = (architecture(model, r, f"size={size}") for r in (rank, None))
    assert arch.mixer_parameters < full.mixer_parameters
    assert arch.intermediate_size > full.intermediate_size
    assert arch.body_parameters == pytest.approx(full.body_parameters, rel=0.016)
    hf = fla_model(dataclasses.replace(arch, num_layers=2))
    layer = hf.model.layers[1]
    assert sum(p.numel() for p in layer.attn.parameters()) == arch.mixer_parameters
    assert sum(p.numel() for p in layer.mlp.parameters()) == arch.mlp_parameters
    assert sum(p.numel() for p in hf.parameters()) == dataclasses.replace(arch, num_layers=2).n_parameters


# --------------------------------------------------------------------------------------------------- as a run
def test_a_run_s_name_and_label_hold_the_rank():
    assert run_name(configured("gla")) == "gla-smoke-cce_kahan-r32-s0"
    assert run_name(configured("gla", None)) == "gla-smoke-cce_kahan-s0"
    assert configured("gla").model.label == "gla shared_projection_rank=32"
    assert configured("gla", None).model.label == "gla"


def test_a_run_generates_and_is_read_but_is_not_exported(small, command_here, tmp_path):
    trainer = fitted(small("model=gla", f"model.shared_projection_rank={RANK}"))
    run = load_trained(str(trainer.directory.path), CPU)
    ids = torch.randint(0, 512, (1, 20))
    with torch.no_grad():
        assert torch.equal(run.model(ids).logits, trainer.model.hf.eval()(ids).logits)
    options = load_config(
        ["checkpoint=unused", "temperature=0", "max_new_tokens=12", "prompt_tokens=[5,6,7]"], "generate"
    )
    with_state = list(samples(run, options))
    assert with_state == list(samples(run, dataclasses.replace(options, use_state=False)))
    assert len(with_state[0][1]) > 1
    cache = next(o for o in small() if o.startswith("data.cache_dir="))
    read = command_here("scripts/evaluate.py", f"checkpoint={trainer.directory.path}", "device=cpu", cache)
    assert read.returncode == 0, read.stderr
    with pytest.raises(UnsupportedError, match="FLA's configuration cannot express") as error:
        export(run, tmp_path / "out")
    assert "\n" not in error.value.cause + error.value.remedy
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("rank", "cause", "remedy"),
    [
        (36, "no multiple of 8", "shared_projection_rank=40"),
        (128, "not below the width of 128", "use 32 or another multiple of 8"),
    ],
)
def test_ranks_that_fit_no_matrix_unit_or_are_not_low_are_refused(rank, cause, remedy):
    with pytest.raises(ConfigError, match=cause) as error:
        architecture("gla", rank)
    assert remedy in error.value.remedy


@pytest.mark.parametrize("model", [["model=kda"], ["model=gated_deltanet"], ["model=fla", "model.config=gla"]])
def test_other_models_refuse_the_option_and_name_those_that_have_it(model):
    with pytest.raises(ConfigError, match=r"model\.shared_projection_rank: there is no such key") as error:
        load_config([*model, "model.shared_projection_rank=32"])
    assert "it is an option of model=gla, model=transformer" in error.value.remedy


def test_weights_of_full_projections_are_no_start_for_shared_ones(small, tmp_path):
    full = fitted(small("model=gla"))
    full.model.hf.save_pretrained(tmp_path / "full")
    with pytest.raises(ConfigError, match="FLA's format has no shared projections"):
        load_weights(build_model(architecture("gla"), device="cpu", seed=0), tmp_path / "full", "here")
    start = (f"init_from={full.directory.path}", f"model.shared_projection_rank={RANK}")
    with pytest.raises(ConfigError, match=r"k_proj\.weight is .* absent in this model"):
        Trainer(load_config(small("model=gla", *start)))


# ---------------------------------------------------------------------------------------------------- the GPU
@pytest.mark.gpu
@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("compiled", ["none", "blocks"])
@pytest.mark.parametrize("model", MODELS)
def test_the_gpu_kernels_agree_with_the_cpu_versions(model, compiled):
    ids = tokens(2, 130)
    on_gpu = build(model).to("cuda")
    on_gpu.set_compile(compiled)
    theirs, ours = gradients(build(model), ids), gradients(on_gpu, ids.cuda())
    for name, grad in theirs.items():
        error = (ours[name].cpu() - grad).norm() / grad.norm()
        assert error < 2e-2, f"{name}: {error:.1e}"
