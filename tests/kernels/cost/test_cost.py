"""What a model's head and loss cost: the model's own time, memory and loss, beside ours, and what is refused."""

import importlib
import json
import sys
from typing import Any

import cce_kernels
import pytest
import torch
import torch.nn.functional as F
from cce_kernels.cost.__main__ import main
from cce_kernels.cost.measure import Profile
from cce_kernels.cost.presets import PRESETS, apply_liger, build
from patch_models import SMALL, batch, build_fla, build_hf
from torch import Tensor

PATCH = "cce_kernels.patch(model)"


def liger(model: Any) -> Any:
    apply_liger(model)
    return model


def ligers_kernel(x: Tensor, weight: Tensor, target: Tensor, softcap: float | None = None, **_: Any) -> Tensor:
    """In place of Liger's kernel, which needs a GPU."""
    logits = x @ weight.T
    return F.cross_entropy(logits if softcap is None else softcap * torch.tanh(logits / softcap), target)


def measured(model: Any, rounds: int = 1, device: str = "cpu", **options: Any) -> Profile:
    ids, labels = (x.to(device) for x in batch())
    given = {"input_ids": ids, "labels": labels}
    return cce_kernels.profile(model.to(device).train(), given, rounds=rounds, **options)


@pytest.mark.parametrize(
    ("build", "switch"),
    [
        (lambda: build_hf("OPT", dropout=0.0), PATCH),  # a decoder inside the base model
        (lambda: build_fla("GLA"), PATCH),
        (lambda: liger(build_hf("Gemma2")), f"del model.forward; {PATCH}"),
    ],
    ids=["OPT", "GLA", "Liger with softcap"],
)
def test_both_losses_are_the_models_and_the_line_switches(build, switch, monkeypatch):
    functional = importlib.import_module("liger_kernel.transformers.functional")
    monkeypatch.setattr(functional, "liger_fused_linear_cross_entropy", ligers_kernel)
    model = build()
    found = measured(model)
    assert found.switch == switch
    assert found.nats["ours"] == pytest.approx(found.nats["now"], rel=1e-5)
    assert not cce_kernels.is_patched(model)
    exec(switch, {"cce_kernels": cce_kernels, "model": model})  # the line does what it says
    assert cce_kernels.is_patched(model)


def test_the_share_of_head_and_loss_is_what_the_decoder_leaves_in_each_round():
    rounds = [{"now": 100, "ours": 80, "decoder": 60}, {"now": 120, "ours": 60, "decoder": 60}]
    found = Profile("a model", "a line", [*rounds, rounds[0]], rounds[0], {"now": 8.0, "ours": 2.5}, {"now": 7.0})
    assert found.share_of_step == {"now": pytest.approx(0.4), "ours": pytest.approx(0.25)}
    assert found.speed_up == [1.25, 2.0, 1.25]
    assert "with cce_kernels 1.25 (1.25 to 2.00) times as fast" in str(found)
    assert "8.00" in str(found)


def test_ids_are_their_own_labels_and_weights_do_not_change():
    ids, _ = batch()
    model = build_hf("Llama").train()
    before = [p.clone() for p in model.parameters()]
    found = cce_kernels.profile(model, ids, rounds=1)
    with torch.no_grad():
        assert found.nats["now"] == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: torch.compile(build_hf("Llama")), "before it is wrapped"),  # by patch
        (lambda: build_hf("Llama").requires_grad_(False), "returned no loss with a gradient"),
    ],
)
def test_what_cannot_be_measured_is_refused(build, message):
    with pytest.raises((TypeError, ValueError), match=f"model: .*{message}") as error:
        measured(build())
    assert "\n" not in str(error.value)


def test_wrong_arguments_are_refused():
    ids, _ = batch()
    model = build_hf("Llama")
    for wrong, message in (({"rounds": 0}, "rounds: must be at least 1"), ({"shift": 0}, "shift: patch takes only")):
        with pytest.raises(ValueError, match=message):
            cce_kernels.profile(model, ids, **wrong)
    for nothing in ({}, [1, 2]):
        with pytest.raises(TypeError, match="batch: must be token ids"):
            cce_kernels.profile(model, nothing)
    with pytest.raises(ValueError, match=r"evaluation mode.*call model.train\(\) first"):
        cce_kernels.profile(model.eval(), ids)


def test_the_command_prints_a_table_of_a_configs_model(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    arguments = ["batch=2", "seq=8", "rounds=1", "checkpointing=true", "device=cpu", "dtype=fp32"]
    assert main([f"model={tmp_path}", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "LlamaForCausalLM on cpu, torch.float32, 16 tokens, 1 rounds"
    assert {len(line) for line in lines[1:6] if line} == {66}, "the columns are aligned"
    assert lines[-1] == f"switch: {PATCH}"


def test_a_model_type_takes_overrides_and_derives_values_from_them():
    """Two heads have two heads of keys, where the default's 32 heads have 32."""
    values = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = build("llama", {key: str(value) for key, value in values.items()}, torch.float32, torch.device("meta"))
    assert model.config.num_key_value_heads == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["modle=x"], "did you mean model=…?"),
        (["model=llama_1", "device=cpu"], "did you mean llama_1b or"),
        (["model=llama", "seq=0"], "seq: must be a positive integer"),
        (["model=llama", "dtype=int8"], "dtype: must be bf16 or fp16 or fp32"),
        (["model=llama", "device=cpu", "config.hidden_size=33"], "The hidden size (33) is"),
        (["model=llama", "device=cpu", "config.hiden_sizes=8"], "did you mean config.hidden_size"),
        (["model=llama", "device=cuda"], "there is no GPU that torch can use; give device=cpu"),
        (["model=t5", "device=cpu"], "model=t5: is no causal language model"),
    ],
)
def test_a_wrong_command_line_names_what_is_meant(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("call", "module", "distribution"),
    [
        (cce_kernels.register_in_fla, "fla.backends", "flash-linear-attention"),
        (cce_kernels.register_in_trl, "trl.trainer.utils", "trl==1.16.0"),
        (lambda: build("llama", {}, torch.float32, torch.device("meta")), "transformers", "transformers"),
        (lambda: apply_liger(None), "liger_kernel.transformers.monkey_patch", "liger-kernel"),
    ],
)
def test_a_missing_library_is_named_with_what_to_install(call, module, distribution, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=f"{module}.*; pip install -U {distribution}$"):
        call()


PARAMETERS = {"llama_1b": 1_235_814_400, "llama_8b": 8_030_261_248}
PARAMETERS |= {"qwen3_0.6b": 596_049_920, "gemma2_2b": 2_614_341_888}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_number_of_parameters(name):
    model = build(name, {}, torch.bfloat16, torch.device("meta"))
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "build",
    [lambda: build_hf("Llama"), lambda: build_fla("Transformer", fuse_linear_cross_entropy=True),
     lambda: liger(build_hf("Llama"))],
    ids=["transformers", "FLA, fused", "Liger"],
)  # fmt: skip
def test_memory_and_losses_on_a_gpu(build):
    found = measured(build(), device="cuda")
    assert found.nats["ours"] == pytest.approx(found.nats["now"], rel=1e-3)
    assert 0 < found.gib["decoder"] < found.gib["now"]
    assert "peak memory, GiB" in str(found)
