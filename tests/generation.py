"""What the tests of two kinds of models ask of generation: a cache must change no logit."""

from typing import Any

import torch
from torch import Tensor

PROMPT = 12  # tokens that are read at once; all others come one by one


def check_cache(hf: Any, ids: Tensor) -> None:
    """Logits of a model of transformers for ids (B, T), token by token with its cache, equal those of a full pass."""
    with torch.no_grad():
        expected = hf(ids, use_cache=False).logits
        step = hf(ids[:, :PROMPT], use_cache=True)
        logits = [step.logits]
        for token in ids[:, PROMPT:].split(1, dim=1):
            step = hf(token, use_cache=True, past_key_values=step.past_key_values)
            logits.append(step.logits)
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-3, atol=1e-4)
