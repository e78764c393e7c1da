"""Small models of transformers and FLA, and a step of one patched against unpatched."""

import copy
import importlib
from collections.abc import Callable
from typing import Any

import cce_kernels
import torch
import transformers
from torch import Tensor

from linrnn.models import cpu_ops
from linrnn.models.attention import with_sdpa

VOCAB = 96
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
EXTRA = {
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 0.5},
    "Gemma3": {"head_dim": 8, "final_logit_softcapping": 0.5},
    "Glm4": {"head_dim": 8},
    "Cohere": {"logit_scale": 3.0},
    "Cohere2": {"logit_scale": 3.0},
    "Granite": {"logits_scaling": 0.2},
    "Qwen3": {"head_dim": 8},
    "Mixtral": ROUTED | {"num_local_experts": 4},
    "GraniteMoe": {"num_local_experts": 4, "output_router_logits": True, "logits_scaling": 0.2},
    "Qwen3Moe": ROUTED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
}
MIXERS = {
    "GLA": {"num_heads": 2},
    "GatedDeltaNet": {"num_heads": 2, "head_dim": 16},
    "KDA": {"num_heads": 2, "head_dim": 16},
    "Transformer": {"num_heads": 4},
}


def build_hf(name: str, kind: str | None = None, **options: Any) -> Any:
    """kind: the class, where it is not called …ForCausalLM."""
    of_config = f"{'Gemma3Text' if name == 'Gemma3' else name}Config"
    config = getattr(transformers, of_config)(**{**SMALL, **EXTRA.get(name, {}), **options})
    return initialised(lambda: getattr(transformers, kind or f"{name}ForCausalLM")(config))


def build_fla(name: str, **options: Any) -> Any:
    cpu_ops.install()
    models = importlib.import_module("fla.models")
    shared = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": VOCAB}
    # FLA's own fused losses are Triton kernels.
    config = getattr(models, f"{name}Config")(**{**shared, "fuse_cross_entropy": False, **MIXERS[name], **options})
    kind = getattr(models, f"{name}ForCausalLM")
    kind = with_sdpa(kind) if name == "Transformer" else kind  # a class of linrnn's, which cannot be pickled
    return initialised(lambda: kind(config))


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


def trainer_of(model: Any, folder: str, copies: int, metrics: Any = None, **arguments: Any) -> Any:
    """A Trainer of three steps on `copies` of the batch, which are also its validation data."""
    ids, labels = (x.repeat(copies, 1) for x in batch())
    rows = [{"input_ids": ids[i], "labels": labels[i]} for i in range(len(ids))]
    given = transformers.TrainingArguments(
        folder, max_steps=3, learning_rate=1e-2, logging_steps=1, report_to="none", seed=1, save_strategy="no",
        disable_tqdm=True, per_device_train_batch_size=1, gradient_accumulation_steps=2, **arguments,
    )  # fmt: skip
    return transformers.Trainer(model, given, train_dataset=rows, eval_dataset=rows, compute_metrics=metrics)


def trained(trainer: Any) -> list[float]:
    """The loss and the gradient's norm of every step."""
    trainer.train()
    return [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]


def step(model: Any, *args: Any, **call: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
    """Loss, gradients and output of one call."""
    model.zero_grad()
    output = model(*args, **call)
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.loss.detach(), gradients, output


def assert_same(got: tuple[Tensor, dict[str, Tensor], Any], want: tuple[Tensor, dict[str, Tensor], Any]) -> None:
    """Loss and gradients of two steps."""
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)


def same_step(model: Any, *args: Any, options: dict[str, Any] | None = None, **call: Any) -> None:
    """The patched copy of a model gives the model's own loss and gradients, and no logits."""
    want = step(model, *args, **call)
    got = step(cce_kernels.patch(copy.deepcopy(model), **(options or {})), *args, **call)
    assert_same(got, want)
    assert "logits" not in got[2]
    assert getattr(got[2], "logits", None) is None
