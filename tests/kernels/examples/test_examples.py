"""Every file of kernels/examples trains a tiny model, and its loss comes from this package."""

import importlib
import inspect
import math
from typing import Any

import pytest
import torch
from cce_kernels import api, log_probs
from cce_kernels.huggingface import trl
from cce_kernels.options import Inputs
from everywhere import EXAMPLES, load_example
from torch import nn

TRAINING = (
    "plain_loop", "multi_token_prediction", "next_tokens", "topk_distillation", "fla_criterion", "hf_trainer",
    "trl_sft", "lightning_module",
)  # fmt: skip
POLICIES = ("trl_dpo", "trl_grpo")
OTHERS = ("flame_backend", "torchtitan_loss")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices of the calls of this package's loss and log-probabilities."""
    found: list[str] = []

    def watch(module: Any, name: str) -> None:
        own = getattr(module, name)

        def watched(x: Inputs, *args: Any, **options: Any) -> Any:
            found.append(x.e.device.type)
            return own(x, *args, **options)

        monkeypatch.setattr(module, name, watched)

    for module in (api, log_probs, trl):
        watch(module, "cross_entropy")
    return found


def test_every_example_is_short_and_tried():
    files = {path.stem: path.read_text().splitlines() for path in EXAMPLES.glob("*.py")}
    assert files.keys() == {*TRAINING, *POLICIES, *OTHERS}
    for name, lines in files.items():
        assert len(lines) <= 30, f"{name}: {len(lines)} lines"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", TRAINING)
def test_an_example_trains_with_this_loss(name, device, calls, tmp_path, untuned):
    pytest.importorskip({"trl_sft": "trl", "lightning_module": "lightning"}.get(name, "torch"))
    if (name, device) == ("fla_criterion", "cpu"):  # FLA's layers have no CPU version of their own
        importlib.import_module("linrnn.models.cpu_ops").install()
    main = load_example(name).main
    where = {"folder": str(tmp_path)} if "folder" in inspect.signature(main).parameters else {}
    losses = main(device=device, **where)
    assert len(losses) == 5
    assert losses[0] == pytest.approx(math.log(1000), abs=0.4)
    assert losses[-1] < losses[0] - 0.1
    assert len([place for place in calls if place == device]) >= 5


@pytest.mark.gpu
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_trains_with_these_log_probabilities_on_a_gpu(name, calls, tmp_path, monkeypatch):
    """The loss of a policy says little; tests/kernels/huggingface/test_trl.py compares it with TRL's own."""
    utils = pytest.importorskip("trl.trainer.utils")
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", utils._ChunkedLogProbFunction)  # restored after the test
    losses = load_example(name).main(device="cuda", folder=str(tmp_path))
    assert len(set(losses)) == 5
    assert all(map(math.isfinite, losses))
    if name == "trl_dpo":
        assert losses[0] == pytest.approx(math.log(2), abs=0.05)
        assert losses[-1] < losses[0] - 0.1
    assert len([place for place in calls if place == "cuda"]) >= 5


def test_flames_file_registers_the_backend():
    registries = importlib.import_module("fla.backends")._function_registries
    of_fla = importlib.import_module("fla.modules.fused_linear_cross_entropy.ops")
    registry = registries[inspect.unwrap(of_fla.fused_linear_cross_entropy_fwd)]
    load_example("flame_backend")
    assert registry.get_active().backend_type == "cce"
    del registry._backends["cce"]


def test_torchtitans_loss_is_its_chunked_one():
    """torchtitan is in no extra: it needs an older `datasets` than linrnn."""
    losses = pytest.importorskip("torchtitan.components.loss")
    config = load_example("torchtitan_loss").CceLoss.Config(workspace_mib=64)
    ours, theirs = config.build(), losses.ChunkedLossWrapper.Config(num_chunks=2).build()
    torch.manual_seed(0)
    head, states, labels = nn.Linear(16, 50, bias=False), torch.randn(2, 8, 16), torch.randint(50, (2, 8))
    labels[0, :3] = -100
    results = []
    for loss in (ours, theirs):
        assert isinstance(loss, losses.ChunkedLossWrapper), "torchtitan's trainer gives such a loss the head"
        loss.set_lm_head(head)
        hidden = states.clone().requires_grad_()
        head.zero_grad()
        value, _ = loss(hidden, labels, torch.tensor(13.0))
        value.backward()
        results.append([value.detach(), hidden.grad, head.weight.grad.clone()])
    torch.testing.assert_close(*results)
