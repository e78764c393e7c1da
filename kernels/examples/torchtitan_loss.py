"""torchtitan 0.3: a loss in its configuration's form, `config.loss = CceLoss.Config()`.

A subclass of ChunkedLossWrapper gets the head from torchtitan's trainer, and hidden states from the model. Under tensor
parallelism both are DTensors, and the vocabulary stays sharded.
"""

from dataclasses import dataclass

import torch
from cce_kernels import linear_cross_entropy
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper


class CceLoss(ChunkedLossWrapper):
    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        workspace_mib: float | None = None

    def __init__(self, config: Config, *, compile_config=None) -> None:
        self.workspace_mib, self.lm_head = config.workspace_mib, None

    def __call__(self, pred: torch.Tensor, labels: torch.Tensor, global_valid_tokens=None, **_):
        if hasattr(self.lm_head, "unshard"):  # FSDP2 then reduces the weight's gradient as torchtitan has told it to
            self.lm_head.unshard()
        loss = linear_cross_entropy(
            pred, self.lm_head.weight, labels, bias=self.lm_head.bias, reduction="sum",
            ignore_index=IGNORE_INDEX, workspace_mib=self.workspace_mib,
        )  # fmt: skip
        return loss if global_valid_tokens is None else loss / global_valid_tokens, {}
