"""`model=fla`: any causal language model of FLA's, hybrids, and a model that one file adds."""

import json
import math
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from linrnn import costs
from linrnn.config import compose, load_config, read_config, run_name, to_yaml
from linrnn.config.fla import fla_models
from linrnn.config.naming import identity
from linrnn.core.errors import ConfigError, UnsupportedError
from linrnn.costs.flops import forward_flops
from linrnn.inference.export import export
from linrnn.inference.load import load_trained
from linrnn.models import build_model, check_supported
from linrnn.models.architecture import Architecture, resolve
from linrnn.models.attention import flash_attn_func
from linrnn.models.facts import FACTS
from linrnn.models.fla_any import build_hf
from linrnn.training.plan import make_training_plan
from linrnn.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]


def architecture(name: str, *more: str) -> Architecture:
    config = load_config(["model=fla", f"model.config={name}", *more])
    return resolve(config.model, config.size, config.size.vocab_size or 512)


# ------------------------------------------------------------------------------------------------- names and options
@pytest.mark.parametrize(
    ("overrides", "cause", "remedy"),
    [
        (["model.config=deltnet"], "FLA has no such model", "nearest: delta_net"),
        (["model.config=nowhere/config.json"], "no config.json with a model_type", "Hugging Face's format"),
        (["model.config=gsa", "model.options.num_hedas=2"], "gsa has no such option", "nearest: num_heads"),
        (["model.config=gsa", "model.options.use_cache=true"], "linrnn decides it", "leave"),
        (["model.config=gsa", "model.options.vocab_size=8"], "does not hold the vocabulary of 512", "512 or more"),
        (["model.config=gla", "model.options.num_hidden_layers=-1"], "is no number of layers", "1 or more"),
        (["model.config=delta_net", "model.options.num_heads=3"], "FLA cannot build it", "model.options"),
        (["model.config=mamba2", "model.attention_every=2"], "no option for attention layers", "delta_net"),
        (["model.config=gsa", "model.attention_every=3"], "attention_every=3: the model has 2 layers", "2 or less"),
        (["model.config=gsa", "model.attention_window=3"], "there is no model.attention_every", "window_size"),
    ],
)
def test_what_fla_does_not_have_is_refused_with_a_remedy(overrides, cause, remedy):
    with pytest.raises((ConfigError, UnsupportedError), match=cause) as error:
        architecture(*[overrides[0].removeprefix("model.config="), *overrides[1:]])
    assert remedy in error.value.remedy


def test_name_and_options_are_part_of_a_run_s_name_and_identity(tmp_path):
    config = load_config(["model=fla", "model.config=gsa", "model.options.num_slots=8", "model.attention_every=2"])
    assert run_name(config) == "fla-smoke-cce_kahan-gsa-num_slots_8-attention_every_2-s0"
    keys = {"model.config": "gsa", "model.options.num_slots": 8, "model.attention_every": 2}
    assert keys.items() <= identity(config).items()
    assert config.model.label == "fla:gsa num_slots=8 attention_every=2"
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_config(tmp_path / "config.yaml") == config


def test_a_config_json_is_read_once_and_the_command_line_goes_before_it(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gsa", "hidden_size": 64, "num_slots": 8, "dtype": "float32"}))
    config = load_config(["model=fla", f"model.config={path}", "model.options.num_slots=4"])
    assert (config.model.config, config.model.options) == ("gsa", {"hidden_size": 64, "num_slots": 4})
    path.unlink()
    assert resolve(config.model, config.size, 512).hidden_size == 64


# ---------------------------------------------------------------------------------------------------------- figures
def test_nearly_all_of_fla_s_models_are_counted_and_every_other_is_refused_with_a_reason():
    counted, refused = set(), {}
    for name in fla_models():
        try:
            arch = architecture(name)
            assert arch.n_parameters == arch.body_parameters + arch.embedding_parameters > 0
            assert 0 < sum(arch.linears) <= arch.body_parameters
            counted.add(name)
        except (ConfigError, UnsupportedError) as error:
            refused[name] = error.cause
    assert {"delta_net", "gated_deltaproduct", "rwkv7", "mamba2", "hgrn2", "gsa", "retnet", "linear_attn"} <= counted
    assert {"gla", "gated_deltanet", "kda", "transformer"} <= counted
    assert len(counted) >= 30, refused


def test_what_has_no_formula_is_unknown():
    config = load_config([])
    for name in ("gla", "rwkv7"):  # not even a matched model's memory is taken over: options may change it
        arch = architecture(name)
        assert costs.memory_estimate(arch, config, "fp32") is None
        assert costs.training_state(arch, config, "fp32")["parameters"] == 4 * arch.n_parameters
    for unknown in (architecture("rwkv6"), architecture("gsa"), architecture("abc", "model.attention_every=2")):
        assert costs.model_flops(unknown, 1, 64) is None


def step_of_rwkv7(fla: Any, state: Tensor, key: Tensor, value: Tensor) -> None:
    """Read κ̂ and remove it, add the new value, read r."""
    removed = state @ key
    state = torch.baddbmm(torch.baddbmm(state, removed, key.mT), value, key.mT)
    state @ key


def step_of_mamba2(fla: Any, state: Tensor, key: Tensor, value: Tensor) -> None:
    torch.baddbmm(state, value, key.mT) @ key


@pytest.mark.parametrize(
    ("name", "step", "sizes"),
    [
        ("rwkv7", step_of_rwkv7, lambda fla: (fla.num_heads, fla.head_dim, fla.head_dim)),
        ("mamba2", step_of_mamba2, lambda fla: (fla.num_heads, fla.state_size, fla.head_dim)),
    ],
)
def test_the_flops_of_a_recurrence_are_those_of_its_definition(name, step, sizes):
    """One token through the recurrence as the paper writes it, counted by PyTorch."""
    arch = architecture(name)
    fla = build_hf(name, arch.settings, "meta").config
    heads, keys, values = sizes(fla)
    with FlopCounterMode(display=False) as counted:
        step(fla, torch.zeros(heads, values, keys), torch.zeros(heads, keys, 1), torch.zeros(heads, values, 1))
    assert arch.recurrence_flops == counted.get_total_flops() > 0
    scan = 5 * arch.num_layers * arch.recurrence_flops
    flops = forward_flops(arch, 1, 5)
    assert flops["mixer_scan"] == scan
    linears = sum(arch.linears)
    assert costs.model_flops(arch, 1, 5) == 3 * (2 * 5 * (linears + arch.embedding_parameters) + scan)
    assert 0.9 < linears / arch.body_parameters <= 1, "all large matrices are linear layers"


def test_a_hybrid_s_attention_layers_count_as_attention():
    """Two layers of attention are the Transformer's scan; a window leaves out what it does not see."""
    transformer = load_config(["model=transformer"])
    arch = resolve(transformer.model, transformer.size, 512)
    hybrid = architecture("delta_net", "model.attention_every=1")
    assert hybrid.attention_windows == (None, None)

    def scan(one: object, tokens: int) -> int:
        return forward_flops(one, 1, tokens)["mixer_scan"]

    assert scan(hybrid, 256) == scan(arch, 256)
    half = architecture("delta_net", "model.attention_every=2")
    assert 2 * scan(half, 256) == scan(hybrid, 256) + scan(architecture("delta_net"), 256)
    windowed = architecture("delta_net", "model.attention_every=1", "model.attention_window=10")
    pairs = sum(min(t + 1, 10) for t in range(256))
    assert scan(windowed, 256) == 2 * pairs * 4 * 128
    near, far = "{layers:[0],num_heads:4,window_size:10}", "{layers:[1],num_heads:4}"
    mixed = [architecture("delta_net", f"model.options.attn=[{a},{b}]") for a, b in ((near, far), (far, near))]
    assert [2 * scan(one, 256) for one in mixed] == 2 * [scan(hybrid, 256) + scan(windowed, 256)]


def test_a_window_hides_earlier_keys():
    q, k, v = (torch.randn(2, 9, 3, 8) for _ in range(3))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(8)
    age = torch.arange(9)[:, None] - torch.arange(9)
    weights = scores.masked_fill((age < 0) | (age > 3), float("-inf")).softmax(-1)
    expected = torch.einsum("bhts,bshd->bthd", weights, v)
    torch.testing.assert_close(flash_attn_func(q, k, v, causal=True, window_size=(3, 0)), expected)
    last = flash_attn_func(q[:, -1:], k, v, causal=True, window_size=(3, 0))
    torch.testing.assert_close(last, expected[:, -1:])


# ---------------------------------------------------------------------------------------------------------- running
def test_a_cpu_form_is_causal_and_keeps_documents_apart():
    network = build_model(architecture("delta_net"), device="cpu", seed=0).eval()
    ids = torch.randint(0, 512, (1, 90), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = network(ids)
        torch.testing.assert_close(network(ids[:, :70]), hidden[:, :70], rtol=1e-4, atol=1e-5)
        packed = network(ids, torch.tensor([0, 30, 90]))
        torch.testing.assert_close(packed[:, 30:], network(ids[:, 30:]), rtol=1e-4, atol=1e-5)


def test_documents_are_refused_where_fla_cannot_keep_them_apart(monkeypatch):
    monkeypatch.setattr("linrnn.models.cpu_ops.check_model", lambda kind: None)
    network = build_model(architecture("linear_attn"), device="cpu")
    with pytest.raises(ConfigError, match="cannot keep documents of one row apart"):
        network(torch.zeros(1, 90, dtype=torch.int64), torch.tensor([0, 30, 90]))


def test_a_cpu_form_equals_fla_s_own_naive_one():
    from linrnn.models.cpu_ops import mixers
    from linrnn.models.fla_import import import_fla

    q, k, v = (torch.nn.functional.normalize(torch.randn(2, 40, 3, 8), dim=-1) for _ in range(3))
    beta = torch.rand(2, 40, 3)
    heads_first = [x.transpose(1, 2) for x in (q, k, v, beta)]
    expected = import_fla("fla.ops.delta_rule.naive").delta_rule_recurrence(*heads_first)[0].transpose(1, 2)
    found, _ = mixers.chunk_delta_rule(q=q, k=k, v=v, beta=beta)
    torch.testing.assert_close(found, expected.to(found), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "more",
    [
        ["model.config=delta_net", "model.attention_every=2", "trainer.activation_checkpointing=full"],
        ["model.config=gla", "model.attention_every=2", "model.attention_window=16", "loss=standard"],
    ],
    ids=lambda more: more[0],
)
def test_a_hybrid_trains_and_its_export_generates_alike_with_and_without_state(more, small, tmp_path):
    trainer = Trainer(load_config(small("model=fla", "trainer.max_steps=2", "trainer.checkpoint_every=2", *more)))
    summary = trainer.fit()
    assert summary["status"] == "finished"
    assert math.isfinite(summary["valid_loss_nats"])
    assert summary["model"].startswith("fla:")
    export(load_trained(str(trainer.directory.path), torch.device("cpu")), tmp_path / "out")
    model, expected = load_trained(str(tmp_path / "out"), torch.device("cpu")).model, trainer.model.hf.state_dict()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[key])
    ids = torch.tensor([[1, 2, 3]])
    texts = [model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=state) for state in (True, False)]
    assert torch.equal(*texts)
    config = load_config(["model=fla", f"model.config={tmp_path / 'out'}"])
    assert resolve(config.model, config.size, 512).n_parameters == trainer.model.arch.n_parameters


@pytest.mark.parametrize(
    ("name", "cause"), [("mom", "adds a loss of its own"), ("yoco", "is not an embedding"), ("rodimus", "cannot build")]
)
def test_what_fla_cannot_build_anywhere_is_not_sent_to_a_gpu(name, cause, small):
    with pytest.raises((ConfigError, UnsupportedError), match=cause) as error:
        make_training_plan(load_config(small("model=fla", f"model.config={name}")))
    assert "GPU" not in error.value.remedy


def test_the_name_of_a_model_of_fla_s_leads_to_it():
    with pytest.raises(ConfigError, match=r"FLA has it: model=fla model\.config=rwkv7; nearest: "):
        load_config(["model=rwkv7"])
    with pytest.raises(ConfigError) as error:
        load_config(["model=rwkv8"])
    assert "FLA has it" not in error.value.remedy
    config = load_config(["model=fla", "model.config=delta_net", "model.chunk_size=32"])
    with pytest.raises(ConfigError, match="fla:delta_net has no chunks"):
        check_supported(config.model, torch.device("cpu"))


@pytest.mark.parametrize("raised", ["by FLA", "elsewhere"])
def test_what_fla_refuses_in_the_first_step_is_unsupported_with_fla_s_reason(raised, small, monkeypatch):
    from fla.ops.moba import parallel

    monkeypatch.setattr(parallel, "flash_attn_varlen_func", None)
    trainer = Trainer(load_config(small("model=fla", "model.config=delta_net")))

    def refuse(*_: object) -> None:
        if raised == "elsewhere":
            raise ImportError("not of FLA")
        parallel.parallel_moba(*[torch.zeros(1, 8, 2, 16)] * 3, torch.tensor([0, 8]), 8, 8, 2)

    monkeypatch.setattr(trainer, "_forward_backward", refuse)
    if raised == "elsewhere":
        with pytest.raises(ImportError, match="not of FLA"):
            trainer.fit()
        return
    with pytest.raises(
        UnsupportedError, match=r"(?s)model.config=delta_net: FLA cannot train it here .*flash-attn.*another model"
    ):
        trainer.fit()
    assert json.loads((trainer.directory.path / "summary.json").read_text())["status"] == "unsupported"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel runs on a GPU")
def test_an_option_that_needs_a_kernel_is_refused_on_a_cpu_with_that_reason(small):
    trainer = Trainer(load_config(small("model=fla", "model.config=gla", "model.options.fuse_norm=false")))
    with pytest.raises(UnsupportedError, match="needs a Triton kernel, and there is no GPU here") as error:
        trainer.fit()
    assert "run it on a GPU, or leave the model.options out" in error.value.remedy


# ------------------------------------------------------------------------------------------------- a model in one file
@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a fifth matched model: the diff of docs/extending.md, applied to copies of the files it changes."""
    diff = (ROOT / "docs" / "develop" / "delta_net.diff").read_text(encoding="utf-8")
    for folder in ("configs", "src/linrnn/models/zoo"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    subprocess.run(["git", "apply"], input=diff, text=True, cwd=tmp_path, check=True)
    monkeypatch.setattr(compose, "CONFIG_DIR", tmp_path / "configs")
    usual = dict(FACTS)
    runpy.run_path(str(tmp_path / "src/linrnn/models/zoo/delta_net.py"))
    yield "delta_net"
    FACTS.clear()
    FACTS.update(usual)


def test_the_diff_of_the_page_adds_a_model_that_trains_and_is_as_large_as_gla(added, small):
    trainer = Trainer(load_config(small("trainer.max_steps=2", f"model={added}")))
    assert trainer.fit()["status"] == "finished"
    arch = trainer.model.arch
    assert sum(p.numel() for p in trainer.model.parameters()) == arch.n_parameters
    assert costs.model_flops(arch, 1, 64) is not None
    assert trainer.plan.memory_estimate(arch) is None
    for size in ("smoke", "1b3"):
        configs = (load_config([f"model={name}", f"size={size}"]) for name in (added, "gla"))
        found, gla = (resolve(config.model, config.size, 32000).n_parameters for config in configs)
        assert found == pytest.approx(gla, rel=0.013)
