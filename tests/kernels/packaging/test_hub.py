"""The package in the form of Hugging Face's `kernels` library: built, loaded from its folder, put into a model."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from everywhere import run_ranks
from forked import ROOT, print_into
from torch import Tensor, nn

BUILD = ROOT / "kernels" / "hub" / "build.py"


def load_and_use(folder: str, printed: str) -> None:
    """Runs in a process of its own, because the copy stays loaded."""
    print_into(printed)
    import cce_kernels

    import kernels

    here, compiled = Path(folder), kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
    torch.manual_seed(0)
    hidden, labels = torch.randn(2, 8, 16), torch.randint(50, (2, 8))
    labels[0, 3] = -100

    @kernels.use_kernel_forward_from_hub("ForCausalLMLoss")
    class OwnLoss(nn.Module):
        def forward(
            self, hidden_states: Tensor, weight: Tensor, labels: Tensor, num_items_in_batch: Any = None,
            ignore_index: int = -100, shift_labels: Tensor | None = None,
        ) -> Tensor:  # fmt: skip
            logits = (hidden_states @ weight.T)[:, :-1].flatten(0, 1)
            return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=ignore_index)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.loss = nn.Linear(16, 50, bias=False), OwnLoss()

        def forward(self, hidden: Tensor, labels: Tensor, **options: Any) -> Tensor:
            return self.loss(hidden, self.head.weight, labels, **options)

    def step(model: nn.Module, **options: Any) -> list[Tensor]:
        model.zero_grad()
        loss = model(hidden, labels, **options)
        loss.backward()
        return [loss.detach(), model.head.weight.grad.clone()]

    model = Model().train()
    want = step(model)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled_loss(hidden: Tensor) -> Tensor:
        return cce_kernels.linear_cross_entropy(hidden, model.head.weight, labels, shift=1)

    compiled_loss(hidden).backward()
    kernel = kernels.get_local_kernel(here)
    assert Path(kernel.__file__).is_relative_to(here)
    ours, copied = (x.operators._forward_op._qualname for x in (cce_kernels, kernel))
    assert ours != copied, "the copy has replaced the installed operators, which compiled graphs still call"
    compiled_loss(hidden).backward()
    torch.testing.assert_close(
        kernel.linear_cross_entropy(hidden, model.head.weight, labels, shift=1).detach(), want[0]
    )
    repository = kernels.LocalLayerRepository(here, layer_name="ForCausalLMLoss")
    with kernels.use_kernel_mapping({"ForCausalLMLoss": {"cpu": {compiled: repository}}}):
        kernels.kernelize(model, mode=compiled, device="cpu", use_fallback=False)
    assert model.loss.forward.__func__ is kernel.layers.ForCausalLMLoss.forward
    torch.testing.assert_close(step(model), want)
    counted = step(model, num_items_in_batch=torch.tensor(26))[0]
    torch.testing.assert_close(counted, want[0] * 13 / 26)
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(step(model, shift_labels=shifted)[0], want[0])
    print("done")


def test_a_kernel_from_a_local_repository(tmp_path):
    folder = runpy.run_path(str(BUILD))["build"](tmp_path / "cce-kernels")
    printed = tmp_path / "printed"
    assert run_ranks(load_and_use, [(str(folder), str(printed))]) == [0], printed.read_text()[-3000:]
    assert printed.read_text().endswith("done\n")


def test_without_a_folder_the_command_says_how_it_is_called(monkeypatch):
    monkeypatch.setattr("sys.argv", [str(BUILD)])
    with pytest.raises(SystemExit, match=r"usage: python kernels/hub/build\.py FOLDER"):
        runpy.run_path(str(BUILD), run_name="__main__")
