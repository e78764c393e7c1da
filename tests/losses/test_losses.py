"""Every loss backend against an fp64 reference, and every rejection with its cause and remedy."""

import importlib
import math
import re
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.other_losses import OTHER_LOSSES
from linrnn.config import load_config
from linrnn.config.schema import SCHEMAS, LossConfig
from linrnn.core.errors import ConfigError, UnsupportedError
from linrnn.losses import LossOutput, build_loss, check_loss, check_objective, loss_names
from linrnn.losses.cce import CceFilterLossConfig, CceKahanLossConfig
from linrnn.losses.cce_apple import CceAppleLossConfig
from linrnn.losses.fla import FlaLossConfig
from linrnn.losses.liger import LigerLossConfig
from linrnn.training.plan import make_plan

CPU = torch.device("cpu")
APPLE_ON_CPU = "cce_apple-torch_compile"
CONFIGS: dict[str, LossConfig] = {
    "standard": LossConfig("standard"),
    "compiled": LossConfig("compiled"),
    "compiled_nudged": LossConfig("compiled_nudged"),
    "liger": LigerLossConfig("liger", accumulate="native"),
    "liger-fp32": LigerLossConfig("liger", accumulate="fp32"),
    "fla": FlaLossConfig("fla", num_chunks=8),
    "fla-on-logits": FlaLossConfig("fla", fuse_linear=False),
    "torch_native": LossConfig("torch_native"),
    "cce_kahan": CceKahanLossConfig("cce_kahan", accumulate="kahan", workspace_mib=None),
    "cce_kahan-fp32": CceKahanLossConfig("cce_kahan", accumulate="fp32", workspace_mib=None),
    "cce_filter": CceFilterLossConfig("cce_filter", "kahan", None, 2.0**-12, False, None, filter_if_faster=False),
    "cce_apple": CceAppleLossConfig("cce_apple", variant="cce"),
    APPLE_ON_CPU: CceAppleLossConfig("cce_apple", variant="torch_compile"),
}
GPU_ONLY = ("liger", "liger-fp32", "fla", "fla-on-logits", "cce_apple")
ON_CPU = tuple(name for name in CONFIGS if name not in GPU_ONLY)
ALL_THREE = {"z_loss": 0.05, "softcap": 3.0, "label_smoothing": 0.1}
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True, scope="module")
def _one_compile_cache():
    """A test finds the graphs of the tests before it; another module's tests find none."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()


@dataclass
class Case:
    """Three tensors of one problem, and the trainer's factor for the summed loss."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    scale: float

    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()


def make_case(dtype: torch.dtype, device: torch.device = CPU, n: int = 45, d: int = 32, v: int = 211) -> Case:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=generator).to(device, dtype)
    weight = (0.3 * torch.randn(v, d, generator=generator)).to(device, dtype)
    labels = torch.randint(0, v, (n,), generator=generator)
    labels[::5] = -100
    return Case(hidden, weight, labels.to(device), scale=1 / (3 * n))


def run(name: str, case: Case, hidden: Tensor | None = None) -> tuple[LossOutput, Tensor, Tensor]:
    """Loss, and the gradients of scale · sum."""
    h, w = case.leaves()
    output = build_loss(CONFIGS[name], device=case.labels.device)(h if hidden is None else hidden, w, case.labels)
    (output.sum_nats * case.scale).backward()
    return output, h.grad if hidden is None else hidden.grad, w.grad


Truth = tuple[Tensor, Tensor, Tensor]


def truth(case: Case, filter_eps: float = 0.0) -> Truth:
    """fp64 loss and gradients of the (already rounded) inputs; softmax below `filter_eps` counts as 0."""
    h, w, kept = case.hidden.double(), case.weight.double(), case.labels >= 0
    logits = h @ w.T
    grad_logits = logits.softmax(dim=-1)
    grad_logits[grad_logits < filter_eps] = 0
    rows = kept.nonzero().squeeze(1)
    grad_logits[rows, case.labels[rows]] = logits.softmax(dim=-1)[rows, case.labels[rows]] - 1
    grad_logits *= case.scale * kept[:, None]
    return F.cross_entropy(logits, case.labels, reduction="sum"), grad_logits @ w, grad_logits.T @ h


def true_objective(case: Case, z_loss: float = 0, softcap: float | None = None, label_smoothing: float = 0) -> Truth:
    """fp64 loss and gradients, written from the formula of each option."""
    h, w = (tensor.double().requires_grad_() for tensor in (case.hidden, case.weight))
    logits, labels = (h @ w.T)[case.labels >= 0], case.labels[case.labels >= 0, None]
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    lse = logits.exp().sum(dim=1).log()
    expected = (1 - label_smoothing) * logits.gather(1, labels)[:, 0] + label_smoothing * logits.mean(dim=1)
    loss = (lse - expected + z_loss * lse**2).sum()
    return loss.detach(), *torch.autograd.grad(loss * case.scale, (h, w))


def error(got: Tensor, true: Tensor) -> float:
    """Relative Frobenius error."""
    return ((got.double() - true).norm() / true.norm()).item()


def available(name: str, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Skip what the installed versions cannot run. Other tests check these rejections."""
    try:
        check_loss(CONFIGS[name], device, dtype)
    except UnsupportedError as refusal:
        pytest.skip(str(refusal))


def assert_matches_truth(name: str, case: Case, gradient_slack: float = 2.0) -> None:
    dtype, config = case.hidden.dtype, CONFIGS[name]
    output, got_h, got_w = run(name, case)
    baseline, base_h, base_w = run("standard", case)
    loss, grad_h, grad_w = truth(case)
    budget_h, budget_w = (gradient_slack * error(base, true) for base, true in ((base_h, grad_h), (base_w, grad_w)))
    if isinstance(config, CceFilterLossConfig):
        loss, grad_h, grad_w = truth(case, config.filter_eps)
    assert got_h.dtype == got_w.dtype == dtype
    assert output.sum_nats.dtype == torch.float32
    assert output.n_tokens == (case.labels >= 0).sum()
    # torch_native takes the scale in the compute dtype, and returns the loss in it. A nudge is one unit.
    units = {"torch_native": 0.5, "compiled_nudged": 1}.get(name)
    rounding = torch.finfo(dtype).eps * units if units else 1e-6
    assert error(got_h, grad_h) <= budget_h + rounding
    assert error(got_w, grad_w) <= budget_w + rounding
    assert error(output.sum_nats, loss) <= 2 * error(baseline.sum_nats, loss) + rounding


# ---------------------------------------------------------------------------------------------------- numbers
def everywhere(*dtypes: torch.dtype) -> pytest.MarkDecorator:
    """Every loss on the CPU in `dtypes`, and with the real kernels in fp32 and bf16, over several blocks and chunks."""
    cases = [pytest.param(name, dtype, "cpu", id=f"{name}-{dtype}") for name in ON_CPU for dtype in dtypes]
    on_gpu = product(CONFIGS, DTYPES)
    cases += [pytest.param(*case, "cuda", marks=pytest.mark.gpu, id=f"{case[0]}-{case[1]}-gpu") for case in on_gpu]
    return pytest.mark.parametrize(("name", "dtype", "device"), cases)


@pytest.fixture
def graphs_run_as_traced(device, monkeypatch):
    """On a CPU graphs run as they are traced. Compiling one takes seconds, and the comparison with fp64 does that."""
    compiled = torch.compile
    if device == "cpu":
        monkeypatch.setattr(torch, "compile", lambda f, options=None, **how: compiled(f, backend="aot_eager", **how))


@pytest.fixture
def case(name, dtype, device):
    available(name, torch.device(device), dtype)
    sizes = {"n": 1021, "d": 256, "v": 3001} if device == "cuda" else {}
    return make_case(dtype, torch.device(device), **sizes)


def assert_same(got: Tensor, expected: Tensor) -> None:
    """On a CPU the same numbers; on a GPU within two units in the last place, as atomic sums differ by roundings."""
    if got.device.type == "cpu":
        torch.testing.assert_close(got, expected)
    else:
        assert error(got, expected.double()) < 2 * torch.finfo(expected.dtype).eps


@everywhere(*DTYPES)
def test_loss_and_gradients_match_fp64_as_well_as_eager_torch_does(name, dtype, device, case):
    # Sums over chunks in bf16 (Liger's default, torch's, Apple's locks) and Apple's filter cost accuracy.
    rough = {"liger": 4.0, "torch_native": 6.0, "cce_apple": 20.0} if device == "cuda" and dtype == DTYPES[1] else {}
    assert_matches_truth(name, case, rough.get(name, 2.0))


@pytest.mark.parametrize("name", ["standard", "compiled", "cce_kahan", "cce_kahan-fp32", "cce_filter", APPLE_ON_CPU])
def test_z_loss_softcap_and_label_smoothing_match_fp64(name):
    """All three that a backend has at once: leaving one out moves the loss by a per cent or more."""
    available(name, CPU)
    config, case = CONFIGS[name], make_case(torch.float32)
    keys = {key: value for key, value in ALL_THREE.items() if key not in build_loss(config, device=CPU).lacks(config)}
    config = replace(config, **keys, **({"filter_if_faster": True} if name == "cce_filter" else {}))
    loss, grad_h, grad_w = true_objective(case, **keys)
    hidden, weight = case.leaves()
    output = build_loss(config, device=CPU)(hidden, weight, case.labels)
    (output.sum_nats * case.scale).backward()
    assert error(output.sum_nats, loss) < 1e-6
    assert error(hidden.grad, grad_h) < 2e-6
    assert error(weight.grad, grad_w) < 2e-6
    with torch.no_grad():
        plain = build_loss(config.for_validation(), device=CPU)(case.hidden, case.weight, case.labels)
    assert error(plain.sum_nats, true_objective(case, softcap=keys.get("softcap"))[0]) < 1e-6


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("fla", {"z_loss"}),
        ("fla-on-logits", set()),
        ("liger", set()),
        ("torch_native", {"z_loss", "softcap", "label_smoothing"}),
        ("cce_filter", {"label_smoothing"}),
        ("cce_apple", {"z_loss", "label_smoothing"}),
        ("cce_kahan", set()),
        ("compiled", set()),
    ],
)
def test_what_a_backend_cannot_compute_is_refused_with_those_that_can(name, lacks):
    for key, value in ALL_THREE.items():
        config = replace(CONFIGS[name], **{key: value})
        if key not in lacks:
            check_objective(config)
            continue
        with pytest.raises(UnsupportedError, match=rf"loss\.{key}={value:g}: ") as refusal:
            check_loss(config, torch.device("cuda"))
        assert "loss=cce_kahan or loss=standard" in refusal.value.remedy
        with pytest.raises(UnsupportedError, match=rf"loss\.{key}={value:g}: "):  # in a forecast for a GPU, too
            make_plan(load_config([f"loss={config.name}", f"loss.{key}={value}", "dry_run=true", "gpu=h100"]))


@everywhere(torch.float32)
@pytest.mark.usefixtures("graphs_run_as_traced")
def test_ignored_labels_change_nothing_and_ignored_alone_give_zeros(name, dtype, device, case):
    _, grad_h, grad_w = run(name, case)
    if device == "cpu":
        kept = case.labels >= 0
        assert not grad_h[~kept].any()
        _, kept_h, kept_w = run(name, Case(case.hidden[kept], case.weight, case.labels[kept], case.scale))
        torch.testing.assert_close(grad_h[kept], kept_h)
        torch.testing.assert_close(grad_w, kept_w)
    case.labels.fill_(-100)
    output, grad_h, grad_w = run(name, case)
    assert output.sum_nats == output.n_tokens == 0
    assert not grad_h.any()
    assert not grad_w.any()


@everywhere(torch.float32)
@pytest.mark.usefixtures("graphs_run_as_traced")
def test_evaluation_and_a_frozen_backbone_give_the_training_loss_and_the_same_gradient(name, dtype, device, case):
    trained, _, expected = run(name, case)
    loss = build_loss(CONFIGS[name], device=case.labels.device)
    with torch.no_grad():
        evaluated = loss(case.hidden, case.weight, case.labels)
    assert not evaluated.sum_nats.requires_grad
    torch.testing.assert_close(evaluated.sum_nats, trained.sum_nats.detach(), rtol=1e-5, atol=0)
    _, weight = case.leaves()
    (loss(case.hidden, weight, case.labels).sum_nats * case.scale).backward()
    assert_same(weight.grad, expected)


@everywhere(torch.float32)
@pytest.mark.usefixtures("graphs_run_as_traced")
def test_strided_hidden_states_give_the_same_result(name, dtype, device, case):
    expected, grad_h, grad_w = run(name, case)
    wide = torch.stack([case.hidden, torch.full_like(case.hidden, math.nan if device == "cpu" else 0)], dim=-1)
    output, strided_h, strided_w = run(name, case, hidden=wide[..., 0].detach().requires_grad_())
    assert error(output.sum_nats, expected.sum_nats.double()) < torch.finfo(dtype).eps
    assert_same(strided_h, grad_h)
    assert_same(strided_w, grad_w)


@pytest.mark.parametrize("name", ON_CPU)
def test_autocast_around_the_loss_does_not_touch_it(name):
    available(name, CPU)
    case = make_case(torch.float32)
    expected, _, _ = run(name, case)
    with torch.autocast("cpu", torch.bfloat16):
        output = build_loss(CONFIGS[name], device=CPU)(case.hidden, case.weight, case.labels)
    torch.testing.assert_close(output.sum_nats, expected.sum_nats.detach(), rtol=1e-6, atol=0)


def test_a_filter_with_an_exact_gradient_of_the_head_is_the_papers_cce_kahan_full_c():
    """sweep=apple trains with these options. The preset of the kernels is compared with them, bit by bit."""
    available("cce_filter", CPU)
    kernels = importlib.import_module("cce_kernels")
    case = make_case(torch.float32)
    config = replace(CONFIGS["cce_filter"], filter_c=False)
    preset = partial(kernels.linear_cross_entropy, ignore_index=-100, reduction="sum", preset="paper/cce_kahan_full_c")
    found = {}
    for name, call in (
        ("ours", lambda *tensors: build_loss(config, device=CPU)(*tensors).sum_nats),
        ("paper", preset),
        ("both", lambda *tensors: build_loss(CONFIGS["cce_filter"], device=CPU)(*tensors).sum_nats),
        ("exact", lambda *tensors: build_loss(CONFIGS["cce_kahan"], device=CPU)(*tensors).sum_nats),
    ):
        hidden, weight = case.leaves()
        call(hidden, weight, case.labels).backward()
        found[name] = hidden.grad, weight.grad
    assert all(map(torch.equal, found["ours"], found["paper"]))
    torch.testing.assert_close(found["ours"][1], found["exact"][1])
    assert (found["ours"][0] - found["exact"][0]).abs().max() > 1e-5, "the hidden states' gradient is filtered"
    assert (found["both"][1] - found["exact"][1]).abs().max() > 1e-5, "as the head's is where both are"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(45, dtype=torch.int32)}, "int64"),
        ({"labels": torch.zeros(44, dtype=torch.int64)}, "labels must be"),
        ({"weight": torch.zeros(211, 31)}, "weight"),
        ({"weight": torch.zeros(211, 32, dtype=torch.bfloat16)}, "dtype"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(change, message):
    case = make_case(torch.float32)
    tensors = {"hidden": case.hidden, "weight": case.weight, "labels": case.labels} | change
    with pytest.raises(ValueError, match=message):
        build_loss(CONFIGS["standard"], device=CPU)(*tensors.values())


# --------------------------------------------------------------------------------------------------- refusals
def test_every_loss_of_the_schema_has_a_backend_and_the_other_way_round():
    assert set(loss_names()) == set(SCHEMAS["loss"])
    assert {config.name for config in CONFIGS.values()} == set(loss_names())
    assert all(type(config) is SCHEMAS["loss"][config.name] for config in CONFIGS.values())


def test_an_unknown_loss_offers_the_nearest_names():
    with pytest.raises(ConfigError, match="cce_kahan") as refusal:
        build_loss(LossConfig("cce_kahn"), device=CPU)
    assert refusal.value.remedy.startswith("nearest: cce_kahan")


@pytest.mark.parametrize(
    ("name", "module", "install"),
    [
        ("liger", "liger_kernel.transformers", "liger-kernel==0.8.5"),
        ("fla", "fla.modules", "flash-linear-attention==0.6.0"),
        ("cce_apple", "cut_cross_entropy", "cut-cross-entropy"),
        ("cce_kahan", "cce_kernels", "./kernels"),
        ("cce_filter", "triton", "triton"),
    ],
)
def test_a_library_that_does_not_import_is_named_with_what_to_install(name, module, install, monkeypatch):
    real = importlib.import_module

    def without(wanted, *args):
        if wanted == module:
            raise ImportError(f"No module named {module!r}")
        return real(wanted, *args)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(UnsupportedError, match=f"loss={name}") as refusal:
        check_loss(CONFIGS[name], torch.device("cuda"))
    assert f"{module} of " in refusal.value.cause or "is not installed" in refusal.value.cause
    assert "pip install" in refusal.value.remedy
    assert install in refusal.value.remedy


@pytest.mark.parametrize(
    ("name", "options", "dtype", "cause", "remedy"),
    [
        ("cce_filter", {"filter_eps": 0.0}, None, "filter_eps", "loss=cce_kahan for no filter"),
        ("cce_filter", {"filter_eps": 1.0}, None, r"loss.filter_eps: .* 1\), got 1", "loss=cce_kahan for no filter"),
        ("cce_filter", {"filter_mass": 1.0}, None, "filter_mass", "loss=cce_kahan for no filter"),
        ("cce_apple", {"variant": "cce_telepathy"}, None, r"cross_entropy \d+.* has no such variant", "torch_compile"),
        ("cce_apple", {}, torch.float32, "fp32", "precision"),
    ],
)
def test_options_that_a_loss_cannot_have_are_refused_before_anything_is_built(name, options, dtype, cause, remedy):
    with pytest.raises((ConfigError, UnsupportedError), match=cause) as refusal:
        check_loss(replace(CONFIGS[name], **options), torch.device("cuda"), dtype)
    assert remedy in refusal.value.remedy


@pytest.mark.parametrize("name", ["cce_kahan", "cce_filter"])
def test_a_workspace_too_small_for_the_batch_is_refused_before_backward_with_the_least_that_will_do(name):
    hidden, weight = make_case(torch.bfloat16, n=1024, d=512, v=300).leaves()
    labels = torch.zeros(1024, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"loss\.workspace_mib=1 is too small for 1024 tokens") as refusal:
        build_loss(replace(CONFIGS[name], workspace_mib=1), device=CPU)(hidden, weight, labels)
    least = int(re.findall(r"loss\.workspace_mib=(\d+)", refusal.value.remedy)[0])
    build_loss(replace(CONFIGS[name], workspace_mib=least), device=CPU)(hidden, weight, labels).sum_nats.backward()
    with pytest.raises(ConfigError):
        build_loss(replace(CONFIGS[name], workspace_mib=least - 1), device=CPU)(hidden, weight, labels)


def test_torch_native_on_an_older_torch_says_which_it_needs(monkeypatch):
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    with pytest.raises(UnsupportedError, match=r"(?s)torch >= 2\.13.*pip install"):
        check_loss(CONFIGS["torch_native"], CPU)


@pytest.mark.parametrize("name", ["compiled", "cce_apple-torch_compile"])
def test_torch_compile_without_a_compiler_is_refused_with_a_remedy(name, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UnsupportedError, match=r"(?s)C\+\+ compiler.*g\+\+"):
        check_loss(CONFIGS[name], CPU)


def test_compiled_fails_at_the_recompile_limit_rather_than_run_eagerly():
    available("compiled", CPU)
    torch._dynamo.reset()
    loss = build_loss(CONFIGS["compiled"], device=CPU)
    weight = torch.zeros(7, 4)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        loss(torch.zeros(2, 4), weight, torch.zeros(2, dtype=torch.int64))
        with pytest.raises(UnsupportedError, match="limit of 1 compiled"):
            loss(torch.zeros(3, 4), weight, torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_control_moves_every_entry_by_one_unit_in_the_last_place(dtype):
    available("compiled", CPU)
    hidden, weight, labels = torch.randn(6, 4, dtype=dtype), torch.randn(7, 4, dtype=dtype), torch.arange(6)
    losses, gradients = [], []
    for name in ("compiled", "compiled_nudged"):
        e = hidden.clone().requires_grad_()
        loss = build_loss(LossConfig(name), device=CPU)(e, weight, labels).sum_nats
        loss.backward()
        losses.append(loss.item())
        gradients.append(e.grad)
    assert losses[0] == losses[1]
    plain, moved = gradients
    assert torch.equal(torch.nextafter(plain, moved), moved), "a neighbour"
    assert {1, -1} == set((moved - plain).sign().flatten().tolist())


# ------------------------------------------------------------------------------------- rivals, for the benchmark alone
def test_rivals_can_be_built_but_no_run_can_choose_them():
    assert not set(OTHER_LOSSES) & set(loss_names())
    assert not set(OTHER_LOSSES) & set(SCHEMAS["loss"])


@pytest.mark.parametrize("name", ["liger_sm90", "quack", "quack/1024"])
def test_rivals_with_gpu_kernels_are_refused_on_a_cpu(name):
    with pytest.raises(UnsupportedError, match=rf"{name}.*GPU"):
        check_loss(LossConfig(name), CPU)


def test_a_variant_of_the_paper_is_exact():
    case = make_case(torch.float32, n=1024, d=64, v=4096)
    hidden, weight = case.leaves()
    output = build_loss(LossConfig("paper/cce_exact"), device=CPU)(hidden, weight, case.labels)
    (output.sum_nats * case.scale).backward()
    loss, grad_h, grad_w = truth(case)
    assert error(output.sum_nats, loss) < 1e-6
    assert error(hidden.grad, grad_h) < 1e-5
    assert error(weight.grad, grad_w) < 1e-5
