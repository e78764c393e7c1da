"""Arguments of a wrong type, layout or value raise one clear line that starts with the argument's name."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from cce_kernels import linear_cross_entropy, linear_log_probs, predicted_tokens, reference_linear_cross_entropy
from cce_kernels.arguments import FLAGS
from cce_kernels.options import ACCUMULATE, Call, Options, Place
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

E, C, T = torch.randn(6, 8), torch.randn(11, 8), torch.arange(6)

WRONG_TYPES = [
    *((name, value, "must be a tensor") for name in ("e", "c", "targets") for value in (None, E.numpy())),
    *((name, nn.Linear(8, 11), "must be a tensor, got Linear; give its weight") for name in ("e", "c", "bias")),
    *((name, [1.0], "must be a tensor, got list") for name in ("bias", "main_grad_c", "token_weights")),
    *((name, value, "must be an integer") for name in ("ignore_index", "shift") for value in (2.0, True)),
    *(
        (name, value, "must be a number or None, got")
        for name in ("softcap", "filter_eps", "filter_mass", "workspace_mib")
        for value in ("30", 30j, True, nn.Tanh())
    ),
    *(
        (name, value, "must be a number, got")
        for name in ("logit_scale", "label_smoothing", "z_loss")
        for value in ("1", None, False)
    ),
    *(
        (name, value, "must be True or False")
        for name in (*FLAGS, "return_lse", "return_metrics", "return_stats")
        for value in (None, 1)
    ),
]


@pytest.mark.parametrize(
    ("name", "value", "message"), WRONG_TYPES, ids=lambda x: "array" if isinstance(x, np.ndarray) else str(x)[:20]
)
def test_a_wrong_type(name, value, message):
    with pytest.raises(TypeError, match=f"^{name}: {message}") as error:
        linear_cross_entropy(**{"e": E, "c": C, "targets": T, name: value})
    assert "\n" not in str(error.value)


class Quantised(torch.Tensor):
    """As torchao's Int8Tensor."""

    def __tensor_flatten__(self):
        return [], None

    def dequantize(self):
        return self.as_subclass(torch.Tensor)


REFUSED = {
    "e": {"e": E.double()},
    "c": {"c": C.T},
    "c: must be": {"c": C[0, 0]},
    "c: is a TwoTensor": {"c": TwoTensor(C, C)},
    "targets": {"targets": T[:5]},
    "targets: must be integers": {"targets": T.float()},
    r"targets: 11 lies outside \[0, 11\) and is not ignore_index=-100": {"targets": torch.full((6,), 11)},
    "bias": {"bias": torch.zeros(10)},
    "token_weights: must be bfloat16": {"token_weights": torch.ones(6, dtype=torch.int64)},
    r"token_weights: must be \(6,\) like targets": {"token_weights": torch.ones(5)},
    "token_weights: requires a gradient": {"token_weights": torch.ones(6, requires_grad=True)},
    "token_weights: is on meta": {"token_weights": torch.ones(6, device="meta")},
    r"targets: must be \(6,\) like e without D, got \(6, 2\); several targets a row need target_weights": {
        "targets": T[:, None].expand(6, 2)
    },
    **{
        message: {"targets": T[:, None].expand(6, 2), "target_weights": torch.ones(6, 2), **options}
        for message, options in {
            r"targets: must be \(6,\) and K with target_weights, at least one a row, got \(6,\)": {"targets": T},
            r"target_weights: must be \(6, 2\) like targets, got \(6,\)": {"target_weights": torch.ones(6)},
            "target_weights: requires a gradient": {"target_weights": torch.ones(6, 2, requires_grad=True)},
            "target_weights: is on meta": {"target_weights": torch.ones(6, 2, device="meta")},
            r"target_weights: cannot combine with a filter \(filter_eps\)": {"preset": "cce_filter"},
            "token_weights: cannot combine with target_weights; give": {"token_weights": torch.ones(6)},
            r"targets: 11 lies outside \[0, 11\) and": {"targets": torch.tensor([[0, 11]]).expand(6, 2)},
        }.items()
    },
    "main_grad_c": {"main_grad_c": torch.zeros(11, 8, dtype=torch.bfloat16)},
    "reduction": {"reduction": "average"},
    "shift": {"shift": -1},
    "softcap": {"softcap": 0.0},
    "softcap: must be positive": {"softcap": float("inf")},
    "logit_scale: must be finite": {"logit_scale": float("nan")},
    "logit_scale: must be a number": {"logit_scale": torch.tensor(2.0, requires_grad=True)},
    "label_smoothing": {"label_smoothing": 1.5},
    "label_smoothing: cannot combine with filter_eps": {"label_smoothing": 0.1, "filter_eps": 0.1},
    "z_loss": {"z_loss": -1.0},
    "z_loss: must be finite": {"z_loss": float("nan")},
    "filter_eps": {"filter_eps": 1.0},
    "filter_eps: must lie in": {"filter_eps": 1e-50},  # 0 in fp32
    "filter_unbiased: says how": {"filter_unbiased": True},
    "filter_mass: says how": {"filter_mass": 0.5},
    "filter_if_faster: says how": {"filter_if_faster": True},
    "filter_mass": {"filter_eps": 0.1, "filter_mass": 1.0},
    "accumulate": {"accumulate": "fp64"},
    "workspace_mib": {"workspace_mib": 0},
    "workspace_mib: must be positive and finite": {"workspace_mib": float("inf")},
    "workspace_mib: 0.0001 is too small": {"workspace_mib": 0.0001},
    "preset": {"preset": "cce"},
    "filter_eps: comes from preset": {"preset": "cce_filter", "filter_eps": 0.5},
    "ignore_index: must fit 64 bits, got": {"ignore_index": 2**63},
    **{
        f"{option}: must be one of.*{word}": {option: value}
        for option in ("preset", "reduction", "accumulate")
        for word, value in (("cce_kahan", ["cce_kahan"]), ("3", 3), ("Tanh", nn.Tanh()))
    },
    "e: is a nested tensor": {"e": torch.nested.nested_tensor([E, E], layout=torch.jagged)},
    "e: is a nested tensor;?": {"e": torch.nested.nested_tensor([E, E], layout=torch.strided)},
    r"c: is a Quantised, a tensor subclass; give its dequantize\(\)$": {"c": C.as_subclass(Quantised)},
    "c: must be bfloat16, float16 or float32, got torch.int8; dequantize it$": {"c": C.to(torch.int8)},
    "c: must be .*, got torch.float8_e4m3fn; dequantize it$": {"c": C.to(torch.float8_e4m3fn)},
}


@pytest.mark.filterwarnings("ignore")  # torch's own, on nested tensors
@pytest.mark.parametrize("message", REFUSED)
def test_wrong_values_are_refused_by_name(message):
    with pytest.raises(ValueError, match=f"^{message}"):
        linear_cross_entropy(**{"e": E, "c": C, "targets": T} | REFUSED[message])


READ_ONCE = {"e", "c", "targets", "bias", "main_grad_c", "ignore_index", "reduction", "shift"}


@pytest.mark.parametrize("message", [key for key, wrong in REFUSED.items() if wrong.keys() <= READ_ONCE])
def test_wrong_inputs_are_refused_after_right_ones_have_passed(monkeypatch, message):
    """On a GPU the checks are left out for inputs like those of an earlier call. Targets' values are not checked."""
    from cce_kernels import arguments

    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(arguments, "_PASSED", set())
    right = {"e": E, "c": C, "targets": T, "bias": None, "main_grad_c": None}
    right |= {"ignore_index": -100, "reduction": "mean", "shift": 0}

    def check(**wrong):
        *tensors, ignore_index, reduction, shift = (right | wrong).values()
        arguments.check_inputs(tuple(tensors), ignore_index, reduction, shift, 0)

    for _ in range(2):
        check()
    if "lies outside" not in message:
        with pytest.raises(ValueError, match=f"^{message}"):
            check(**REFUSED[message])
    assert len(arguments._PASSED) == 1


def _batched_gradients(e, c, targets):
    rows = linear_cross_entropy(e.requires_grad_(), c, targets, reduction="none")
    return torch.autograd.grad(rows, e, torch.eye(len(rows)), is_grads_batched=True)


TRANSFORMS = {
    "vmap": lambda e, c, targets: torch.func.vmap(lambda x: linear_cross_entropy(x, c, targets))(torch.stack([e, e])),
    "vmap of tokens": lambda e, c, _: torch.func.vmap(lambda x: predicted_tokens(x, c))(torch.stack([e, e])),
    "grad": lambda e, c, targets: torch.func.grad(lambda x: linear_cross_entropy(x, c, targets))(e),
    "jvp": lambda e, c, targets: torch.func.jvp(lambda x: linear_log_probs(x, c, targets), (e,), (e,)),
    "batched gradients": _batched_gradients,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_torch_func_are_refused(transform):
    with pytest.raises(RuntimeError, match=r"^cce_kernels: torch.func transforms .* are not supported; give all rows"):
        TRANSFORMS[transform](E.clone(), C, T)


# What other functions refuse, beyond the checks that they share
OTHERS = [
    *((linear_log_probs, TypeError, "temperature", x) for x in ("1", None, True, torch.ones(()))),
    *((linear_log_probs, ValueError, "temperature", x) for x in (0.0, -1, float("inf"), float("nan"))),
    (linear_log_probs, TypeError, "return_entropy", "no"),
    (linear_log_probs, ValueError, "softcap", -1.0),
    (linear_log_probs, ValueError, "targets", torch.full((6,), 11)),
    (reference_linear_cross_entropy, ValueError, "reduction", "average"),  # it took the mean
    (reference_linear_cross_entropy, ValueError, "shift", 7),  # it took other rows
    (reference_linear_cross_entropy, TypeError, "shift", 1.0),
    (predicted_tokens, TypeError, "e", [1]),
    (predicted_tokens, ValueError, "e", E.long()),
    (predicted_tokens, ValueError, "c", C.T),
    (predicted_tokens, ValueError, "bias", C[:3, 0]),
    (predicted_tokens, ValueError, "workspace_mib", 0),
    (predicted_tokens, ValueError, "logit_scale", float("nan")),
]


@pytest.mark.parametrize(("function", "kind", "name", "value"), OTHERS)
def test_other_functions_refuse_wrong_arguments_by_name(function, kind, name, value):
    targets = {} if function is predicted_tokens else {"targets": T}
    with pytest.raises(kind, match=f"^{name}: "):
        function(**{"e": E, "c": C} | targets | {name: value})


@pytest.mark.filterwarnings("ignore")  # torch's own, on sparse and nested tensors
@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_mkldnn])
@pytest.mark.parametrize("name", ["e", "c"])
def test_a_layout_that_is_not_dense(name, make):
    arguments = {"e": E, "c": C, "targets": T}
    with pytest.raises(ValueError, match=f"^{name}: must be a dense tensor, got one of layout"):
        linear_cross_entropy(**{**arguments, name: make(arguments[name])})


@given(
    st.builds(
        Options,
        softcap=st.none() | st.floats(1e-3, 1e6),
        logit_scale=st.floats(-1e3, 1e3),
        z_loss=st.floats(0, 1),
        filter_eps=st.none() | st.floats(1e-9, 0.9),
        filter_e=st.booleans(),
        accumulate=st.sampled_from(ACCUMULATE),
        workspace_mib=st.none() | st.integers(1, 2**40),
    ),
    st.integers(-(2**63), 2**63 - 1),
    st.none() | st.builds(Place, st.text(), st.just((3, 4)), st.booleans(), st.booleans()),
)
def test_a_call_crosses_the_operators_as_text_without_a_loss(options, ignore_index, place):
    call = Call(options, torch.bfloat16, ignore_index, "none", True, False, True, (True, False, True), place)
    assert Call.of(call.handle()) == call


def test_numbers_of_other_types_are_as_they_were():
    want = linear_cross_entropy(E, C, T, softcap=3.0, logit_scale=2.0, ignore_index=2)
    for softcap, logit_scale, ignore_index in (
        (3, np.float32(2), np.int64(2)), (Fraction(3), Fraction(2), 2), (3, 2, torch.tensor(2))
    ):  # fmt: skip
        options = {"softcap": softcap, "logit_scale": logit_scale, "ignore_index": ignore_index}
        assert torch.equal(linear_cross_entropy(E, C, T, **options), want)
