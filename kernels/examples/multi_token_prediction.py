"""Several tokens ahead from one hidden state: a small layer for each distance, one head for all."""

import torch
from cce_kernels import linear_cross_entropy
from torch import nn


def main(device: str = "cuda" if torch.cuda.is_available() else "cpu", steps: int = 5, ahead: int = 3) -> list[float]:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64), nn.GELU()).to(device)
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(ahead)).to(device)
    head = nn.Linear(64, 1000, bias=False, device=device)
    optimizer = torch.optim.AdamW([*body.parameters(), *layers.parameters(), *head.parameters()], lr=1e-2)
    ids = torch.randint(1000, (4, 32), device=device)

    losses = []
    for _ in range(steps):
        hidden = body(ids)
        several = [linear_cross_entropy(layer(hidden), head.weight, ids, shift=k) for k, layer in enumerate(layers, 1)]
        loss = torch.stack(several).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(main())
