"""The layers of the Hub kernel. build.py copies this file into the repository; `kernelize` takes layers from it."""

from __future__ import annotations

from torch import Tensor, nn

from .huggingface.deferred import causal_lm_loss


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
        return causal_lm_loss(hidden_states, weight, labels, shift_labels, ignore_index, num_items_in_batch)
