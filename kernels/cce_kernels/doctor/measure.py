"""`profile`: time and memory of a model's head and loss as they stand, and of this package's in their place.

Five passes are timed, each forward and backward, in turn, round by round:

* the whole step, by the model's own code;
* the decoder alone: the model's forward stops where the decoder returns, and backward starts from a stored gradient;
* head and loss alone: the model's own forward runs with a decoder that returns stored hidden states;
* `linear_cross_entropy` on the same hidden states;
* the decoder followed by `linear_cross_entropy`.

Head and loss are thus timed through the model's own code, whatever computes them: transformers' loss on logits, FLA's
criterion, a fused kernel, or a forward that Liger has replaced. The decoder is the only part that is replaced, and the
time of a part is measured, not inferred from a difference. The decoder's time and the time of head and loss add up to
the step's, which the table shows as a check. The loss's part of the peak memory is a difference: the step's peak minus
the decoder's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..api import linear_cross_entropy, try_options
from ..arguments import as_integer
from .model import CausalModel, hidden_of, with_hidden

GIB = 2**30
FIXED = ("reduction", "shift", "ignore_index", "return_lse", "return_metrics", "return_stats")
NO_MEMORY = "not measured on a CPU"
IGNORED_LABEL = -100  # of transformers and FLA
SAME_LOSS = 0.02  # relative; logits in bf16 move the loss by less


@dataclass(frozen=True)
class Pass:
    """A forward and backward pass: the median of its times in ms, and its peak memory in GiB (None on a CPU).

    The peak of a pass with the decoder is all that the process has allocated. The peak of head and loss alone counts
    what they allocate beyond weights and hidden states, gradients included.
    """

    ms: float
    gib: float | None


@dataclass(frozen=True)
class Profile:
    """What `profile` measured.

    Attributes:
        model: the class. loss: what computes the loss now. switch: the line that switches to this package.
        device: the GPU's name or "cpu". dtype: of the hidden states.
        tokens, width, vocabulary: N, D and V of the head's product.
        products: how many of the products N x D x V a step needs: logits, and the gradients that are wanted.
        rounds: of which the times are medians.
        step, decoder, head: the model as it stands, the decoder alone, head and loss alone.
        our_head, our_step: `linear_cross_entropy` on the same hidden states, alone and behind the decoder.
        nats, our_nats: the loss of the same hidden states, by the model and by `linear_cross_entropy`.
    """

    model: str
    loss: str
    switch: str
    device: str
    dtype: str
    tokens: int
    width: int
    vocabulary: int
    products: int
    rounds: int
    step: Pass
    decoder: Pass
    head: Pass
    our_head: Pass
    our_step: Pass
    nats: float
    our_nats: float

    @property
    def tflops(self) -> tuple[float, float]:
        """U = 2 · products · N D V / time of head and loss, in TFLOP/s: now and with ours. 6 N D V with 3 products."""
        flops = 2 * self.products * self.tokens * self.width * self.vocabulary
        return flops / self.head.ms / 1e9, flops / self.our_head.ms / 1e9

    @property
    def share_of_step(self) -> tuple[float, float]:
        """The time of head and loss divided by that of the step, now and with ours."""
        return self.head.ms / self.step.ms, self.our_head.ms / self.our_step.ms

    @property
    def share_of_peak(self) -> tuple[float, float] | None:
        """What head and loss add to the decoder's peak, divided by the step's peak, now and with ours."""
        if self.step.gib is None or self.our_step.gib is None or self.decoder.gib is None:
            return None
        return 1 - self.decoder.gib / self.step.gib, 1 - self.decoder.gib / self.our_step.gib

    @property
    def same_loss(self) -> bool:
        """Whether both losses agree as far as rounded logits allow."""
        return abs(self.nats - self.our_nats) <= SAME_LOSS * abs(self.nats)

    def __str__(self) -> str:
        """The table."""
        pairs: list[tuple[str, ...]] = [
            ("", "now", "cce_kernels"),
            ("forward and backward, ms", f"{self.step.ms:.2f}", f"{self.our_step.ms:.2f}"),
            ("  decoder alone, ms", f"{self.decoder.ms:.2f}", f"{self.decoder.ms:.2f}"),
            ("  head and loss alone, ms", f"{self.head.ms:.2f}", f"{self.our_head.ms:.2f}"),
            ("  head and loss, of the step", *(f"{share:.1%}" for share in self.share_of_step)),
            ("  head and loss, TFLOP/s", *(f"{rate:.3g}" for rate in self.tflops)),
        ]
        if self.share_of_peak is not None:
            pairs += [
                ("peak memory, GiB", f"{self.step.gib:.2f}", f"{self.our_step.gib:.2f}"),
                ("  head and loss, of the peak", *(f"{share:.1%}" for share in self.share_of_peak)),
                ("  head and loss alone, GiB", f"{self.head.gib:.2f}", f"{self.our_head.gib:.2f}"),
            ]
        pairs.append(("loss, nats", f"{self.nats:.4f}", f"{self.our_nats:.4f}"))
        widths = [max(len(line[i]) for line in pairs) for i in range(3)]
        lines = [f"{a.ljust(widths[0])}  {b.rjust(widths[1])}  {c.rjust(widths[2])}" for a, b, c in pairs]
        sizes = f"{self.tokens} tokens x {self.width} dimensions x {self.vocabulary} entries"
        notes = [] if self.share_of_peak is not None else [f"peak memory: {NO_MEMORY}"]
        if not self.same_loss:
            notes.append(
                "the losses differ: the model adds something to its loss or changes its logits in a way that its "
                "configuration does not tell (an auxiliary loss of experts, for example)"
            )
        return "\n".join([
            f"{self.model} on {self.device}, {self.dtype}: {sizes}, medians of {self.rounds} rounds",
            f"loss now: {self.loss}", "", *lines, "", *notes, f"to switch: {self.switch}",
        ])  # fmt: skip


def profile(model: Any, batch: Any, *, rounds: int = 5, **options: Any) -> Profile:
    """Measure what a causal language model's head and loss cost, and what `linear_cross_entropy` costs in their place.

    The model is measured as it stands: patched by Liger or by this package, in any dtype, under the caller's autocast,
    with or without gradient checkpointing. It runs in training mode. Afterwards its mode, its gradients and the state
    of the random generators are what they were. Its optimizer is not run.

    Args:
        model: a causal language model of transformers or FLA, on one device, not compiled and not wrapped.
        batch: token ids (B, T), which are their own labels; or a mapping with the arguments of the model's forward.
        rounds: how often each pass is timed, at least 1.
        options: options of `linear_cross_entropy`, such as workspace_mib; not reduction, shift, ignore_index and
            return_….

    Returns:
        A `Profile`. `print` shows it as a table.

    Raises:
        TypeError, ValueError: the model is no causal language model, returns no loss or needs no gradient; or an
            argument or option is wrong. The message says what to give.
    """
    if as_integer("rounds", rounds) < 1:
        raise ValueError(f"rounds: must be at least 1, got {rounds}")
    for name in options.keys() & set(FIXED):
        raise ValueError(f"{name}: cannot be given; profile compares the mean losses of the model's own labels")
    try_options(**options)
    causal = CausalModel(model, batch)
    with _as_it_was(model), torch.enable_grad():
        return _measured(causal, rounds, options)


def _measured(causal: CausalModel, rounds: int, options: dict[str, Any]) -> Profile:
    weight, (targets, shift) = causal.head.weight, causal.targets()
    if not (targets[..., shift:] != IGNORED_LABEL).any():
        raise ValueError("batch: no label counts, so there is no loss to measure; give labels other than -100")
    options = {**causal.options(), **options}
    logits = causal.calls_head(causal.loss)
    hidden, output = _head_inputs(causal, targets.shape)
    wanted = hidden.requires_grad

    def ours(e: Tensor) -> Tensor:
        return linear_cross_entropy(e, weight, targets.to(e.device), shift=shift, **options)

    def head() -> Tensor:
        with causal.without_decoder(output):
            loss = causal.loss()
        loss.backward()
        return loss.detach()

    def our_head() -> Tensor:
        loss = ours(hidden)
        loss.backward()
        return loss.detach()

    nats, our_nats = head().item(), our_head().item()
    gradient = None if hidden.grad is None else hidden.grad.clone()

    def decoder() -> None:
        states = hidden_of(causal.decoded())
        if wanted:
            states.backward(gradient)

    passes: dict[str, Callable[[], object]] = {
        "step": lambda: causal.loss().backward(), "decoder": decoder, "head": head, "our_head": our_head,
        "our_step": lambda: ours(hidden_of(causal.decoded())).backward(),
    }  # fmt: skip
    leaves = [hidden, *causal.model.parameters()]
    held = sum(x.nbytes for x in (hidden, gradient) if x is not None)
    found = _timed(passes, leaves, held, hidden.device, rounds)
    name, switch = causal.diagnosis(logits, output)
    cuda = hidden.device.type == "cuda"
    return Profile(
        model=type(causal.model).__name__, loss=name, switch=switch,
        device=torch.cuda.get_device_name(hidden.device) if cuda else hidden.device.type,
        dtype=str(hidden.dtype).removeprefix("torch."), tokens=targets.numel(), width=weight.shape[1],
        vocabulary=weight.shape[0], products=1 + wanted + weight.requires_grad, rounds=rounds, nats=nats,
        our_nats=our_nats, **found,
    )  # fmt: skip


def _head_inputs(causal: CausalModel, tokens: torch.Size) -> tuple[Tensor, Any]:
    """The head's hidden states as a leaf, and the decoder's output with this leaf in their place."""
    weight, output = causal.head.weight, causal.decoded()
    first = hidden_of(output)
    if not isinstance(first, Tensor) or first.shape[-1] != weight.shape[1] or first.shape[:-1] != tokens:
        raise ValueError(
            f"model: the decoder of a {type(causal.model).__name__} does not return hidden states of shape "
            f"{(*tokens, weight.shape[1])}, which its head takes; it cannot be measured"
        )
    if not first.requires_grad and not weight.requires_grad:
        raise ValueError("model: no parameter requires a gradient, so there is no training step to measure")
    hidden = first.detach().requires_grad_(first.requires_grad)
    output = with_hidden(output, hidden)
    if hidden_of(output) is not hidden:
        raise TypeError(f"model: its decoder returns a {type(output).__name__}, in which nothing can be replaced")
    return hidden, output


def _timed(
    passes: dict[str, Callable[[], object]], leaves: list[Any], held: int, device: torch.device, rounds: int
) -> dict[str, Any]:
    """Each pass warmed up, then its peak memory, then its time once a round.

    held: bytes that lie beside the model for the measurement alone.
    """
    times: dict[str, list[float]] = {name: [] for name in passes}
    peaks: dict[str, float | None] = {}
    for name, run in passes.items():
        for _ in range(2):  # the second one is measured: kernels are compiled and tuned
            _clear(leaves)
            begin = _allocated(device)
            run()
            peak = _peak(device)
        beyond = begin if name.endswith("head") else held
        peaks[name] = None if peak is None or beyond is None else (peak - beyond) / GIB
    for _ in range(rounds):
        for name, run in passes.items():
            _clear(leaves)
            times[name].append(_ms(run, device))
    _clear(leaves)
    return {name: Pass(statistics.median(times[name]), peaks[name]) for name in passes}


def _clear(leaves: list[Any]) -> None:
    for leaf in leaves:
        leaf.grad = None


def _allocated(device: torch.device) -> int | None:
    """Bytes allocated now, from which the peak is counted anew; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def _ms(run: Callable[[], object], device: torch.device) -> float:
    """The time of one pass in ms. The device is idle before and after."""
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize(device)
    events[0].record()
    run()
    events[1].record()
    torch.cuda.synchronize(device)
    return events[0].elapsed_time(events[1])


@contextmanager
def _as_it_was(model: Any) -> Iterator[None]:
    """In training mode and without gradients; afterwards modes, gradients and random generators as before."""
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = sorted({x.device.index for x, _ in gradients if x.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        try:
            model.train()
            _clear([parameter for parameter, _ in gradients])
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for parameter, gradient in gradients:
                parameter.grad = gradient
