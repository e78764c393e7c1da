"""PyTorch Lightning: the loss in training_step."""

import lightning
import torch
from cce_kernels import LinearCrossEntropyLoss
from torch import nn


class LanguageModel(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64), nn.GELU())
        self.head = nn.Linear(64, 1000, bias=False)
        self.criterion, self.losses = LinearCrossEntropyLoss(shift=1), []

    def training_step(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.criterion(self.body(ids), self.head.weight, ids)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder: str, device: str = "cuda" if torch.cuda.is_available() else "cpu", steps: int = 5) -> list[float]:
    torch.manual_seed(0)
    model, quiet = LanguageModel(), {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator=device, devices=1, max_epochs=steps, default_root_dir=folder, **quiet)
    trainer.fit(model, torch.utils.data.DataLoader(torch.randint(1000, (4, 32)), batch_size=4))
    return model.losses
