"""`predicted_tokens`: the argmax of all logits, from blocks of rows."""

from typing import Any

import pytest
import torch
from cases import BF16, FP32, LargestTensor
from cce_kernels import predicted_tokens
from torch import Tensor


def tensors(e_dtype: torch.dtype, c_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    e, c, bias = (torch.randn(size, generator=g) for size in ((3, 11, 24), (70, 24), (70,)))
    return e.to(e_dtype), c.to(c_dtype), bias


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
    with LargestTensor() as largest:
        predicted_tokens(e, c, bias=bias if biased else None, workspace_mib=4096 / 2**20)
    assert 70 * 2 <= largest.nbytes <= 4096


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
