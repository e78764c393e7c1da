"""A loop of your own: the module takes hidden states and the head's weight instead of logits."""

import torch
from cce_kernels import LinearCrossEntropyLoss
from torch import nn


def main(device: str = "cuda" if torch.cuda.is_available() else "cpu", steps: int = 5) -> list[float]:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64), nn.GELU()).to(device)
    head = nn.Linear(64, 1000, bias=False, device=device)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-2)
    criterion = LinearCrossEntropyLoss(shift=1)  # the hidden state at t predicts the token at t + 1
    ids = torch.randint(1000, (4, 32), device=device)

    losses = []
    for _ in range(steps):
        loss = criterion(body(ids), head.weight, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(main())
