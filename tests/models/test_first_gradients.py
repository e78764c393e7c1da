"""Why the norm of GLA's first gradients scatters from run to run: docs/notes/gla_first_gradients.md tells it."""

import torch
from torch.nn import functional as F

from linrnn.config import load_config
from linrnn.models import build_model
from linrnn.models.architecture import resolve

V, N_SEQUENCES, LENGTH = 32000, 8, 256


def test_the_first_token_of_a_sequence_dominates_the_gradient_of_gla_s_gated_norm():
    """The first token's output is (q k) v. Where q k is almost 0, the norm that follows divides by almost 0."""
    config = load_config(["model=gla", "size=mve", "data=markov", f"data.vocab_size={V}", "device=cpu"])
    model = build_model(resolve(config.model, config.size, V), device="cpu", seed=0)
    gradients, outputs = [], []

    def watch(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], _: torch.Tensor) -> None:
        outputs.append(inputs[0].detach())
        inputs[0].register_hook(lambda gradient: gradients.append(gradient.detach()))

    for name, module in model.named_modules():
        if name.endswith("attn.g_norm_swish_gate"):
            module.register_forward_hook(watch)
    tokens = torch.randint(0, V, (N_SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    hidden = model(tokens[:, :-1])
    logits = hidden.flatten(0, 1) @ model.hf.lm_head.weight.T
    F.cross_entropy(logits, tokens[:, 1:].flatten()).backward()

    shares, smallest = [], []
    for gradient, output in zip(gradients, reversed(outputs), strict=True):
        squares = gradient.reshape(N_SEQUENCES, LENGTH, -1).square().sum(-1)
        shares.append(round(100 * float(squares[:, 0].sum() / squares.sum())))
        rms = output.reshape(N_SEQUENCES, LENGTH, -1, output.shape[-1]).square().mean(-1).sqrt()
        smallest.append(float(rms[:, 0].min() / rms.median()))
    assert len(shares) == 2
    assert max(smallest) < 0.02, "a head whose first output is almost 0"
    assert min(shares) > 50, "percent, of 256 positions"
