"""The CPU versions of FLA's functions against recurrences in fp64 and FLA's own naive references."""

import importlib
import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linrnn.models import cpu_ops
from linrnn.models.cpu_ops import layers, mixers

HEADS, KEYS, VALUES = 2, 8, 12


def gla_step_by_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> Tensor:
    """S ← diag(exp g) S + k vᵀ; o = scale Sᵀ q, one token at a time."""
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=v.dtype)
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1) + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * scale, state))
    return torch.stack(outputs, 1)


def delta_rule_step_by_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float) -> Tensor:
    """S ← diag(exp g) S; S ← S + β k (v − Sᵀ k)ᵀ; o = scale Sᵀ q, one token at a time."""
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=v.dtype)
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1)
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t] * beta[:, t].unsqueeze(-1), error)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * scale, state))
    return torch.stack(outputs, 1)


def inputs(rule: str, n_tokens: int, decay: float, batch: int = 2) -> list[Tensor]:
    """q, k, v, g and (for the delta rules) beta, fp64; `decay` scales the log-decays."""
    generator = torch.Generator().manual_seed(n_tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, n_tokens, HEADS, *shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(KEYS), F.normalize(normal(KEYS), dim=-1), normal(VALUES)
    g = -decay * normal(1 if rule == "gated_deltanet" else KEYS).exp()
    return [q, k, v, g] if rule == "gla" else [q, k, v, g, torch.sigmoid(normal())]


CHUNKED = {"gla": mixers.chunk_gla, "gated_deltanet": mixers.gated_delta_rule, "kda": mixers.gated_delta_rule}
STEP_BY_STEP = {"gla": gla_step_by_step, "gated_deltanet": delta_rule_step_by_step, "kda": delta_rule_step_by_step}


def output_and_gradients(function, tensors: list[Tensor], dtype: torch.dtype, **options) -> list[Tensor]:
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    output = function(*leaves, scale=0.3, **options)
    output = output[0] if isinstance(output, tuple) else output
    weights = torch.linspace(-1, 1, output.numel(), dtype=dtype).view_as(output)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


def relative_error(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth).norm() / truth.norm().clamp_min(1e-30))


@pytest.mark.parametrize("rule", CHUNKED)
@pytest.mark.parametrize(("n_tokens", "decay"), [(1, 0.1), (64, 0.1), (100, 1.0), (96, 40.0), (70, 1e-6)])
def test_chunked_form_equals_the_recurrence_forward_and_backward(rule, n_tokens, decay):
    """fp32 errors: within four times the fp32 recurrence's, plus the rounding of the summed log-decay."""
    tensors = inputs(rule, n_tokens, decay)
    truth = output_and_gradients(STEP_BY_STEP[rule], tensors, torch.float64)
    baseline = output_and_gradients(STEP_BY_STEP[rule], tensors, torch.float32)
    ours = output_and_gradients(CHUNKED[rule], tensors, torch.float32)
    exact = output_and_gradients(CHUNKED[rule], tensors, torch.float64)
    largest_sum = float(max(x.abs().sum(1).max() for x in tensors[3].detach().split(mixers.CHUNK_SIZE, 1)))
    rounding = torch.finfo(torch.float32).eps * max(largest_sum, 8)
    for x, x64, base, true in zip(ours, exact, baseline, truth, strict=True):
        assert x.isfinite().all()
        assert relative_error(x64, true) < 1e-12
        assert relative_error(x, true) < 4 * relative_error(base, true) + rounding


@pytest.mark.parametrize("rule", CHUNKED)
def test_chunk_size_changes_no_result(rule):
    tensors = inputs(rule, 100, 0.5)
    results = [output_and_gradients(CHUNKED[rule], tensors, torch.float64, chunk_size=size) for size in (16, 32, 128)]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rule", CHUNKED)
def test_packed_documents_equal_separate_ones_forward_and_backward(rule):
    bounds = [0, 1, 40, 104, 170, 175]
    tensors = inputs(rule, bounds[-1], 0.3, batch=1)
    packed = output_and_gradients(CHUNKED[rule], tensors, torch.float64, cu_seqlens=torch.tensor(bounds))

    def separately(*leaves: Tensor, scale: float) -> Tensor:
        documents = itertools.pairwise(bounds)
        return torch.cat([CHUNKED[rule](*(x[:, a:b] for x in leaves), scale=scale)[0] for a, b in documents], 1)

    apart = output_and_gradients(separately, tensors, torch.float64)
    torch.testing.assert_close(packed, apart, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rule", CHUNKED)
def test_state_carries_a_sequence_on(rule):
    tensors, options = inputs(rule, 90, 0.3), {"scale": 0.3, "output_final_state": True}
    whole, last = CHUNKED[rule](*tensors, **options)
    first, state = CHUNKED[rule](*(x[:, :33] for x in tensors), **options)
    second, state = CHUNKED[rule](*(x[:, 33:] for x in tensors), initial_state=state, **options)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-10, atol=1e-12)


def test_fla_references_agree():
    """FLA's naive recurrences, called with its layers' arguments (raw gates, normalisation inside)."""
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.kda.gate import naive_kda_gate
    from fla.ops.kda.naive import naive_recurrent_kda

    q, k, v, g = (x.float() for x in inputs("gla", 75, 0.2))
    expected, expected_state = naive_recurrent_gla(q, k, v, g, output_final_state=True)
    output, state = mixers.chunk_gla(q, k, v, g, output_final_state=True)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, expected_state, rtol=1e-4, atol=1e-5)

    raw, beta, A_log = torch.randn(2, 75, HEADS, KEYS), torch.randn(2, 75, HEADS), torch.randn(HEADS)
    normal_q, normal_k = (F.normalize(x, dim=-1) for x in (q, k))
    in_kernel = dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)
    dt_bias = torch.randn(HEADS * KEYS)
    gate = naive_kda_gate(raw, A_log, dt_bias)
    expected, _ = naive_recurrent_kda(normal_q, normal_k, v, gate, torch.sigmoid(beta))
    output, _ = mixers.gated_delta_rule(q, k, v, raw, beta, A_log, dt_bias, **in_kernel)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=2e-5)

    dt_bias = torch.randn(HEADS)
    gate = -A_log.exp() * F.softplus(raw[..., 0] + dt_bias)
    expected, _ = naive_recurrent_gated_delta_rule(normal_q, normal_k, v, torch.sigmoid(beta), gate)
    output, _ = mixers.gated_delta_rule(q, k, v, raw[..., 0], beta, A_log, dt_bias, **in_kernel)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=2e-5)


def test_convolution_equals_torchs_forward_and_backward():
    x, weight = torch.randn(2, 30, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    expected = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), weight[:, None], groups=6)).mT
    output, _ = layers.causal_conv1d(x, weight, activation="silu")
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), leaves) for y in (output, expected)))


def test_convolution_stops_at_document_ends_and_continues_from_a_state():
    x, weight, bias = torch.randn(1, 20, 6), torch.randn(6, 4), torch.randn(6)
    bounds = [0, 2, 3, 12, 20]
    packed, _ = layers.causal_conv1d(x, weight, bias, activation="silu", cu_seqlens=torch.tensor(bounds))
    separate = [
        layers.causal_conv1d(x[:, a:b], weight, bias, activation="silu")[0] for a, b in itertools.pairwise(bounds)
    ]
    torch.testing.assert_close(packed, torch.cat(separate, 1))
    whole, last = layers.causal_conv1d(x, weight, output_final_state=True)
    _, state = layers.causal_conv1d(x[:, :2], weight, output_final_state=True)
    rest, state = layers.causal_conv1d(x[:, 2:19], weight, initial_state=state, output_final_state=True)
    step, state = layers.causal_conv1d_update(x[:, 19:], state, weight=weight)
    torch.testing.assert_close(torch.cat([rest, step], 1), whole[:, 2:])
    torch.testing.assert_close(state, last)


def test_norms_rotation_and_mlp_equal_their_definitions():
    x, gate, residual, weight = (torch.randn(3, 5, 8), torch.randn(3, 5, 8), torch.randn(3, 5, 8), torch.rand(8))

    def normalised(y: Tensor) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    y, total = layers.rms_norm(x, weight, None, residual, eps=1e-6, prenorm=True)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, normalised(x + residual))
    torch.testing.assert_close(layers.rms_norm_gated(x, gate, weight, None), normalised(x) * F.silu(gate))
    torch.testing.assert_close(
        layers.rms_norm_gated(x, gate, weight, None, "sigmoid"), normalised(x) * torch.sigmoid(gate)
    )
    torch.testing.assert_close(layers.swiglu_linear(x, gate, weight[None], None), (F.silu(x) * gate) @ weight[:, None])


def test_rotation_depends_on_distance_alone_and_restarts_in_each_document():
    angles = torch.outer(torch.arange(40.0), 10000 ** -(torch.arange(4) / 4))
    cos, sin = angles.cos(), angles.sin()
    x = torch.randn(1, 12, 2, 8)
    rotated = layers.rotary_embedding(x, cos, sin)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotated[:, :1], x[:, :1])
    shifted = layers.rotary_embedding(x, cos, sin, seqlen_offsets=9)
    dot = torch.einsum("bthd,bshd->bhts", rotated, rotated)
    torch.testing.assert_close(dot, torch.einsum("bthd,bshd->bhts", shifted, shifted))
    packed = layers.rotary_embedding(x, cos, sin, cu_seqlens=torch.tensor([0, 5, 12]))
    torch.testing.assert_close(packed[:, 5:], layers.rotary_embedding(x[:, 5:], cos, sin))


def test_bf16_inputs_are_computed_in_fp32_and_returned_in_bf16():
    q, k, v, g = (x.bfloat16() for x in inputs("gla", 70, 0.2))
    output, _ = mixers.chunk_gla(q, k, v, g)
    expected, _ = mixers.chunk_gla(q.float(), k.float(), v.float(), g.float())
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected.bfloat16())


def test_every_replaced_name_exists_in_fla():
    for (module, name), replacement in cpu_ops.replacements().items():
        assert callable(getattr(importlib.import_module(module), name)), f"{module}.{name}"
        assert callable(replacement)


def test_install_is_idempotent_and_leaves_other_devices_to_fla():
    module = importlib.import_module("fla.modules.mlp")
    cpu_ops.install()
    once = module.swiglu_linear
    cpu_ops.install()
    assert module.swiglu_linear is once
    assert once.__wrapped__ is not layers.swiglu_linear
    calls = []
    routed = cpu_ops._by_device(lambda x: calls.append("cpu"), lambda x: calls.append("elsewhere"))
    routed(torch.zeros(1))
    routed(x=torch.zeros(1, device="meta"))
    assert calls == ["cpu", "elsewhere"]
