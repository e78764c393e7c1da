"""Arguments of a wrong type or layout raise one clear line that starts with the argument's name."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from cce_kernels import linear_cross_entropy, linear_log_probs, patch
from cce_kernels.arguments import FLAGS
from cce_kernels.options import ACCUMULATE, Call, Options, Place
from hypothesis import given
from hypothesis import strategies as st
from patch_models import build_hf
from torch import nn

E, C, TARGETS = torch.randn(6, 8), torch.randn(11, 8), torch.arange(6)

WRONG_TYPES = [
    *((name, value, "must be a tensor") for name in ("e", "c", "targets") for value in ([1.0], None, 3, E.numpy())),
    *((name, nn.Linear(8, 11), "must be a tensor, got Linear; give its weight") for name in ("e", "c", "bias")),
    *((name, [1.0], "must be a tensor, got list") for name in ("bias", "main_grad_c", "token_weights")),
    *((name, value, "must be an integer") for name in ("ignore_index", "shift") for value in (None, 2.0, "1", True)),
    *(
        (name, value, "must be a number or None, got")
        for name in ("softcap", "filter_eps", "filter_mass", "workspace_mib")
        for value in ("30", [30.0], 30j, True, {}, nn.Tanh())
    ),
    *(
        (name, value, "must be a number, got")
        for name in ("logit_scale", "label_smoothing", "z_loss")
        for value in ("1", [1.0], None, False)
    ),
    *(
        (name, value, "must be True or False")
        for name in (*FLAGS, "return_lse", "return_metrics", "return_stats")
        for value in (None, 1, 0.5, "yes")
    ),
]


@pytest.mark.parametrize(
    ("name", "value", "message"), WRONG_TYPES, ids=lambda x: "array" if isinstance(x, np.ndarray) else str(x)[:20]
)
def test_a_wrong_type(name, value, message):
    with pytest.raises(TypeError, match=f"^{name}: {message}") as error:
        linear_cross_entropy(**{"e": E, "c": C, "targets": TARGETS, name: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("option", ["preset", "reduction", "accumulate"])
@pytest.mark.parametrize("value", [["cce_kahan"], 3, {}, nn.Tanh()])
def test_a_name_that_is_no_text(option, value):
    with pytest.raises(ValueError, match=f"^{option}: must be one of"):
        linear_cross_entropy(E, C, TARGETS, **{option: value})


@pytest.mark.parametrize("value", [2**63, -(2**70)])
def test_an_ignore_index_beyond_64_bits(value):
    with pytest.raises(ValueError, match=r"^ignore_index: must fit 64 bits, got"):
        linear_cross_entropy(E, C, TARGETS, ignore_index=value)


def test_entropies_are_asked_for_with_true_or_false():
    with pytest.raises(TypeError, match=r"^return_entropy: must be True or False, got 'no'"):
        linear_log_probs(E, C, TARGETS, return_entropy="no")


@pytest.mark.filterwarnings("ignore")  # torch's own, on sparse and nested tensors
@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_mkldnn])
@pytest.mark.parametrize("name", ["e", "c"])
def test_a_layout_that_is_not_dense(name, make):
    arguments = {"e": E, "c": C, "targets": TARGETS}
    with pytest.raises(ValueError, match=f"^{name}: must be a dense tensor, got one of layout"):
        linear_cross_entropy(**{**arguments, name: make(arguments[name])})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout):
    with pytest.raises(ValueError, match=r"^e: is a nested tensor"):
        linear_cross_entropy(torch.nested.nested_tensor([E, E], layout=layout), C, TARGETS)


class Quantised(torch.Tensor):
    """As torchao's Int8Tensor."""

    def __tensor_flatten__(self):
        return [], None

    def dequantize(self):
        return self.as_subclass(torch.Tensor)


QUANTISED = {
    "torchao": (C.as_subclass(Quantised), r"c: is a Quantised, a tensor subclass; give its dequantize\(\)$"),
    "int8": (C.to(torch.int8), "c: must be bfloat16, float16 or float32, got torch.int8; dequantize it$"),
    "fp8": (C.to(torch.float8_e4m3fn), "c: must be .*, got torch.float8_e4m3fn; dequantize it$"),
}


@pytest.mark.parametrize(("head", "message"), QUANTISED.values(), ids=QUANTISED)
def test_a_quantised_head_is_to_be_dequantized(head, message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(E, head, TARGETS)


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
    want = linear_cross_entropy(E, C, TARGETS, softcap=3.0, logit_scale=2.0, ignore_index=2)
    numpy = pytest.importorskip("numpy")
    got = linear_cross_entropy(E, C, TARGETS, softcap=3, logit_scale=numpy.float32(2), ignore_index=numpy.int64(2))
    assert torch.equal(got, want)
    assert torch.equal(
        linear_cross_entropy(E, C, TARGETS, softcap=Fraction(3), logit_scale=Fraction(2), ignore_index=2), want
    )
    assert torch.equal(
        linear_cross_entropy(E, C, TARGETS, softcap=3, logit_scale=2, ignore_index=torch.tensor(2)), want
    )


def test_an_option_of_a_wrong_type_fails_when_patching():
    with pytest.raises(TypeError, match="workspace_mib: must be a number or None, got '100'"):
        patch(build_hf("Llama"), workspace_mib="100")
