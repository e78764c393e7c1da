"""Random calls of the loss against torch: `python scripts/maintain/fuzz_loss.py 2000 [FIRST_SEED]`.

Each call draws dtypes, autocast, options, sizes, strides, workspace, frozen inputs and data, and compares loss, LSE and
gradients with fp64. An error must stay below twice that of the torch path of tests/kernels/cases.py in the same dtypes,
plus what rounding in fp32 comes to. Prints counts, the largest ratios of error to bound, and one line for each case out
of bounds, which `1 SEED` runs again.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from cce_kernels import WorkspaceTooSmall, linear_cross_entropy, planner, reference_linear_cross_entropy
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "kernels"))
cases: Any = importlib.import_module("cases")  # draws a call's tensors, and has torch's own path

BF16, FP16, FP32 = DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Call = SimpleNamespace  # that draw_call draws
CALLS_OF_A_KIND = 25  # calls with the same dtypes and options
EXACT = 2e-5  # relative error of gradients and LSE: fp32 sums in another order, exponentials of some hundred nats
EXACT_LOSS = 5e-6
SMALLEST = 1e-18  # a probability below fp32's exponentials


def draw_call(seed: int) -> Call:
    """A call. Its neighbours have the same dtypes and options, for which kernels are compiled."""
    r = Random(f"kind {seed // CALLS_OF_A_KIND}")
    options: dict[str, Any] = {"accumulate": r.choice(("kahan", "kahan", "fp32"))}
    choices = {"softcap": (5.0, 30.0), "logit_scale": (0.1, 2.0), "label_smoothing": (0.1, 1.0), "z_loss": (1e-3, 1e-2)}
    for name, values in choices.items():
        if r.random() < 0.2:
            options[name] = r.choice(values)
    plain = r.random() < 0.4  # without options that rule out stored exponentials
    if plain:
        options.pop("label_smoothing", None)
    options["reduction"] = r.choice(("mean", "sum")) if plain else r.choice(("mean", "sum", "none"))
    dtype, bias = r.choice((BF16, BF16, FP16, FP32)), r.random() > (0.7 if plain else 0.5)
    kind = {
        "dim": r.choice((1, 8, 24, 37, 64, 200, 256)),
        "dtype": dtype,
        "dtype_c": dtype if r.random() < 0.5 else r.choice(DTYPES),
        "bias": bias,
        "dtype_bias": r.choice(DTYPES),
        "autocast": r.choice((None, None, BF16, FP16)),
    }
    call = SimpleNamespace(
        seed=seed,
        with_lse=not plain and r.random() < 0.3,
        launches_are_free=r.random() < 0.7,  # then exponentials are stored even for problems as small as these
        main_grad=r.random() < 0.15,
        wanted=r.choice(("ec", "ec", "ec", "e", "c")),  # inputs that need gradients
        weights=r.choice((None, None, *DTYPES)),  # dtype of token_weights
    )
    r = Random(f"call {seed}")
    length = r.randint(1, 60)
    call.again = r.random() < 0.1  # a second backward pass
    call.workspace_mib = r.choice((None, None, 0.5, 4.0))
    call.case = cases.Case(
        str(seed),
        shape=(r.choice((1, 3, 9)), length),
        vocab=r.choice((1, 2, r.randint(3, 200), r.randint(200, 1500), 512)),
        ignored=r.choice((0, 0.3, 1.0) if r.random() < 0.1 else (0, 0.3)),
        peak=r.choice((0, 0, 3, 12, 40, -20, 150)),
        strided=r.random() < 0.3,
        weights=call.weights is not None,
        options={**options, "shift": r.choice((0, 0, 1)) if length > 1 else 0},
        **kind,
    )
    return call


def multiplied_in(call: Call) -> torch.dtype:
    case = call.case
    return case.autocast or torch.promote_types(case.dtype, case.dtype_c)


def run(call: Call) -> dict[str, Tensor]:
    """Ratio () of each output's error to its bound. Raises WorkspaceTooSmall if the kernels reject the workspace."""
    case, device, dtype = call.case, DEVICE, multiplied_in(call)
    e, c, targets, bias = cases.draw(case, device, call.seed)
    for name, x in (("e", e), ("c", c)):
        x.requires_grad_(name in call.wanted)
    g = torch.Generator(device).manual_seed(call.seed + 1)
    main_grad = torch.randn(c.shape, generator=g, device=device) if call.main_grad else None
    before = None if main_grad is None else main_grad.clone()
    weights = {name: x.to(call.weights) for name, x in cases.weights_of(case, targets).items()}
    options = case.options | weights
    wanted = {name: x for name, x in (("e", e), ("c", c), ("bias", bias)) if x is not None and x.requires_grad}
    names, inputs = list(wanted), list(wanted.values())

    planner.LAUNCH_SECONDS = 0.0 if call.launches_are_free else 40e-6
    with torch.autocast(device, dtype, enabled=case.autocast is not None):
        found = linear_cross_entropy(
            e, c, targets, bias=bias, workspace_mib=call.workspace_mib, main_grad_c=main_grad,
            return_lse=call.with_lse, **options,
        )  # fmt: skip
        base_loss, base_lse = cases.torch_path(e, c, targets, bias, return_lse=True, **options)
    loss, lse = found if call.with_lse else (found, None)
    e64, c64 = (x.detach().to(dtype).double().requires_grad_(x.requires_grad) for x in (e, c))
    bias64 = None if bias is None else bias.detach().double().requires_grad_()
    truth, true_lse = reference_linear_cross_entropy(e64, c64, targets, bias=bias64, **options)
    inputs64 = [x for x in (e64, c64, bias64) if x is not None and x.requires_grad]

    upstream = torch.randn(loss.shape, generator=g, device=device)
    of_lse = torch.randn(true_lse.shape, generator=g, device=device) if lse is not None else None

    def gradients(loss: Tensor, lse: Tensor | None, inputs: list[Tensor], retain: bool = False) -> list[Tensor | None]:
        outputs, seeds = [loss], [upstream.to(loss.dtype)]
        if lse is not None and of_lse is not None:
            outputs, seeds = [loss, lse], [*seeds, of_lse.to(lse.dtype).reshape(lse.shape)]
        return list(torch.autograd.grad(outputs, inputs, seeds, retain_graph=retain, allow_unused=True))

    def our_gradients(retain: bool) -> list[Tensor | None]:
        found = gradients(loss, lse, inputs, retain)
        if main_grad is not None and before is not None and "c" in names:
            found[names.index("c")] = main_grad - before
            main_grad.copy_(before)
        return found

    want = gradients(truth, true_lse, inputs64)
    base = gradients(base_loss, None if lse is None else base_lse, inputs)
    passes = {"": our_gradients(retain=call.again)}
    if call.again:
        passes["again_"] = our_gradients(retain=False)

    terms, of_terms = rounded_terms(call, e64, c64, bias64, targets, weights, true_lse, truth, upstream, of_lse)
    ratios = {"loss": ratio(loss, truth, base_loss, terms)}
    if lse is not None:
        ratios["lse"] = ratio(lse, true_lse, base_lse.reshape(true_lse.shape), EXACT * true_lse.abs().amax())
    for prefix, grads in passes.items():
        for name, got, one, exact in zip(names, grads, base, want, strict=True):
            if got is None or one is None or exact is None:
                raise RuntimeError(f"no gradient of {name}")
            term = of_terms[name] + EXACT * exact.norm()
            if before is not None and name == "c":  # not rounded itself: 16-bit products added to the buffer in fp32
                one, term = one.float(), term + 2**-23 * before.norm()
            ratios[prefix + name] = ratio(got, exact, one, term)
    return ratios


def rounded_terms(
    call: Call, e: Tensor, c: Tensor, bias: Tensor | None, targets: Tensor, weights: dict[str, Tensor], lse: Tensor,
    loss: Tensor, upstream: Tensor, of_lse: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """What rounding in fp32 may add: to the loss (its shape, or ()), and to the norm of each gradient.

    A row's loss has an error relative to itself, to (1 − p) · logits (p is the target's probability), and to the parts
    that smoothing and z_loss add. Logits and LSE are fp32 numbers, each rounded to 2^-24 of its size. A probability is
    therefore right to 2^-20 + 2^-22 · size of the row's largest logit. The same holds for its factor in the gradients:
    what arrives from the loss, from z_loss and from the LSE, without cancellation between them or between rows.
    """
    o, weight = call.case.options, next(iter(weights.values()), torch.ones_like(targets)).double().abs()
    if shift := o["shift"]:
        e, targets, weight = e[:, :-shift], targets[:, shift:], weight[:, shift:]
    kept = targets != cases.IGNORE
    weight = weight.masked_fill(~kept, 0)
    if o["reduction"] == "mean":
        weight = weight / weight.sum().clamp(min=1e-9)
    with torch.no_grad():
        size = e.norm(dim=-1) * c.norm(dim=-1).amax() * abs(o.get("logit_scale", 1.0)) + 1
        if bias is not None:
            size = size + bias.abs().amax()
        arrives = (upstream if upstream.dim() else upstream.expand(targets.shape)).double().abs() * weight
        arrives = arrives * (1 + 2 * o.get("z_loss", 0.0) * lse.abs())
        if of_lse is not None:
            arrives = arrives + of_lse.abs()
        arrives = arrives * (2**-20 + 2**-22 * size + rounding_of_few(call))
        columns = targets.clamp(min=0)
        z = o.get("logit_scale", 1.0) * (e * c[columns]).sum(dim=-1)
        z = z if bias is None else z + bias[columns]

        def of_columns(x: Tensor) -> Tensor:
            return torch.zeros_like(c[:, 0]).index_add(0, columns.flatten(), x.flatten()).norm()

        scale = abs(o.get("logit_scale", 1.0))
        of_terms = {
            "e": arrives.norm() * c.norm(dim=-1).amax() * scale,
            "c": of_columns(arrives * e.norm(dim=-1)) * scale,
            "bias": of_columns(arrives),
        }
        p = torch.exp(z - lse) if "softcap" not in o else torch.exp(o["softcap"] * torch.tanh(z / o["softcap"]) - lse)
        parts = (1 - p.clamp(max=1)) * size + o.get("label_smoothing", 0.0) * size
        parts = parts + o.get("z_loss", 0.0) * lse.abs() * (lse.abs() + size)
        # Weighted losses of both signs may cancel, so each row's own size counts.
        own = EXACT_LOSS * -p.clamp(min=SMALLEST).log() if weights else 0.0
        rows = weight * torch.where(kept, 2**-21 * parts + SMALLEST + own, 0)
        return EXACT_LOSS * loss.abs() + (rows if o["reduction"] == "none" else rows.sum()), of_terms


def rounding_of_few(call: Call) -> float:
    """What probabilities in 16 bits may add when few numbers are summed.

    Torch's error over many numbers shows what rounding adds. Over few numbers its rounding errors may cancel by chance:
    with a vocabulary size of two both gradients of logits have the same size.
    """
    few = call.case.vocab <= 2 or call.case.dim == 1 or math.prod(call.case.shape) <= 16
    return {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(multiplied_in(call), 0.0) if few else 0.0


def ratio(got: Tensor, truth: Tensor, base: Tensor, term: Tensor) -> Tensor:
    """The ratio of the error's norm to the bound, () fp64; inf if a number should be finite and is not.

    A number beyond the largest of the output's dtype should be infinite.
    """
    with torch.no_grad():
        beyond = truth.to(got.dtype).isinf() & (got == truth.to(got.dtype))
        got, truth, base = (torch.where(beyond, 0, x.double()) for x in (got, truth, base))
        error, allowed = (got - truth).norm(), 2 * (base - truth).norm() + term.norm() + 1e-30
        return torch.where(error.isfinite(), error / allowed, torch.inf)


def main(calls: int, first: int) -> int:
    torch.backends.cuda.matmul.allow_tf32 = False
    start, refused, outside = time.monotonic(), 0, list[str]()
    worst: dict[str, tuple[float, int]] = {}  # of each output: the largest ratio, and its seed
    for seed in range(first, first + calls):
        if seed % CALLS_OF_A_KIND == 0:
            planner.plan.cache_clear()
        call = draw_call(seed)
        try:
            ratios = {name: round(value.item(), 3) for name, value in run(call).items()}
        except WorkspaceTooSmall:
            refused += 1
            continue
        except Exception as error:
            outside.append(f"1 {seed}  # {type(error).__name__}: {str(error)[:300]}; {call}")
            continue
        for name, value in ratios.items():
            worst[name] = max(worst.get(name, (-1.0, seed)), (value, seed))
        if any(not value <= 1 for value in ratios.values()):
            outside.append(f"1 {seed}  # {ratios}; {call}")
    print(f"{calls} calls in {time.monotonic() - start:.0f} s on {DEVICE}; {refused} refused for their workspace")
    print("largest error / bound: " + ", ".join(f"{name} {worst[name]}" for name in sorted(worst)))
    print(f"out of bounds: {len(outside)}")
    for line in outside:
        print(f"  python scripts/maintain/fuzz_loss.py {line}")
    return 1 if outside else 0


if __name__ == "__main__":
    words = sys.argv[1:]
    if not words or not all(word.isdecimal() for word in words):
        sys.exit(__doc__)
    sys.exit(main(int(words[0]), int(words[1]) if len(words) > 1 else 0))
