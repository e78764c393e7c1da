"""Causal attention for FLA's `Attention` layer through torch's scaled_dot_product_attention, on CPU and GPU.

FLA calls the flash_attn package, which few machines have. The two functions below have its signatures. They are used
even where it is installed, so that results do not depend on it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linrnn.core.errors import UnsupportedError
from linrnn.models.fla_import import calling, import_fla


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    """Causal attention of q (B, T, H, D) on k, v (B, S, H, D), S ≥ T. The last query sees the last key.

    Args:
        window_size: (keys before a query's own that it sees, keys after it); −1: all of them.
    """
    if not causal or window_size[1] > 0:
        raise UnsupportedError("attention here is causal", "use FLA's Attention as it is")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    queries, keys, before = q.shape[2], k.shape[2], window_size[0]
    before = before if 0 <= before < keys else keys - 1
    options: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]}
    if queries == keys == before + 1:
        options["is_causal"] = True
    else:
        age = torch.arange(keys - queries, keys, device=q.device)[:, None] - torch.arange(keys, device=q.device)
        options["attn_mask"] = (age >= 0) & (age <= before)
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    **_: Any,
) -> Tensor:
    """As :func:`flash_attn_func` within each document of packed q, k, v (T, H, D), bounded by `cu_seqlens_q`."""
    lengths = cu_seqlens_q.diff().tolist()
    documents = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    outputs = [
        flash_attn_func(*(x[None] for x in document), causal=causal, window_size=window_size)[0]
        for document in documents
    ]
    return torch.cat(outputs)


def with_sdpa(kind: Any) -> Any:
    """FLA's class of a language model, or of a part of it, whose `Attention` layers call the two functions.

    FLA's own class stays as it is.
    """
    return _classes(kind.__module__)[kind.__name__]


@functools.cache
def _classes(module: str) -> dict[str, Any]:
    """What stands for the classes of an FLA module, by name."""
    if module == "fla.layers.attn":
        of_flash_attn = {
            "flash_attn_func": flash_attn_func,
            "flash_attn_varlen_func": torch.compiler.disable(flash_attn_varlen_func),  # imports torch's compiler
        }
        return {"Attention": _subclass(import_fla(module).Attention, of_flash_attn, "__init__", "forward")}
    names = dict(_classes("fla.layers.attn"))
    names["get_attention"] = calling(import_fla("fla.models.modeling_utils").get_attention, names)
    for name, kind in vars(import_fla(module)).items():  # blocks come before the models that hold them
        if isinstance(kind, type) and kind.__module__ == module and "__init__" in vars(kind):
            names[name] = _subclass(kind, names, "__init__")
    return names


def _subclass(kind: Any, names: dict[str, Callable[..., Any]], *methods: str) -> Any:
    """A class of FLA's whose `methods` find `names` instead of what has these names in FLA's module."""
    members = {method: calling(vars(kind)[method], names) for method in methods}
    return type(kind.__name__, (kind,), {**members, "__module__": kind.__module__, "__qualname__": kind.__qualname__})
