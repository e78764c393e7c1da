"""The doctor lists everything, tells the truth about it, and never prints keys."""

import pytest
import torch

from linrnn.config import load_config
from linrnn.core.errors import UnsupportedError
from linrnn.experiments.doctor import diagnose, losses, models
from linrnn.losses import check_loss, loss_names

CPU = torch.device("cpu")


def test_the_command_prints_every_loss_and_model_exits_zero_and_never_shows_the_key(tmp_path, command):
    key = "0123456789abcdef0123456789abcdef01234567"
    url = "http://127.0.0.1:9"
    done = command("scripts/doctor.py", "device=cpu", cwd=tmp_path, WANDB_API_KEY=key, WANDB_BASE_URL=url)
    assert done.returncode == 0, done.stderr
    for name in (*loss_names(), "gla", "gated_deltanet", "kda", "transformer", "torch", "triton", "disk"):
        assert name in done.stdout
    assert "present" in done.stdout
    assert key not in done.stdout + done.stderr


def test_verdicts_are_those_of_check_loss():
    verdicts = dict(losses(CPU, torch.float32))
    for name in loss_names():
        try:
            check_loss(load_config([f"loss={name}"]).loss, CPU, torch.float32)
        except UnsupportedError:
            assert verdicts[name].startswith("no  ")
        else:
            assert verdicts[name] == "ok"
    assert verdicts["standard"] == "ok"
    assert verdicts["liger"].startswith("no  ")
    assert models(CPU) == [(name, "ok") for name in ("gla", "gated_deltanet", "kda", "transformer")]


@pytest.mark.gpu
def test_on_a_gpu_the_card_is_named_and_what_needs_no_other_library_runs():
    assert torch.cuda.get_device_name() in diagnose(load_config(["device=cuda"]))
    verdicts = dict(losses(torch.device("cuda"), torch.bfloat16))
    assert [verdicts[name] for name in ("standard", "compiled", "cce_kahan", "cce_filter")] == ["ok"] * 4
