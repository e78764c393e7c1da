"""`model.shared_projection_rank`: queries, keys and values from one projection of low rank R.

    z = x W_down,    q = z W_q,    k = z W_k,    v = z W_v        x (…, D), z (…, R)

All heads share W_down. It takes 2DR FLOPs a token; q, k and v take 2R for each of their columns instead of 2D. FLA's
layer stays as it is: it calls `q_proj`, `k_proj` and `v_proj`, and each of them goes through the same z.

Source: the study's proposal names shared projections (MFA, its number 063) as the next step once the output layer is no
bottleneck. It gives no formula. Multi-matrix factorization attention (arXiv:2412.19255) also lets all heads share down
projections, and goes further: its heads share one key and one value. Here every head has its own.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any, cast

from torch import Tensor, nn

from linrnn.models.fla_any import mixer_modules

FULL = ("q_proj", "k_proj", "v_proj")  # FLA's names


class SharedProjection(nn.Module):
    """The four matrices. Each is a linear layer without a bias."""

    def __init__(self, width: int, rank: int, queries: int, keys: int, values: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.q = nn.Linear(rank, queries, bias=False)
        self.k = nn.Linear(rank, keys, bias=False)
        self.v = nn.Linear(rank, values, bias=False)


def share_projections(block: nn.Module, rank: int) -> None:
    """Replace the projections of queries, keys and values in a layer of FLA's model, in place.

    FLA's own rule draws the new weights: normal with standard deviation 0.02. Names in the state dict are
    `….attn.qkv.down.weight` and `….attn.qkv.{q,k,v}.weight`.
    """
    for mixer in mixer_modules(block):
        full = [cast(nn.Linear, mixer.get_submodule(name)) for name in FULL]
        for name in FULL:
            delattr(mixer, name)
        outputs = [layer.out_features for layer in full]
        mixer.qkv = SharedProjection(full[0].in_features, rank, *outputs)
        mixer.forward = bound(type(mixer).forward, mixer)  # type: ignore[method-assign]


def bound(forward: Callable[..., Any], mixer: nn.Module) -> Callable[..., Any]:
    """FLA's forward as a method of this mixer. Where projections share z, it calls those."""

    def sharing(mixer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(_InOneCall(mixer), *args, **kwargs)

    return MethodType(sharing if hasattr(mixer, "qkv") else forward, mixer)


class _InOneCall:
    """A mixer as FLA's forward sees it in one call: its own attributes, and projections that compute z once.

    z belongs to the call, and nothing has to be cleared: neither after an error, nor when activation checkpointing ends
    a call early or makes it again.
    """

    def __init__(self, mixer: nn.Module) -> None:
        self._mixer = mixer
        self._shared = cast(SharedProjection, mixer.qkv)
        self._x: Tensor | None = None
        self._z: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mixer, name)

    def q_proj(self, x: Tensor) -> Tensor:
        """Queries of x (…, D)."""
        return self._shared.q(self._down(x))

    def k_proj(self, x: Tensor) -> Tensor:
        """Keys of x (…, D)."""
        return self._shared.k(self._down(x))

    def v_proj(self, x: Tensor) -> Tensor:
        """Values of x (…, D)."""
        return self._shared.v(self._down(x))

    def _down(self, x: Tensor) -> Tensor:
        """z (…, R). It is computed again only for another x."""
        if self._z is None or self._x is not x:
            self._x, self._z = x, self._shared.down(x)
        return self._z
