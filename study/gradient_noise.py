"""How much noise the sampled gradient adds to a batch's own.

    python study/gradient_noise.py CHECKPOINT … [-- data.cache_dir=…] >> results/gradient_noise/GPU.jsonl

Over all parameters, over the embedding alone (tied, so it is the head, too) and over the layers, for every checkpoint:

    signal   |E g_i|²: the squared norm of the mean gradient over batches i, without the share of their noise
    batch    E |g_i - E g_i|²: how far exact gradients of single batches scatter
    sample   E |s_ij - g_i|²: how far draws j of the sampled gradient scatter around their batch's exact one
    bias     E |mean_j s_ij - g_i|² - sample / draws: zero on average where sampling is unbiased
    rounding E |r_i - g_i|²: how far torch.compile's gradients lie from ours, which only rounding tells apart

The filter draws from a seed of the targets in their order. Another order of a batch's tokens is therefore another draw
of the same gradient.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from linrnn.config import data_for, load_config, read_config
from linrnn.data import Batch, BatchesOnce
from linrnn.inference.load import build, directory_of_tokenizer, open_data
from linrnn.losses import build_loss
from linrnn.models.language_model import compute_dtype, loss_inputs
from linrnn.report.plot_style import COLOURS, subplots
from linrnn.training import checkpoint
from linrnn.training.runtime import resolve_device, resolve_precision

BATCHES, SAMPLED, DRAWS = 16, 8, 6  # exact gradients; batches whose gradient is drawn, too; draws of each
SEQUENCES = (8, 2)  # of a batch


def noise(source: str, overrides: list[str]) -> Iterator[dict[str, Any]]:
    """Measure a checkpoint on its validation text: a row for each batch size and set of parameters."""
    directory, device = checkpoint.required("checkpoint", source), resolve_device("auto")
    step, config = checkpoint.read_progress(directory).step, read_config(directory / "config.yaml")
    data = open_data(directory, config.data, data_for(config.data, overrides, directory_of_tokenizer(directory)))
    precision, seq_len = resolve_precision(config.trainer.precision, device), config.trainer.seq_len
    shape: dict[str, Any] = {"seq_len": seq_len, "batch_size": config.trainer.batch_size}
    batches = BatchesOnce(data.valid, max_tokens=None, reset_at_document=config.data.reset_at_document, **shape)
    exact, sampled, compiled = (
        build_loss(load_config(options).loss, device=device, dtype=compute_dtype(precision))
        for options in (["loss=cce_kahan"], ["loss=cce_filter", "loss.filter_if_faster=false"], ["loss=compiled"])
    )
    model, generator = build(directory, config, device).train(), torch.Generator().manual_seed(0)

    def gradient(loss: Any, batch: Batch, order: Tensor | None = None) -> dict[str, Tensor]:
        """Of the mean loss, fp32; `order` (N,) permutes the tokens on their way into the loss."""
        model.zero_grad(set_to_none=True)
        hidden_ND, weight_VD, labels_N = loss_inputs(model, batch, precision, device)
        if order is not None:
            hidden_ND, labels_N = hidden_ND[order], labels_N[order]
        output = loss(hidden_ND, weight_VD, labels_N)
        (output.sum_nats / output.n_tokens).backward()
        found = {name: p.grad.float().flatten() for name, p in model.named_parameters() if p.grad is not None}
        is_embedding = {name: "embeddings" in name or "lm_head" in name for name in found}
        return {
            "all": torch.cat([*found.values()]),
            "embedding": torch.cat([found[name] for name in found if is_embedding[name]]),
            "layers": torch.cat([found[name] for name in found if not is_embedding[name]]),
        }

    for sequences in SEQUENCES:
        total: dict[str, Tensor] = {}  # of exact gradients, over batches; of their squared norms, in fp64
        squares: dict[str, float] = {}
        scatter: dict[str, list[float]] = {}
        bias: dict[str, list[float]] = {}
        rounding: dict[str, list[float]] = {}
        for number in range(BATCHES):
            whole = batches[number]
            batch = Batch(whole.input_ids[:sequences], whole.labels[:sequences], None, 0)
            g = gradient(exact, batch)
            draws = DRAWS if number < SAMPLED else 0
            orders = [torch.randperm(batch.labels.numel(), generator=generator).to(device) for _ in range(draws)]
            drawn = [gradient(sampled, batch, order) for order in orders]
            rounded = gradient(compiled, batch) if draws else {}
            for name, value in g.items():
                total[name] = total[name] + value if name in total else value.clone()
                squares[name] = squares.get(name, 0.0) + value.double().square().sum().item()
                if drawn:
                    off = [one[name] - value for one in drawn]
                    mean_off = sum(off[1:], off[0]) / draws
                    scatter.setdefault(name, []).append(sum(one.square().sum().item() for one in off) / draws)
                    bias.setdefault(name, []).append(mean_off.square().sum().item() - scatter[name][-1] / draws)
                    rounding.setdefault(name, []).append((rounded[name] - value).square().sum().item())
        for name, summed in total.items():
            mean = (summed / BATCHES).double().square().sum().item()
            of_batch = (squares[name] - BATCHES * mean) / (BATCHES - 1)
            sample = sum(scatter[name]) / SAMPLED
            yield {
                "step": step, "sequences": sequences, "tokens": batch.labels.numel(), "parameters": name,
                "signal": mean - of_batch / BATCHES, "batch": of_batch, "sample": sample,
                "bias": sum(bias[name]) / SAMPLED, "rounding": sum(rounding[name]) / SAMPLED,
                "sample_over_batch": sample / of_batch, "rounding_over_batch": sum(rounding[name]) / SAMPLED / of_batch,
                "sample_by_batch": scatter[name],
                "draws": DRAWS, "batches": BATCHES,
            }  # fmt: skip


def draw(rows: list[dict[str, Any]], large: list[dict[str, Any]]) -> Any:
    """The share of sampling in a batch's noise, by step: 10M parameters with two batch sizes, and 448M."""
    figure, axes = subplots(1, 1, figsize=(7.2, 3.8))
    lines = [("10M", sequences, rows, "sample_over_batch", "o-") for sequences in SEQUENCES]
    lines += [("448M", SEQUENCES[0], large, "sample_over_batch", "s-")]
    lines += [("448M, torch.compile's rounding", SEQUENCES[0], large, "rounding_over_batch", "x:")]
    for (size, sequences, of, key, style), colour in zip(lines, COLOURS[:4], strict=True):
        own = sorted(
            (row["step"], 100 * row[key], row["tokens"])
            for row in of
            if (row["sequences"], row["parameters"]) == (sequences, "all")
        )
        label = f"{size}, batches of {own[0][2]:,} tokens" if of is rows else size
        axes.plot([step for step, _, _ in own], [share for _, share, _ in own], style, color=colour, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("optimizer step of 16,384 tokens")
    axes.set_ylabel("variance, % of the batch's own")
    axes.legend(fontsize=8)
    most = max(100 * row["sample_over_batch"] for row in rows + large if row["parameters"] == "all")
    figure.suptitle(f"Sampling adds at most {most:.1f} % to the noise that a batch has anyway")
    return figure


def main(arguments: list[str]) -> None:
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    for source in arguments[:cut]:
        for row in noise(source, arguments[cut + 1 :]):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
