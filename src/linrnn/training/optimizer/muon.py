"""Muon for the layers' matrices and AdamW for all other parameters, as one optimizer."""

from typing import Any

import torch


class MuonAndAdamW(torch.optim.Optimizer):
    """Two optimizers with one state, one list of groups and one `step`: Muon's groups first, then AdamW's.

    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) keeps a running mean of a matrix's gradients. It makes
    this mean nearly orthogonal by Newton-Schulz iterations in bf16, and takes the result as the update.

    Args:
        muon: for the matrices. Each must be whole: Newton-Schulz multiplies a matrix by itself.
        adamw: for all other parameters; None if there are no others.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW | None) -> None:
        self._parts: list[torch.optim.Optimizer] = [muon, adamw] if adamw else [muon]
        self._lengths = [len(part.param_groups) for part in self._parts]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("MuonAndAdamW takes no closure")
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As for every optimizer of torch."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Give both optimizers this one's state and their own part of its groups."""
        first = 0
        for part, length in zip(self._parts, self._lengths, strict=True):
            part.state = self.state
            part.param_groups = self.param_groups[first : first + length]
            first += length
