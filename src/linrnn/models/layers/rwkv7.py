"""RWKV7's initial weights: FLA 0.6.0's values bit for bit, each vector and matrix computed once.

FLA fills vectors entry by entry, and makes the orthogonal matrix of a low-rank layer six times. On tensors without
memory, where every model begins, each operation takes a fraction of a millisecond.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

FLAS_OWN: dict[type, Callable[..., None]] = {}  # of each layer whose initial weights are replaced


def compute_once(modeling: ModuleType) -> None:
    """Replace the initial weights in FLA's module of RWKV7. Calling it again changes nothing."""
    for layer, initialize in (
        (sys.modules[modeling.RWKV7Attention.__module__].LoRA, _initialize_low_rank),
        (modeling.RWKV7Attention, _initialize_attention),
        (modeling.RWKV7FeedForward, _initialize_feed_forward),
    ):
        if layer not in FLAS_OWN:
            FLAS_OWN[layer] = layer._initialize_weights
            layer._initialize_weights = initialize


@torch.no_grad()
def _initialize_attention(self: Any, module: Any) -> None:
    if getattr(module, "_is_hf_initialized", False):
        return
    if module is self and self.layer_idx is not None:
        depth = self.layer_idx / (self.num_hidden_layers - 1)  # 0 to 1
        left = 1.0 - self.layer_idx / self.num_hidden_layers  # 1 to nearly 0
        width, middle, device = self.hidden_size, (self.head_dim - 1) / 2, self.x_r.device
        # Python's numbers, each rounded once: torch's powers may differ in the last bit.
        linear = torch.tensor([n / (width - 1) - 0.5 for n in range(width)], device=device)
        decay = torch.tensor([-6 + 6 * (n / (width - 1)) ** (1 + 1 * depth**0.3) for n in range(width)], device=device)
        zigzag = torch.tensor([((n % self.head_dim) - middle) / middle for n in range(width)], device=device)
        zigzag = zigzag * zigzag.abs()
        ramp = _ramp(width, device)
        for names, exponent in ((("x_r", "x_g"), 0.2), (("x_w", "x_a"), 0.9), (("x_k", "x_v"), 0.7)):
            for parameter in (getattr(self, name) for name in names):
                parameter.data = (1.0 - torch.pow(ramp, exponent * left)).to(parameter.dtype)
        nn.init.constant_(self.k_a, 1.02)
        nn.init.constant_(self.r_k, -0.04)
        self.k_k.data.copy_((0.71 - linear * 0.1).to(self.k_k.dtype))
        self.w_lora.set_bias_value(decay + 0.5 + zigzag * 2.5)
        self.a_lora.set_bias_value(-0.19 + zigzag * 0.3 + linear * 0.4)
        if self.layer_idx != 0:
            self.v_lora._initialize_weights(self.v_lora)
            self.v_lora.set_bias_value(0.73 - linear * 0.4)
        self.g_norm.weight.data[:] = ((self.layer_idx + 1) / self.num_hidden_layers) ** 0.7
        self._orthogonal_init(self.r_proj.weight)
        self._orthogonal_init(self.k_proj.weight, gain=0.1)
        self._orthogonal_init(self.v_proj.weight)
        self.o_proj.weight.data.zero_()
    module._is_hf_initialized = True


@torch.no_grad()
def _initialize_low_rank(self: Any, module: Any) -> None:
    """FLA calls it for each part of the layer, and last for the layer itself. Each call overwrites all earlier ones.

    Only the random numbers of the earlier calls are drawn.
    """
    if getattr(module, "_is_hf_initialized", False):
        return
    if module is self:
        FLAS_OWN[type(self)](self, module)
        return
    weight = self.lora[2].weight
    weight.new_empty(weight.shape, dtype=torch.float32).normal_()
    module._is_hf_initialized = True


@torch.no_grad()
def _initialize_feed_forward(self: Any, module: Any) -> None:
    if module is not self:
        return
    left = 1.0 - self.layer_idx / self.num_hidden_layers
    self.x_k.data = 1.0 - torch.pow(_ramp(self.hidden_size, None), left**4).squeeze()
    key = self.key.weight
    key.data = nn.init.orthogonal_(key.data.to(torch.float32)).to(key.dtype)
    self.value.weight.data.zero_()


def _ramp(width: int, device: torch.device | None) -> Tensor:
    """n / width for each entry n, (1, 1, width)."""
    return torch.tensor([n / width for n in range(width)], device=device).view(1, 1, width)
