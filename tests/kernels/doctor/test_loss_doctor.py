"""The loss doctor: which loss it finds, that its figures belong to that loss, that the model stays as it was."""

import copy
import importlib
import inspect
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cce_kernels
import pytest
import torch
import torch.nn.functional as F
import transformers
from cce_kernels.doctor import measure
from cce_kernels.doctor.__main__ import main
from cce_kernels.doctor.measure import Pass, Profile
from cce_kernels.doctor.presets import PRESETS, apply_liger, build
from cce_kernels.module import FusedLinearCrossEntropyLoss
from patch_models import DENSE, SMALL, VOCAB, batch, build_fla, build_hf
from torch import Tensor, nn

PATCH = "cce_kernels.patch(model)"
OURS = "nothing to switch, the loss is cce_kernels' already"


def liger(model: Any) -> Any:
    apply_liger(model)
    return model


def criterion(model: Any, loss: Any) -> Any:
    model.criterion = loss
    return model


def fused_fla(**options: Any) -> Any:
    return build_fla("Transformer", fuse_linear_cross_entropy=True, **options)


class FusedLoss(nn.Module):
    """In place of FLA's fused loss, which needs a GPU: it takes hidden states and the head's weight, too."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.ignore_index = -100

    def forward(self, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.cross_entropy(F.linear(x, weight, bias).flatten(0, -2), target.flatten())


def ligers_kernel(x: Tensor, weight: Tensor, target: Tensor, softcap: float | None = None, **_: Any) -> Tensor:
    """In place of Liger's kernel, which needs a GPU."""
    logits = x @ weight.T
    return F.cross_entropy(logits if softcap is None else softcap * torch.tanh(logits / softcap), target)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models' code around the loss is FLA's and Liger's own."""
    monkeypatch.setattr(importlib.import_module("fla.models.modeling_utils"), "FusedLinearCrossEntropyLoss", FusedLoss)
    functional = importlib.import_module("liger_kernel.transformers.functional")
    monkeypatch.setattr(functional, "liger_fused_linear_cross_entropy", ligers_kernel)


def measured(model: Any, rounds: int = 1, device: str = "cpu", **options: Any) -> Profile:
    ids, labels = (x.to(device) for x in batch())
    given = {"input_ids": ids, "labels": labels}
    return cce_kernels.profile(model.to(device), given, rounds=rounds, **options)


# ------------------------------------------------------------------------------- which loss, and which line switches
CASES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "transformers": (lambda: build_hf("Llama"), "transformers' default, on logits", PATCH),
    "softcap": (lambda: build_hf("Gemma2"), "transformers' default, on logits", PATCH),
    "scale": (lambda: build_hf("Cohere"), "transformers' default, on logits", PATCH),
    "divisor": (lambda: build_hf("Granite"), "transformers' default, on logits", PATCH),
    "inner decoder": (lambda: build_hf("OPT"), "transformers' default, on logits", PATCH),
    "FLA": (lambda: build_fla("Transformer"), "FLA's default, on logits", PATCH),
    "FLA, fused": (fused_fla, "FLA's, fused with the head", "cce_kernels.register_in_fla()"),
    "FLA, criterion": (
        lambda: criterion(build_fla("Transformer"), nn.CrossEntropyLoss()),
        "torch's CrossEntropyLoss as criterion, on logits",
        f"model.criterion = None; {PATCH}",
    ),
    "Liger": (
        lambda: liger(build_hf("Llama")),
        "Liger's forward, fused with the head",
        f"del model.forward; {PATCH}",
    ),
    "Liger, softcap": (
        lambda: liger(build_hf("Gemma2")),
        "Liger's forward, fused with the head",
        f"del model.forward; {PATCH}",
    ),
    "patched": (lambda: cce_kernels.patch(build_hf("Llama")), "cce_kernels (patch)", OURS),
    "FLA, our criterion": (
        lambda: criterion(fused_fla(), FusedLinearCrossEntropyLoss()),
        "cce_kernels (criterion), fused with the head",
        OURS,
    ),
}


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_found_and_the_line_switches(name):
    build, loss, switch = CASES[name]
    model = build()
    found = measured(model)
    assert (found.loss, found.switch) == (loss, switch)
    assert found.our_nats == pytest.approx(found.nats, rel=1e-5)
    assert (found.tokens, found.width, found.vocabulary, found.products) == (40, 32, VOCAB, 3)
    if switch.endswith(PATCH):  # the line does what it says
        exec(switch, {"cce_kernels": cce_kernels, "model": model})
        assert measured(model).loss == "cce_kernels (patch)"


@pytest.mark.usefixtures("without_gpu")
def test_flas_dispatch_to_this_package_is_seen(monkeypatch):
    cce_kernels.register_in_fla()
    of_fla = importlib.import_module("fla.modules.fused_linear_cross_entropy.ops")
    registries = importlib.import_module("fla.backends")._function_registries
    registry = registries[inspect.unwrap(of_fla.fused_linear_cross_entropy_fwd)]
    try:
        found = measured(fused_fla())
        assert (found.loss, found.switch) == ("cce_kernels (backend of FLA), fused with the head", OURS)
        monkeypatch.setenv("FLA_CCE", "0")
        assert measured(fused_fla()).switch == "cce_kernels.register_in_fla()"
    finally:
        del registry._backends["cce"]


@pytest.mark.usefixtures("without_gpu")
def test_ligers_class_must_be_loaded_anew(monkeypatch):
    forward = liger(build_hf("Llama")).forward.__func__
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    found = measured(build_hf("Llama"))
    assert found.loss == "Liger's forward, fused with the head"
    assert found.switch == f"load the model without Liger's fused_linear_cross_entropy, then {PATCH}"


def test_a_model_that_patch_refuses_gets_the_reason():
    model = build_hf("Llama")
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    found = measured(model)
    assert found.loss.startswith(f"its own, {__name__}.")
    assert "because patch refuses: model: has a loss_function" in found.switch
    assert not found.same_loss
    assert "the losses differ" in str(found)


class Late(transformers.LlamaForCausalLM):
    """Its forward needs more tokens than `patch` tries it with, so that only a call shows what it does to logits."""

    def forward(self, input_ids=None, labels=None, **_):
        assert input_ids.shape[1] > 2
        logits = self.lm_head(self.model(input_ids)[0]).square()
        return transformers.modeling_outputs.CausalLMOutput(
            self.loss_function(logits, labels, self.config.vocab_size), logits
        )


def test_a_line_whose_call_fails_is_not_offered():
    model = Late(build_hf("Llama").config)
    cce_kernels.unpatch(cce_kernels.patch(model))
    assert "because patch refuses: model: its forward uses .square of its logits" in measured(model).switch


# ------------------------------------------------------------------------------------------------------- the figures
def test_the_time_of_each_part_is_its_own(monkeypatch):
    """On a clock that the decoder and the head alone move, the decoder in its backward pass, too."""
    now = [0.0]
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def moves(seconds: float) -> Callable[..., None]:
        return lambda *_: now.__setitem__(0, now[0] + seconds)

    model = build_hf("Llama")
    model.model.layers[0].register_forward_hook(moves(0.1))
    model.model.layers[0].register_full_backward_hook(moves(0.2))
    model.lm_head.register_forward_hook(moves(0.05))
    found = measured(model)
    times = (found.step, found.decoder, found.head, found.our_head, found.our_step)
    assert [one.ms for one in times] == pytest.approx([350, 300, 50, 0, 300])


def test_rates_and_shares():
    times = {name: Pass(ms, gib) for name, ms, gib in [
        ("step", 100.0, 8.0), ("decoder", 70.0, 2.0), ("head", 30.0, 6.5), ("our_head", 15.0, 0.6),
        ("our_step", 85.0, 2.5),
    ]}  # fmt: skip
    found = Profile("M", "l", "s", "cpu", "float32", 1000, 2000, 5000, 3, 5, **times, nats=8.0, our_nats=8.1)
    assert found.tflops == pytest.approx((2.0, 4.0))
    assert found.share_of_step == pytest.approx((0.3, 15 / 85))
    assert found.share_of_peak == pytest.approx((0.75, 0.2))
    assert found.same_loss
    assert "75.0%" in str(found)
    assert "CPU" not in str(found)


def test_the_model_is_as_it_was():
    model = build_hf("Llama").eval()
    model.model.layers[0].train()
    ids, labels = batch()
    model(ids, labels=labels).loss.backward()
    before, state = copy.deepcopy(model), torch.get_rng_state()
    gradients = [p.grad for p in model.parameters()]
    values = [gradient.clone() for gradient in gradients]
    measured(model, rounds=2)
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    for got, want, gradient in zip(model.parameters(), before.parameters(), values, strict=True):
        assert torch.equal(got, want)
        assert torch.equal(got.grad, gradient)
    assert torch.equal(torch.get_rng_state(), state)
    assert "forward" not in vars(model.model)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(("frozen", "products"), [("lm_head", 2), ("model", 2)])
def test_frozen_parts_need_fewer_products(frozen, products):
    model = build_hf("Llama")
    getattr(model, frozen).requires_grad_(False)
    assert measured(model).products == products


def test_ids_are_their_own_labels_and_options_reach_our_loss():
    ids, _ = batch()
    model = build_hf("Llama")
    found = cce_kernels.profile(model, ids, rounds=1, label_smoothing=0.1)
    with torch.no_grad():
        assert found.nats == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)
    assert found.our_nats != pytest.approx(found.nats, rel=1e-4)


# --------------------------------------------------------------------------------------------------------- refusals
BERT = transformers.BertConfig(**DENSE, vocab_size=VOCAB)


class NoLoss(transformers.LlamaForCausalLM):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids)[0]))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(2, 2), "a Linear cannot be measured; give a causal language model"),
        (lambda: nn.DataParallel(build_hf("Llama")), "a DataParallel cannot be measured; .*before it is wrapped"),
        (lambda: torch.compile(build_hf("Llama")), "is compiled; give a causal"),
        (lambda: transformers.BertModel(BERT), "a BertModel is no causal language model; give a causal"),
        (lambda: transformers.BertForMaskedLM(BERT), "a BertForMaskedLM is no causal language model"),
        (lambda: build_hf("Llama").model, "a LlamaModel is no causal language model"),
        (lambda: NoLoss(build_hf("Llama").config), "a NoLoss returned no loss for a batch with labels"),
        (lambda: build_hf("Llama").requires_grad_(False), "no parameter requires a gradient"),
    ],
)
def test_what_cannot_be_measured_is_refused(build, message):
    with pytest.raises((TypeError, ValueError), match=f"model: .*{message}") as error:
        measured(build())
    assert "\n" not in str(error.value)


def test_wrong_arguments_are_refused():
    ids, _ = batch()
    model = build_hf("Llama")
    with pytest.raises(ValueError, match="rounds: must be at least 1"):
        cce_kernels.profile(model, ids, rounds=0)
    with pytest.raises(ValueError, match="batch: has neither labels nor input_ids"):
        cce_kernels.profile(model, {})
    with pytest.raises(TypeError, match="batch: must be token ids"):
        cce_kernels.profile(model, [1, 2])
    for wrong in (ids[0], ids.float()):
        with pytest.raises(ValueError, match=r"batch: must be token ids \(B, T\), got torch"):
            cce_kernels.profile(model, wrong)
    with pytest.raises(ValueError, match="batch: no label counts"):
        cce_kernels.profile(model, ids[:, :1])
    with pytest.raises(ValueError, match="workspace_mib: must be positive"):
        cce_kernels.profile(None, ids, workspace_mib=-1)  # before the model is looked at
    for option in ({"reduction": "none"}, {"shift": 0}, {"return_lse": True}):
        with pytest.raises(ValueError, match=f"{next(iter(option))}: cannot be given"):
            cce_kernels.profile(model, ids, **option)


# ------------------------------------------------------------------------------------------------------ the command
@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **SMALL}))
    return path


def test_the_command_prints_a_table(config, capsys):
    assert main([f"model={config}", "batch=2", "seq=8", "rounds=1", "checkpointing=true", "device=cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "LlamaForCausalLM on cpu, float32: 16 tokens x 32 dimensions x 96 entries, medians of 1 rounds"
    assert "peak memory: not measured on a CPU" in lines
    assert lines[-1] == f"to switch: {PATCH}"
    [header] = [line for line in lines if line.endswith("cce_kernels")]
    assert all(len(line) == len(header) for line in lines[3:10]), "the columns are aligned"


@pytest.mark.usefixtures("without_gpu")
def test_the_command_prints_json(config, capsys):
    model = build_hf("Llama")
    model.save_pretrained(config.parent)
    arguments = [f"model={config.parent}", "seq=8", "rounds=1", "json=true", "liger=true", "device=cpu", "dtype=fp32"]
    assert main([*arguments, "workspace_mib=4"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["loss"] == "Liger's forward, fused with the head"
    assert record["share_of_peak"] is None
    assert record["step"]["gib"] is None
    assert record["same_loss"]
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (1, 8))
    with torch.no_grad():
        assert record["nats"] == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5), "the folder's weights"


def test_a_model_type_takes_overrides(capsys):
    sizes = [f"config.{key}={value}" for key, value in SMALL.items()]
    assert main(["model=qwen2", "seq=8", "rounds=1", "device=cpu", *sizes]) == 0
    assert "Qwen2ForCausalLM on cpu" in capsys.readouterr().out


def test_what_a_configuration_derives_follows_from_the_overrides(capsys):
    """Two heads have two heads of keys, where the default's 32 heads have 32."""
    sizes = ["hidden_size=64", "intermediate_size=64", "num_hidden_layers=1", "num_attention_heads=2", "vocab_size=99"]
    arguments = ["model=llama", "seq=8", "rounds=1", "device=cpu", *(f"config.{size}" for size in sizes)]
    assert main(arguments) == 0, capsys.readouterr().err


def test_a_sequence_with_more_tokens_than_positions_is_explained(capsys):
    sizes = ["n_layer=1", "n_embd=32", "n_head=2", "n_positions=16", "vocab_size=99"]
    assert main(["model=gpt2", "seq=32", "device=cpu", *(f"config.{size}" for size in sizes)]) == 2
    assert "fewer positions than tokens of a sequence: give a smaller seq" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["modle=x"], "did you mean model="),
        (["model"], "must be key=value"),
        (["seq=3"], "model: is missing"),
        (["model=llama_1", "seq=3"], "did you mean llama_1b"),
        (["model=llama", "seq=0"], "seq: must be a positive integer"),
        (["model=llama", "json=yes"], "json: must be true or false"),
        (["model=llama", "dtype=int8"], "dtype: must be one of bf16, fp16, fp32"),
        (["model=llama", "workspace_mib=x"], "workspace_mib: must be a number"),
        (["model=llama_8b", "device=cpu", "workspace_mib=0"], "workspace_mib: must be positive and finite"),
        (["model=llama", "device=cpu", "config.hidden_size=33"], "refuses hidden_size: The hidden size (33) is"),
        (["model=llama", "device=cpu", "config.hiden_size=8"], "did you mean config.hidden_size"),
        (["model=llama", "device=cpu", "config.foo=8"], "config.foo: a LlamaConfig has no such key\n"),
        (["model=llama", "device=cpu", "config.hidden_size=x"], "config.hidden_size: a LlamaConfig refuses x: "),
        (["model="], "model: is missing"),
        (["model=llama", "device=cuda"], "there is no GPU that torch can use; give device=cpu"),
        (["model=t5", "device=cpu"], "t5 is no causal language model"),
    ],
)
def test_a_wrong_command_line_names_what_is_meant(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_without_transformers_the_line_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["model=llama", "device=cpu"]) == 2
    assert capsys.readouterr().err.endswith("the doctor needs it: pip install transformers\n")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("no memory\nhere"), "error: no memory; give a smaller batch or seq\n"),
        (
            RuntimeError("no driver"),
            "error: the model failed on this device: no driver; most models of FLA and Liger's loss need a GPU\n",
        ),
    ],
)
def test_a_model_that_fails_gets_one_line(error, message, config, capsys, monkeypatch):
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", fails)
    assert main([f"model={config}", "seq=8", "device=cpu"]) == 2
    assert capsys.readouterr().err == message


def test_weights_that_cannot_be_read_get_one_line(config, capsys):
    config.with_name("model.safetensors").write_bytes(b"damaged")
    assert main([f"model={config.parent}", "seq=8", "device=cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: model: the weights in {config.parent} cannot be read: ")
    assert error.count("\n") == 1


def test_a_model_of_text_and_images_is_measured_with_its_text(tmp_path, capsys):
    text = {**SMALL, "head_dim": 8, "layer_types": ["full_attention"] * SMALL["num_hidden_layers"]}
    vision = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": vision, "mm_tokens_per_image": 4})
    )
    assert main([f"model={tmp_path}", "batch=2", "seq=8", "rounds=1", "device=cpu"]) == 0, capsys.readouterr().err
    assert f"x {SMALL['vocab_size']} entries" in capsys.readouterr().out


PARAMETERS = {
    "llama_1b": 1_235_814_400,
    "llama_8b": 8_030_261_248,
    "qwen3_0.6b": 596_049_920,
    "gemma2_2b": 2_614_341_888,
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_number_of_parameters(name):
    model = build(name, {}, torch.bfloat16, torch.device("meta"))
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_help_names_every_key_and_preset(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert {"model", "batch=1", "seq=2048", "config.KEY="} <= {line.split()[0] for line in text.splitlines() if line}
    assert "llama_1b  " in text


# ------------------------------------------------------------------------------------------------------------ a GPU
ON_GPU = {
    "transformers": (lambda: build_hf("Llama"), "transformers' default, on logits"),
    "FLA": (lambda: build_fla("Transformer", fuse_cross_entropy=True), "FLA's default, on logits"),
    "FLA, fused": (fused_fla, "FLA's, fused with the head"),
    "Liger": (lambda: liger(build_hf("Llama")), "Liger's forward, fused with the head"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_the_four_losses_on_a_gpu(name):
    build, loss = ON_GPU[name]
    found = measured(build(), device="cuda")
    assert found.loss == loss
    assert found.our_nats == pytest.approx(found.nats, rel=1e-3)
    assert 0 < found.head.gib < found.step.gib
    assert found.share_of_peak[0] < 1
    assert "peak memory, GiB" in str(found)
