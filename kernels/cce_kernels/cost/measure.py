"""`profile`: time and memory of a model's training step as it stands, with this package's loss, and of its decoder."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..arguments import as_integer
from ..huggingface.checks import innermost, source
from ..huggingface.patch import patch


@dataclass(frozen=True)
class Profile:
    """What `profile` measured of each pass: now, as the model stands; ours, with this package's loss; decoder alone."""

    setting: str  # model, device, dtype, tokens and rounds, in words
    switch: str  # the line that switches the model to this package's loss
    rounds: list[dict[str, float]]  # by round, the time of each pass in ms
    ms: dict[str, float]  # their medians
    gib: dict[str, float | None]  # the peak of all that is allocated, None on a CPU
    nats: dict[str, float]  # the loss

    @property
    def share_of_step(self) -> dict[str, float]:
        """Head and loss's part of a step's time, now and ours: the median of what the decoder leaves in each round."""
        return {name: median(1 - own["decoder"] / own[name] for own in self.rounds) for name in ("now", "ours")}

    @property
    def speed_up(self) -> list[float]:
        """How many times as fast a step is with this package's loss, in each round."""
        return [own["now"] / own["ours"] for own in self.rounds]

    def __str__(self) -> str:
        """The table."""
        rows: tuple[tuple[str, Any, str], ...] = (
            ("forward and backward, ms", self.ms, ".1f"), ("of it head and loss", self.share_of_step, ".1%"),
            ("peak memory, GiB", self.gib, ".2f"), ("loss, nats", self.nats, ".4f"),
        )  # fmt: skip
        lines = [f"{'':26}{'now':>10}{'cce_kernels':>14}{'decoder alone':>16}"]
        for words, of, form in rows:
            cells = [f"{of[name]:{form}}" if of.get(name) is not None else "-" for name in ("now", "ours", "decoder")]
            lines.append(f"{words:26}{cells[0]:>10}{cells[1]:>14}{cells[2]:>16}")
        speed = f"{median(self.speed_up):.2f} ({min(self.speed_up):.2f} to {max(self.speed_up):.2f})"
        lines += ["", f"with cce_kernels {speed} times as fast", f"switch: {self.switch}"]
        return "\n".join([self.setting, "", *lines])


def profile(model: Any, batch: Any, *, rounds: int = 5, **options: Any) -> Profile:
    """Measure what a causal language model's head and loss cost, and what this package's loss costs in their place.

    Three passes take turns in every round, forward and backward: the model as it stands; a copy with the same weights
    after `patch`; and its decoder alone. Head and loss are the difference from the latter. The model's gradients are
    lost. Its optimizer is not run. `print` shows the result as a table.

    Args:
        model: a causal language model of transformers or FLA in training mode, on one device, not compiled, wrapped or
            patched.
        batch: token ids (B, T), which are their own labels; or a mapping with the arguments of the model's forward.
        rounds: how often each pass is timed, at least 1.
        options: options of `patch`.

    Raises:
        TypeError, ValueError: `patch` refuses the model, it returns no loss, or an argument is wrong. The message says
            what to give.
    """
    if as_integer("rounds", rounds) < 1:
        raise ValueError(f"rounds: must be at least 1, got {rounds}")
    given = {"input_ids": batch} if isinstance(batch, Tensor) else batch
    if not isinstance(given, Mapping) or not isinstance(given.get("input_ids"), Tensor):
        raise TypeError("batch: must be token ids (B, T), or a mapping of the model's arguments with input_ids")
    given = {"labels": given["input_ids"], "use_cache": False, **given}
    patched, switch = copy.copy(model), "cce_kernels.patch(model)"
    if source(inspect.unwrap(innermost(getattr(model, "forward", None)))).startswith("liger_kernel"):
        vars(patched).pop("forward", None)
        switch = f"del model.forward; {switch}"
    patch(patched, **options)
    if not model.training:
        raise ValueError("model: is in evaluation mode, in which no step is trained; call model.train() first")
    inner = model.get_decoder()
    of_decoder = {name: given[name] for name in inspect.signature(inner.forward).parameters.keys() & given.keys()}

    def step(of: Any) -> Tensor:
        loss = of(**given).loss
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise ValueError(
                f"model: a {type(model).__name__} returned no loss with a gradient, so no step is measured"
            )
        loss.backward()
        return loss.detach()

    def decoder() -> None:
        hidden = inner(**of_decoder)[0]
        if hidden.requires_grad:
            hidden.backward(torch.ones_like(hidden))

    device = next(model.parameters()).device
    passes = {"now": lambda: step(model), "ours": lambda: step(patched), "decoder": decoder}
    nats = {name: step(of).item() for name, of in (("now", model), ("ours", patched))}
    gib = {name: _once(run, model, device)[1] for name, run in passes.items()}
    times = [{name: _once(run, model, device)[0] for name, run in passes.items()} for _ in range(rounds)]
    model.zero_grad()
    ms = {name: median(one[name] for one in times) for name in passes}
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    setting = f"{type(model).__name__} on {where}, {model.dtype}, {given['labels'].numel()} tokens, {rounds} rounds"
    return Profile(setting, switch, times, ms, gib, nats)


def _once(run: Callable[[], object], model: Any, device: torch.device) -> tuple[float, float | None]:
    """Time in ms and peak in GiB of a pass that finds no gradients. The device is idle before and after."""
    gpu = device.type == "cuda"
    model.zero_grad()
    if gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    run()
    if gpu:
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - begin), torch.cuda.max_memory_allocated(device) / 2**30 if gpu else None
