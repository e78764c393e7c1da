"""The layers of the Hub kernel. build.py copies this file into the repository; `kernelize` takes layers from it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .api import linear_cross_entropy


class ForCausalLMLoss(nn.Module):
    """transformers' `ForCausalLMLoss` of hidden states and the head's weight, in place of logits."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """The mean over the targets that are not ignored, or the sum divided by num_items_in_batch; fp32.

        Args:
            hidden_states: (B, T, D). weight: (V, D). labels: (B, T), shifted by one here.
            shift_labels: (B, T), labels that are shifted already, used in place of labels; or None.
        """
        shift, targets = (1, labels) if shift_labels is None else (0, shift_labels)
        loss = linear_cross_entropy(
            hidden_states, weight, targets, shift=shift, ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )  # fmt: skip
        if num_items_in_batch is None:  # without any target torch's mean is NaN, linear_cross_entropy's 0
            return torch.where((targets[..., shift:] != ignore_index).any(), loss, torch.nan)
        return loss / num_items_in_batch
