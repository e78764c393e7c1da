"""A patched model under DeepSpeed's ZeRO-3 on two ranks, as without the patch.

DeepSpeed is no part of `linrnn[test]`: `pip install deepspeed`, then run this file. It builds an extension at first.
"""

import os
from typing import Any

import cce_kernels
import pytest
import torch
from everywhere import run_ranks
from patch_models import batch, build_hf
from rank_process import free_port, set_launch
from test_ranks import RANKS

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the ranks have their own process")
pytest.importorskip("deepspeed")
STEPS = 3
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}


def trained(patched: bool, rank: int, device: str, **options: Any) -> list[float]:
    """The loss and the norm of the head's gradient of each step, and the loss of an evaluation."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    model = build_hf("Llama", **options)
    if patched:
        cce_kernels.patch(model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    ids, labels = (x[rank : rank + 1].to(device) for x in batch())
    found = []
    for _ in range(STEPS):
        loss = engine(input_ids=ids, labels=labels).loss
        engine.backward(loss)
        found += [loss.item(), safe_get_full_grad(model.lm_head.weight).norm().item()]
        assert model.lm_head.weight.numel() == 0, "sharded between the passes"
        engine.step()
    engine.eval()
    with torch.no_grad():
        return [*found, engine(input_ids=ids, labels=labels).loss.item()]


def a_rank(rank: int, port: int, folder: str, device: str) -> None:
    torch.set_num_threads(1)
    set_launch(rank, RANKS, port)
    os.environ["DS_ACCELERATOR"] = device
    import deepspeed

    if device == "cuda":
        torch.cuda.set_device(rank)
    deepspeed.init_distributed("gloo" if device == "cpu" else "nccl")
    found = [
        [trained(patched, rank, device, tie_word_embeddings=tied) for patched in (True, False)]
        for tied in (False, True)
    ]
    torch.save(found, f"{folder}/found.{rank}")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_losses_and_gradients_are_those_without_the_patch(device, tmp_path):
    port = free_port()
    run_ranks(a_rank, [(rank, port, str(tmp_path), device) for rank in range(RANKS)], device)
    for rank in range(RANKS):
        for got, want in torch.load(tmp_path / f"found.{rank}"):
            assert got == pytest.approx(want, rel=1e-4)
            assert len(got) == 2 * STEPS + 1
