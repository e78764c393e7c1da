"""Distillation: a student learns a teacher's likeliest tokens. The teacher's other logits may be thrown away."""

import torch
from cce_kernels import linear_cross_entropy
from torch import nn


def main(device: str = "cuda" if torch.cuda.is_available() else "cpu", steps: int = 5, k: int = 8) -> list[float]:
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 1000)).to(device)
    body = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64), nn.GELU()).to(device)
    head = nn.Linear(64, 1000, bias=False, device=device)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-2)
    ids = torch.randint(1000, (4, 32), device=device)
    with torch.no_grad():
        weights, targets = (teacher(ids) * 10).softmax(dim=-1).topk(k)  # both (4, 32, k), the likeliest first
        weights /= weights.sum(dim=-1, keepdim=True)

    losses = []
    for _ in range(steps):
        loss = linear_cross_entropy(body(ids), head.weight, targets, target_weights=weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(main())
