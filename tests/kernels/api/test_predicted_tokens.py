"""`predicted_tokens`: the argmax of all logits, from blocks of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cce_kernels import predicted_tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BF16, FP32 = torch.bfloat16, torch.float32


def tensors(e_dtype: torch.dtype, c_dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    e, c, bias = (torch.randn(size, generator=g) for size in ((3, 11, 24), (70, 24), (70,)))
    return e.to(device, e_dtype), c.to(device, c_dtype), bias.to(device)


def same(e: Tensor, c: Tensor, bias: Tensor | None, **options: Any) -> None:
    found = predicted_tokens(e, c, bias=bias, **options)
    logits = options.get("logit_scale", 1) * (e.double() @ c.double().T) + (0 if bias is None else bias)
    top = logits.gather(-1, found[..., None]).squeeze(-1)
    assert found.dtype == torch.long
    assert found.shape == e.shape[:-1]
    rounding = 2e-2 if BF16 in (e.dtype, c.dtype) else 1e-5
    torch.testing.assert_close(top, logits.max(dim=-1).values, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("workspace_mib", [64, 2e-3, 1e-6])
@pytest.mark.parametrize("scale", [1.0, -2.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (BF16, FP32)], ids=str)
def test_the_tokens_have_the_largest_logits(dtypes, biased, scale, workspace_mib):
    e, c, bias = tensors(*dtypes)
    same(e, c, bias if biased else None, logit_scale=scale, workspace_mib=workspace_mib)


@pytest.mark.parametrize("biased", [False, True])
def test_no_tensor_is_larger_than_the_workspace(biased):
    e, c, bias = tensors(BF16, BF16)

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.dim() == 2 and result.shape[-1] == 70:
                self.most = max(self.most, result.nbytes)
            return result

    with Largest() as watched:
        predicted_tokens(e, c, bias=bias if biased else None, workspace_mib=4096 / 2**20)
    assert 70 * 2 <= watched.most <= 4096


def test_inputs_of_any_kind():
    e, c, _ = tensors(FP32, FP32)
    e.requires_grad_()
    assert not predicted_tokens(e, c).requires_grad
    assert predicted_tokens(e[:0], c).shape == (0, 11)
    assert predicted_tokens(e[0, 0], c).shape == ()
    same(e.transpose(0, 1).detach(), c, None)
    with torch.autocast("cpu", BF16):
        assert predicted_tokens(e, c).shape == (3, 11)
    compiled = torch.compile(predicted_tokens, backend="eager", fullgraph=True)
    assert torch.equal(compiled(e.detach(), c), predicted_tokens(e, c))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e, c: predicted_tokens([1], c), "e: must be a tensor"),
        (lambda e, c: predicted_tokens(e, c.T), r"c: must be \(V, D\)"),
        (lambda e, c: predicted_tokens(e, c, bias=c[:3, 0]), r"bias: must be \(V,\)"),
        (lambda e, c: predicted_tokens(e.long(), c), "e: must be bfloat16"),
        (lambda e, c: predicted_tokens(e, c, workspace_mib=0), "workspace_mib: must be positive"),
        (lambda e, c: predicted_tokens(e, c, logit_scale=float("nan")), "logit_scale: must be finite"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    e, c, _ = tensors(FP32, FP32)
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call(e, c)
