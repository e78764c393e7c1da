"""A patched model on two ranks: Trainer with DDP or FSDP2, PyTorch's FSDP2, and LoRA there, as without the patch."""

import os
import traceback
from datetime import timedelta
from typing import Any

import cce_kernels
import pytest
import torch
import torch.distributed as dist
from everywhere import run_ranks
from patch_models import batch, build_hf, trained, trainer_of
from rank_process import free_port, set_launch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the ranks have their own process")
RANKS = 2
FSDP2: dict[str, dict[str, Any]] = {
    "FSDP2": {}, "FSDP2, head by itself": {"head": True}, "FSDP2, tied": {"tie_word_embeddings": True},
    "FSDP2, LoRA": {"lora": True},
}  # fmt: skip
TRAINERS: dict[str, dict[str, bool]] = {
    "Trainer, DDP": {}, "Trainer, FSDP2": {"fsdp": True}, "Trainer, FSDP2, LoRA": {"fsdp": True, "lora": True}
}  # fmt: skip


def adapted(model: Any) -> Any:
    """The model with adapters on its attention, which alone are trained."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def by_trainer(patched: bool, folder: str, device: str, fsdp: bool = False, lora: bool = False) -> list[float]:
    """Losses and gradients' norms of a Trainer, which wraps the model in DDP or FSDP2."""
    where: dict[str, Any] = {"use_cpu": True, "ddp_backend": "gloo"} if device == "cpu" else {}
    if fsdp:
        layers = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        where |= {"fsdp": "full_shard auto_wrap", "fsdp_config": layers}
    model = build_hf("Llama")
    trainer = trainer_of(adapted(model) if lora else model, folder, 4, **where)
    if patched:
        cce_kernels.patch_trainer(trainer)
    found = trained(trainer)
    assert type(trainer.model_wrapped).__name__.startswith("FSDP" if fsdp else "DistributedDataParallel")
    assert cce_kernels.is_patched(model) == patched
    return found


def fsdp_on_a_cpu() -> None:
    """Let accelerate's FSDP2, which is for GPUs alone, run PyTorch's on CPUs, in this process."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda state: setattr(state, "device", torch.device("cpu"))


def sharded(
    patched: bool, rank: int, device: str, head: bool = False, lora: bool = False, **options: Any
) -> list[torch.Tensor]:
    """The loss and the gradients of a model under FSDP2, with the head as a part of its own or of the whole model."""
    ids, labels = (x[rank : rank + 1].to(device) for x in batch())
    inner = build_hf("Llama", **options).to(device)
    if patched:
        cce_kernels.patch(inner, predictions=True)
    model = adapted(inner) if lora else inner
    for part in (*inner.model.layers, *([inner.lm_head] if head else []), model):
        fully_shard(part)
    output = model.train()(input_ids=ids, labels=labels)
    assert ("logits" in output) != patched
    output.loss.backward()
    gradients = [x.grad for x in model.parameters() if x.requires_grad]
    assert all(isinstance(gradient, DTensor) for gradient in gradients)
    found = [output.loss.detach(), *(gradient.full_tensor() for gradient in gradients)]
    with torch.no_grad():
        evaluated = model.eval()(input_ids=ids, labels=labels)
    return [*found, evaluated.loss, evaluated.predictions if patched else evaluated.logits.argmax(-1)]


def a_rank(rank: int, port: int, folder: str, device: str) -> None:
    torch.set_num_threads(1)
    set_launch(rank, RANKS, port)
    if device == "cuda":
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # without it, Trainer with FSDP2 and LoRA differs from run to run
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if device == "cpu" else "nccl", timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
    try:
        for name, options in TRAINERS.items():
            if device == "cpu" and "fsdp" in options:
                fsdp_on_a_cpu()
            found[name] = [by_trainer(patched, f"{folder}/{rank}", device, **options) for patched in (True, False)]
        for name, options in FSDP2.items():
            found[name] = [sharded(patched, rank, device, **options) for patched in (True, False)]
    except Exception:
        found["error"] = traceback.format_exc()
    finally:
        torch.save(found, f"{folder}/found.{rank}")
        dist.destroy_process_group()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_losses_and_gradients_are_those_without_the_patch(device, tmp_path):
    port = free_port()
    run_ranks(a_rank, [(rank, port, str(tmp_path), device) for rank in range(RANKS)], device)
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"found.{rank}", map_location="cpu")
        assert list(found) == [*TRAINERS, *FSDP2], found.get("error")
        for name, (got, want) in found.items():
            assert len(got) == len(want) > 5, name
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
