"""How sparse a model's softmax is: `python study/sparsity.py checkpoints=[results/…]`.

The share of entries above 2^-k and the mass below, by k and token frequency. An entry is one vocabulary token at one
position. Bands group the tokens by their frequency among the labels: the most frequent 1/1600 of the vocabulary, up to
1 %, up to 10 %, and the rest.

A second table gives the mass of the vocabulary's first entries in three orders. Ordered by mean probability they have
the most mass. The two other orders are known before the softmax is computed.
"""

import math
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.reading import open_reading
from linrnn.config.cli import run
from linrnn.config.compose import add_command
from linrnn.config.schema import MUST_BE_GIVEN, ReadingConfig, device, option
from linrnn.core.errors import ConfigError
from linrnn.core.files import write_json, write_text
from linrnn.core.tables import Table
from linrnn.data import Batch
from linrnn.losses import IGNORE_INDEX
from linrnn.models import LanguageModel, tuning
from linrnn.models.facts import model_in_words
from linrnn.models.language_model import loss_inputs
from linrnn.report.plot_style import COLOURS, DASHES, GREY, legend_below, save, subplots

EXPONENTS = 32  # 2^-0 to 2^-31; smaller values count as the last
BANDS = {"top 1/1600": 1 / 1600, "to 1 %": 0.01, "to 10 %": 0.1, "rest": 1.0}
PAPER_EXPONENT = 12  # the CCE paper's threshold is 2^-12
FIRST = {"1/32": 1 / 32, "1/8": 1 / 8}  # shares of the vocabulary
ORDERS = ("mean probability", "logit of the mean hidden state", "frequency")
_BLOCK_ENTRIES = 2**24  # entries of the softmax computed at a time


@dataclass
class Config(ReadingConfig):
    """`python study/sparsity.py checkpoints=[results/default/RUN] [data=text data.path=…]`"""

    checkpoints: list[str] = option(MUST_BE_GIVEN, "runs (their newest checkpoints) or single checkpoints", path="read")
    max_tokens: int | None = option(100000, "tokens of the validation split to read; null: all", minimum=1)
    output_dir: str = option("results/sparsity", "for sparsity.md, .json and .png, which are replaced", path="written")
    device: str = device()


add_command("profile_sparsity", Config)


@dataclass
class Profile:
    """Entries and softmax mass of one model, by band and exponent.

    Attributes:
        share_above: `[band][k]`: share of the band's entries with p ≥ 2^-k. Band "all" is the whole vocabulary.
        mass_below: `[band][k]`: mean softmax mass per token of the band's entries with p < 2^-k.
        mass_of_first: `[order][i]`: mean softmax mass per token of the first entries in that order (ORDERS); FIRST says
            how many.
    """

    name: str
    vocab_size: int
    n_tokens: int
    loss_nats: float
    share_above: dict[str, list[float]]
    mass_below: dict[str, list[float]]
    mass_of_first: dict[str, list[float]]


def profile(
    name: str,
    model: LanguageModel,
    batches: Iterable[Batch],
    counts_V: Tensor,
    *,
    precision: str,
    device: torch.device,
) -> Profile:
    """Read the softmax at every label of `batches`.

    Args:
        counts_V: (V,) how often each token occurs, for the bands.
    """
    bands_V = bands(counts_V).to(device)
    entries = torch.zeros(len(BANDS), EXPONENTS, dtype=torch.float64, device=device)
    mass, n_tokens, nats = torch.zeros_like(entries), 0, 0.0
    total_p_V, total_z_V = (torch.zeros(len(counts_V), dtype=torch.float64, device=device) for _ in range(2))
    with torch.no_grad(), tuning.during(lambda: f"{name}: {n_tokens:,} tokens"):
        for batch in batches:
            hidden_ND, weight_VD, labels_N = loss_inputs(model, batch, precision, device)
            hidden_ND, labels_N = (x[labels_N != IGNORE_INDEX] for x in (hidden_ND, labels_N))
            total_z_V += weight_VD.double() @ hidden_ND.sum(dim=0, dtype=torch.float64)
            rows = max(1, _BLOCK_ENTRIES // len(weight_VD))
            for hidden, labels in zip(hidden_ND.split(rows), labels_N.split(rows), strict=True):
                log_p = (hidden.float() @ weight_VD.float().T).log_softmax(dim=1)
                nats -= log_p.gather(1, labels[:, None]).sum().item()
                n_tokens += len(labels)
                add_histograms(log_p, bands_V, entries, mass)
                total_p_V += log_p.exp().sum(dim=0)
    sizes = torch.bincount(bands_V, minlength=len(BANDS)).double().cpu() * max(n_tokens, 1)
    above, below = entries.cpu().cumsum(dim=1), mass.cpu()
    below = (below.sum(dim=1, keepdim=True) - below.cumsum(dim=1)) / max(n_tokens, 1)
    names = [*BANDS, "all"]
    share = torch.cat((above / sizes.clamp(min=1)[:, None], above.sum(dim=0, keepdim=True) / sizes.sum().clamp(min=1)))
    below = torch.cat((below, below.sum(dim=0, keepdim=True)))
    return Profile(
        name, len(counts_V), n_tokens, nats / max(n_tokens, 1),
        dict(zip(names, share.tolist(), strict=True)), dict(zip(names, below.tolist(), strict=True)),
        mass_of_first(total_p_V / max(n_tokens, 1), (total_p_V, total_z_V, counts_V.to(device))),
    )  # fmt: skip


def mass_of_first(mean_p_V: Tensor, orders: Iterable[Tensor]) -> dict[str, list[float]]:
    """The mass of mean_p_V (V,) in the first entries by each of ORDERS, largest number (V,) first; see Profile."""
    ends = [math.ceil(share * len(mean_p_V)) - 1 for share in FIRST.values()]
    sums = (mean_p_V[by_V.argsort(descending=True, stable=True)].cumsum(0)[ends].tolist() for by_V in orders)
    return dict(zip(ORDERS, sums, strict=True))


def bands(counts_V: Tensor) -> Tensor:
    """Each token's band (V,), 0 for the most frequent tokens. Ties are ordered by index."""
    ranks = torch.empty_like(counts_V)
    ranks[counts_V.argsort(descending=True, stable=True)] = torch.arange(len(counts_V), device=counts_V.device)
    ends = torch.tensor([math.ceil(share * len(counts_V)) for share in BANDS.values()], device=counts_V.device)
    return torch.bucketize(ranks, ends, right=True)


def add_histograms(log_p: Tensor, bands_V: Tensor, entries: Tensor, mass: Tensor) -> None:
    """Add entries (N, V) to both histograms (bands, EXPONENTS). Bin k counts 2^-k ≤ p < 2^-(k - 1)."""
    exponents = (-log_p / math.log(2)).ceil().clamp(0, EXPONENTS - 1).long()
    cells = (bands_V[None, :] * EXPONENTS + exponents).flatten()
    entries += torch.bincount(cells, minlength=entries.numel()).view_as(entries)
    mass += torch.bincount(cells, log_p.exp().double().flatten(), minlength=mass.numel()).view_as(mass)


def write(profiles: list[Profile], directory: Path) -> list[Path]:
    """Write sparsity.json, sparsity.md and sparsity.png. Returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    data, page, picture = (directory / f"sparsity.{ending}" for ending in ("json", "md", "png"))
    write_json(data, [asdict(profile) for profile in profiles])
    write_text(page, markdown(profiles))
    save(_figure(profiles), picture)
    return [page, data, picture]


def markdown(profiles: list[Profile]) -> str:
    """The two tables: one row per model and band, and one per model and share."""
    k = PAPER_EXPONENT
    by_band = [
        (
            *(p.name, f"{p.vocab_size:,}", f"{p.n_tokens:,}", f"{p.loss_nats:.3f}", band),
            *(f"{100 * above[i]:.4f}" for i in (6, 9, k, 15)),
            f"{p.mass_below[band][k]:.4f}",
        )
        for p in profiles
        for band, above in p.share_above.items()
    ]
    columns = (
        *("model", "vocabulary", "tokens read", "loss, nats", "band"),
        *("2^-6", "2^-9", f"2^-{k}", "2^-15", f"mass below 2^-{k}"),
    )
    by_order = [
        (p.name, share, *(f"{p.mass_of_first[order][i]:.4f}" for order in ORDERS))
        for p in profiles
        for i, share in enumerate(FIRST)
    ]
    models = ", ".join(dict.fromkeys(p.name.partition(",")[0] for p in profiles))
    lines = [
        f"# Sparsity of the softmax: {models}",
        "",
        f"Entries with p ≥ 2^-k, in per cent of the band's; mass (mean per token) of its entries below 2^-{k}. The CCE",
        f"paper reports fewer than 0.02 % above 2^-{k}, for a Transformer with 256,000 tokens' vocabulary. Bands: the",
        "vocabulary ordered by how often each token occurs, cut after its first 1/1600, 1 % and 10 %.",
        "",
        *Table(columns, by_band, words=("model", "band")).markdown(),
        "",
        "Mass (mean per token) of the vocabulary's first entries, in orders by the tokens read:",
        "",
        *Table(("model", "first", *ORDERS), by_order, words=("model",)).markdown(),
    ]
    return "\n".join([*lines, "", "![share of entries above 2^-k](sparsity.png)", ""])


def _figure(profiles: list[Profile]) -> Any:
    figure, (left, right) = subplots(1, 2, figsize=(9.5, 4))
    exponents = range(EXPONENTS)
    lines = {}
    for i, p in enumerate(profiles):
        style = {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i // len(COLOURS)]}
        left.plot(exponents, p.share_above["all"], **style)
        [lines[in_words(p.name)]] = right.plot(exponents, p.mass_below["all"], **style)
    left.set_yscale("log")
    left.set_ylabel("share of entries with p ≥ 2^-k")
    right.set_ylabel("softmax mass below 2^-k, mean per token")
    for axes in (left, right):
        axes.set_xlabel("k")
        lines[f"the CCE paper's threshold, 2^-{PAPER_EXPONENT}"] = axes.axvline(
            PAPER_EXPONENT, color=GREY, linewidth=0.8
        )
    figure.suptitle("How sparse is the softmax?")
    legend_below(figure, lines)
    return figure


def in_words(name: str) -> str:
    """A profile's name for a legend: the model and the step, without the hash of its run."""
    model, _, size = name.split(",")[0].partition(" ")
    step = re.search(r"step_(\d+)", name)
    return model_in_words(model, size) + (f", step {int(step[1])}" if step else "")


def main(config: Config) -> None:
    if not config.checkpoints:
        raise ConfigError("checkpoints=[] names no run", "name runs or checkpoints: checkpoints=[results/default/RUN]")
    profiles = []
    for source in config.checkpoints:
        reading = open_reading("checkpoints", source, config.data, config.device)
        batches = partial(reading.batches, config.max_tokens)
        counts = torch.zeros(reading.vocab_size, dtype=torch.int64)
        for batch in batches():
            counts += torch.bincount(batch.labels[batch.labels >= 0], minlength=reading.vocab_size)
        name = f"{reading.config.model.name} {reading.config.size.name}, {reading.directory.name}"
        with tuning.show_progress():
            found = profile(name, reading.model, batches(), counts, precision=reading.precision, device=reading.device)
        profiles.append(found)
        print(f"{reading.directory}: {100 * found.share_above['all'][PAPER_EXPONENT]:.4f} % above 2^-{PAPER_EXPONENT}")
    print("wrote " + ", ".join(map(str, write(profiles, Path(config.output_dir)))))


if __name__ == "__main__":
    run(main, "profile_sparsity", __doc__)
