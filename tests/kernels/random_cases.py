"""Any shape, dtype, stride and combination of options, for hypothesis."""

from cases import BF16, FP16, FP32, Case
from hypothesis import strategies as st

options = st.fixed_dictionaries(
    {},
    optional={
        "softcap": st.sampled_from([5.0, 30.0]),
        "logit_scale": st.sampled_from([0.1, 2.0]),
        "label_smoothing": st.sampled_from([0.1, 1.0]),
        "z_loss": st.just(1e-2),
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "accumulate": st.sampled_from(["kahan", "fp32"]),
        "workspace_mib": st.sampled_from([0.5, 4]),
    },
)
random_cases = st.builds(
    Case,
    name=st.just("random"),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    dim=st.integers(1, 70),
    vocab=st.integers(1, 700),
    dtype=st.sampled_from([FP32, BF16, FP16]),
    bias=st.booleans(),
    ignored=st.sampled_from([0, 0.5, 1]),
    peak=st.sampled_from([0.0, 5.0]),
    strided=st.booleans(),
    weights=st.booleans(),
    options=options,
)
