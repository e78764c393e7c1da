"""A model of flash-linear-attention: its criterion. Without an access to the model: cce_kernels.register_in_fla()."""

import torch
from cce_kernels.module import FusedLinearCrossEntropyLoss
from fla.models import GLAConfig, GLAForCausalLM


def main(device: str = "cuda", steps: int = 5) -> list[float]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 1000}
    config = GLAConfig(**sizes, fuse_cross_entropy=False, fuse_linear_cross_entropy=True)
    model = GLAForCausalLM(config).to(device)
    model.criterion = FusedLinearCrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(1000, (2, 80), device=device)

    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(main() if torch.cuda.is_available() else "FLA's layers need a GPU")
