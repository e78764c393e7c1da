"""Several tokens ahead from one hidden state and one head: the next token counts most. One call, three products."""

import torch
import torch.nn.functional as F
from cce_kernels import linear_cross_entropy
from torch import nn


def main(device: str = "cuda" if torch.cuda.is_available() else "cpu", steps: int = 5, ahead: int = 3) -> list[float]:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64), nn.GELU()).to(device)
    head = nn.Linear(64, 1000, bias=False, device=device)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-2)
    ids = torch.randint(1000, (4, 32), device=device)
    targets = F.pad(ids, (0, ahead), value=-100)[:, 1:].unfold(1, ahead, 1)  # (4, 32, ahead): the tokens after each
    weights = torch.tensor([0.6, 0.3, 0.1], device=device)[:ahead].expand(targets.shape)

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
