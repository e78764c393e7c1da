"""Formulas against numbers computed by hand, against torch's own counter, and against measurements on GPUs."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import parse_loss
from benchmarks.loss_rows import read_rows
from linrnn import costs
from linrnn.config import load_config
from linrnn.config.schema import Config, LossConfig
from linrnn.core.files import read_json
from linrnn.costs import MemoryEstimate, kernel_flops, loss_memory, memory_estimate, mfu, model_flops
from linrnn.costs.flops import forward_flops
from linrnn.losses.cce import CceFilterLossConfig, CceKahan, CceKahanLossConfig
from linrnn.losses.cce_apple import CceAppleLossConfig
from linrnn.losses.fla import FlaLossConfig
from linrnn.losses.liger import LigerLossConfig
from linrnn.models import build_model
from linrnn.models.architecture import MODELS, Architecture, completed, resolve

GIB, MIB = 2**30, 2**20
RESULTS = Path(__file__).resolve().parents[2] / "results"
WITHIN = 0.1  # of measured memory
STANDARD, COMPILED = LossConfig("standard"), LossConfig("compiled")
LIGER, LIGER_FP32 = LigerLossConfig("liger", "native"), LigerLossConfig("liger", "fp32")
FLA = FlaLossConfig("fla", 8)
APPLE = {name: CceAppleLossConfig("cce_apple", name) for name in ("cce", "cce_kahan_full_c", "cce_exact")}
KAHAN = CceKahanLossConfig("cce_kahan", "kahan", None)
IF_FASTER = CceFilterLossConfig("cce_filter", "kahan", None, 2.0**-12, True, None)
FILTER = replace(IF_FASTER, filter_if_faster=False)
TINY = Architecture("gla", "gla", "tiny", 3, 64, 500, True, 4, 16, 32, 96)


def tiny(model: str, **changes: Any) -> Architecture:
    heads = {"head_v_dim": 16} if model == "transformer" else {}
    return completed(replace(TINY, model=model, kind=model, **heads | changes))


@cache
def configured(*overrides: str) -> Config:
    """The configuration of these overrides, which nothing alters: hundreds of runs share a few."""
    return load_config([*overrides])


def a_run(loss: LossConfig = STANDARD, *overrides: str, **trainer: Any) -> Config:
    """A run with this loss and these settings of its trainer."""
    config = configured(*overrides)
    return replace(config, loss=loss, trainer=replace(config.trainer, **trainer))


@cache
def committed_runs() -> list[dict[str, Any]]:
    return [run for path in sorted((RESULTS / "summaries").glob("*/runs.json.xz")) for run in read_json(path)["runs"]]


def is_matched(row: dict[str, Any]) -> bool:
    """Whether a committed run has one of the four models. One with shared projections can no longer be built."""
    return row["model"] in MODELS


def architecture(row: dict[str, Any]) -> Architecture:
    """Of a committed run or search."""
    chunks = f"model.chunk_size={row['chunk_size'] or 'null'}"
    config = configured(f"model={row['model']}", chunks, f"size={row['size']}")
    arch = resolve(config.model, config.size, row["vocab_size"])
    assert row.get("n_parameters") in (None, arch.n_parameters)
    return arch


# ------------------------------------------------------------------------------------------------------ FLOPs
def test_gla_forward_flops_of_a_tiny_model_by_hand():
    flops = forward_flops(tiny("gla"), n_sequences=2, seq_len=128)
    tokens = 256
    assert flops == {
        # q, k: 64 x 64; v, g: 64 x 128; o: 128 x 64; gate: 64 x 16, 16 x 64
        "mixer_projections": 2 * tokens * 3 * (2 * 4096 + 3 * 8192 + 2 * 1024),
        # per head and token: the state's update 2·16·32, its reading 2·16·32
        "mixer_scan": tokens * 3 * 4 * (1024 + 1024),
        "mlp": 2 * tokens * 3 * 3 * 64 * 96,
        "vocabulary": 2 * tokens * 64 * 500,
    }
    assert model_flops(tiny("gla"), 2, 128) == 3 * sum(flops.values())


@pytest.mark.parametrize("model", ["gated_deltanet", "kda", "transformer"])
def test_scans_by_hand(model):
    """K = 16, V = 32: the state is read for the key, updated, and read. Attention needs the causal pairs."""
    pairs = sum(1 for query in range(128) for key in range(128) if key <= query)
    of_head = pairs * (2 * 16 + 2 * 16) if model == "transformer" else 128 * 3 * 2 * 16 * 32
    assert forward_flops(tiny(model), 1, 128)["mixer_scan"] == 3 * 4 * of_head


def test_mfu_is_the_share_of_all_devices_peak():
    arch, speed = tiny("gla"), 1e6
    options = {"seq_len": 128, "device_name": "NVIDIA H200", "precision": "bf16"}
    one = mfu(arch, tokens_per_second=speed, **options)
    assert one == pytest.approx(model_flops(arch, 1, 128) / 128 * speed / 989e12)
    assert mfu(arch, tokens_per_second=speed, n_devices=2, **options) == pytest.approx(one / 2)
    for nothing in ({"tokens_per_second": None}, {"device_name": "cpu"}):
        assert mfu(arch, **{"tokens_per_second": speed, **options, **nothing}) is None


@pytest.mark.parametrize("model", MODELS)
def test_products_equal_those_that_torch_counts_in_the_real_model(model):
    arch = tiny(model, num_layers=1)
    language_model = build_model(arch, device="cpu", seed=0)
    block = language_model.blocks[0]
    linears = [name for name, module in block.attn.named_modules() if isinstance(module, nn.Linear)]
    with FlopCounterMode(display=False) as counter:
        language_model(torch.randint(0, 500, (2, 65))) @ language_model.head_weight.T
    counts = {name: sum(by_operation.values()) for name, by_operation in counter.get_flop_counts().items()}
    expected = forward_flops(arch, 2, 65)
    name_of_block = next(name for name in counts if name.endswith("layers.0"))
    assert sum(counts[f"{name_of_block}.attn.{name}"] for name in linears) == expected["mixer_projections"]
    assert counts[f"{name_of_block}.mlp"] == expected["mlp"]
    assert counts["Global"] - counts["LanguageModel"] == expected["vocabulary"]
    hidden = torch.randn(2, 65, 64, requires_grad=True)
    out = block.mlp(hidden).sum()
    with FlopCounterMode(display=False) as counter:
        out.backward()
    assert (
        counter.get_total_flops()
        == kernel_flops(arch, a_run(batch_size=2, seq_len=65), "bf16")["mlp"] - expected["mlp"]
    )


@pytest.mark.parametrize(
    ("loss", "products"),
    [
        (STANDARD, 3),
        (LIGER, 3),
        (FLA, 3),
        (KAHAN, 4),  # so small that a GPU waits for launches
        (APPLE["cce_exact"], 4),
        (LossConfig("torch_native"), 4),
    ],
)
def test_vocabulary_products_of_each_loss_on_the_device(loss, products):
    flops = kernel_flops(tiny("gla"), a_run(loss, batch_size=2, seq_len=128), "bf16")
    assert flops["vocabulary"] == products * 2 * 256 * 64 * 500


def test_cce_takes_three_products_where_its_exponentials_fit_and_four_where_not():
    """A filter on one gradient computes the logits twice: it has no lists."""
    arch = tiny("gla", hidden_size=256, vocab_size=32000)
    one_sided = replace(FILTER, filter_unbiased=False, filter_c=False)
    for loss, precision, products in (
        (KAHAN, "bf16", 3), (replace(KAHAN, workspace_mib=8), "bf16", 4), (KAHAN, "fp32", 4), (one_sided, "bf16", 5)
    ):  # fmt: skip
        flops = kernel_flops(arch, a_run(loss, batch_size=8, seq_len=2048), precision)
        assert flops["vocabulary"] == products * 2 * 8 * 2048 * 256 * 32000


def test_activation_checkpointing_adds_one_forward_pass_of_the_blocks():
    arch = tiny("kda")
    plain, selective, full = (
        kernel_flops(arch, a_run(batch_size=2, seq_len=128, activation_checkpointing=mode), "bf16")
        for mode in ("none", "selective", "full")
    )
    again = forward_flops(arch, 2, 128) | {"vocabulary": 0}
    assert {name: full[name] - plain[name] for name in plain} == {**dict.fromkeys(plain, 0), **again}
    assert selective == {**plain, "mixer_scan": full["mixer_scan"]}, "no linear layer is computed again"


# ---------------------------------------------------------------------------------------------- peak and time
@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H200", "bf16_autocast", 989),
        ("NVIDIA H200", "fp32", 67),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA GH200 480GB", "bf16", 989),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L400", "bf16", None),
        ("cpu", "bf16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
    ],
)
def test_peaks_are_the_datasheets_dense_rates(name, precision, tflops):
    peak = costs.peak_flops_per_second(name, precision)
    assert peak == (tflops and tflops * 1e12)


# ----------------------------------------------------------------------------------------------------- memory
def committed() -> Iterator[tuple[dict[str, Any], int]]:
    """Every finished run of a matched model, and every probe of a largest batch that fitted, with its peak in bytes.

    Without float8, whose memory training says to be unknown. Kernels of the small size's first runs on an H200 had
    another workspace.
    """
    for run in committed_runs():
        older = run["size"] == "mve" and "H200" in (run["device"] or "") and run["loss"] == "cce_kahan"
        unknown = not is_matched(run) or "trainer.float8=blocks" in run["training"]
        if run["status"] == "finished" and not older and not unknown:
            yield run, run["memory_bytes"]["peak"]
    for answer in (answer for path in RESULTS.glob("summaries/*/max_batches.json.xz") for answer in read_json(path)):
        for probe in (probe for probe in answer["probes"] if probe["fits"]):
            yield answer | {"batch_size": probe["batch"], "precision": "bf16_autocast"}, probe["peak_bytes"]


def foreseen(row: dict[str, Any]) -> MemoryEstimate:
    options = [f"loss.{key}={'null' if value is None else value}" for key, value in row["loss_options"].items()]
    keys = ("batch_size", "seq_len", "activation_checkpointing", "accumulation_steps")
    config = a_run(configured(f"loss={row['loss']}", *options).loss, **{key: row[key] for key in keys})
    return memory_estimate(architecture(row), config, row["precision"])


def test_peaks_and_activations_are_foreseen_within_ten_percent_for_every_committed_run_and_probe():
    """Activations not of compiled blocks, which save fewer casts."""
    seen = set()
    for row, peak in committed():
        seen.add((row["model"], row["activation_checkpointing"]))
        found, measured = foreseen(row), row.get("memory_bytes", {})
        assert found.peak == pytest.approx(peak, rel=WITHIN), (row["group"], row["run_name"], row["batch_size"])
        if "activations" in measured and "trainer.compile=blocks" not in row["training"]:
            for name in ("parameters", "gradients", "optimizer", "activations"):
                assert found.components()[name] == pytest.approx(measured[name], rel=WITHIN), (row["run_name"], name)
    assert seen >= {(model, kind) for model in MODELS for kind in ("none", "selective", "full")}


@pytest.mark.parametrize("gpu", ["nvidia_h100_80gb_hbm3", "nvidia_h200"])
def test_our_losses_take_the_memory_that_is_foreseen_on_every_shape_of_the_grid(gpu):
    """Also where inputs are copied, because D is no multiple of 64."""
    rows = [
        row
        for row in read_rows(RESULTS / "bench_loss" / gpu)
        if row.set == "grid" and row.backend in ("cce_kahan", "cce_filter")
    ]
    assert len(rows) == 25 * 2 * 3, "shapes, kinds of logits, losses"
    assert any(row.d % 64 for row in rows)
    for row in rows:
        _, backward = loss_memory(parse_loss(row.label), row.n, row.d, row.v, 2)
        beside = backward - 2 * row.d * (row.n + row.v)  # without both gradients
        if row.backend == "cce_kahan":
            assert row.extra_mib == pytest.approx(beside / MIB, rel=WITHIN), (row.shape, row.label)
        else:  # lists of few rows do not fill the workspace
            assert 0.5 * beside / MIB < (row.extra_mib or 0) < 1.1 * beside / MIB, (row.shape, row.label)


SHAPES = ((8192, 2304, 256000), (16384, 2048, 128256), (16384, 256, 32000), (32768, 1024, 32000))


@pytest.mark.parametrize(
    ("loss", "measured_mib"),
    [
        (STANDARD, (24000, 24048, 6000, 12000)),
        (COMPILED, (5161, 4573, 1024, 2127)),
        (LIGER, (1224, 690, 39, 189)),
        (LIGER_FP32, (3411, 1567, 55, 252)),
        (FLA, (3920, 2585, 416, 955)),
        (APPLE["cce"], (1163, 566, 24, 127)),
        (APPLE["cce_kahan_full_c"], (3449, 1632, 63, 316)),
        (APPLE["cce_exact"], (3447, 1631, 63, 316)),
    ],
)
def test_other_losses_take_the_memory_that_was_measured(loss, measured_mib):
    for shape, measured in zip(SHAPES, measured_mib, strict=True):
        assert max(loss_memory(loss, *shape, 2)) / MIB == pytest.approx(measured, rel=WITHIN)


def test_cce_stays_within_its_workspace_and_needs_no_more_than_the_whole_vocabulary():
    n, d, v = 8192, 2304, 256000
    gradients, lost = (n + v) * d * 2, n * d
    for workspace in (128, 512):  # too little for any stored exponentials with their sums
        extra = loss_memory(replace(KAHAN, workspace_mib=workspace), n, d, v, 2)[1] - gradients - lost
        assert 0.9 * workspace * MIB < extra <= workspace * MIB
    assert loss_memory(KAHAN, 256, 64, 500, 4)[1] == (256 + 500) * 64 * 4 + 256 * 500 * 4  # gradients, all logits


def test_a_filter_is_foreseen_as_what_it_does():
    """One that may drop nothing is none. One that need be faster is none on small shapes, and over shards."""
    large, small = (16384, 2048, 128256, 2), (16384, 256, 32000, 2)
    for loss, shape, like in (
        (replace(FILTER, filter_mass=0.0), large, KAHAN),
        (IF_FASTER, large, FILTER),
        (IF_FASTER, small, KAHAN),
    ):
        assert loss_memory(loss, *shape) == loss_memory(like, *shape)
        assert CceKahan.products(loss, *shape) == CceKahan.products(like, *shape)
    assert loss_memory(FILTER, *large) != loss_memory(KAHAN, *large)
    config = configured("model=gla", "size=1b3")
    arch = resolve(config.model, config.size, 131072)

    def of_ranks(loss: LossConfig, ranks: int) -> tuple[Any, Any]:
        run = a_run(loss, "parallel=vocab", batch_size=8 * ranks, seq_len=2048), "bf16", ranks
        return memory_estimate(arch, *run), kernel_flops(arch, *run)

    assert of_ranks(IF_FASTER, 4) == of_ranks(KAHAN, 4)
    assert of_ranks(IF_FASTER, 1) == of_ranks(FILTER, 1) != of_ranks(KAHAN, 1)


def test_what_a_step_holds_moves_with_precision_micro_steps_and_checkpointing():
    config = configured("model=gla", "size=1b3")
    arch = resolve(config.model, config.size, 128256)

    def estimate(precision: str = "bf16_autocast", loss: LossConfig = COMPILED, **trainer: Any) -> MemoryEstimate:
        return memory_estimate(arch, a_run(loss, batch_size=8, seq_len=2048, **trainer), precision)

    mixed, pure, twice = estimate(), estimate("bf16"), estimate(accumulation_steps=2)
    components = mixed.components()
    parts = [size for name, size in components.items() if name.startswith("activations/")]
    assert components["activations"] == sum(parts)
    assert mixed.at_loss == (
        sum(components[name] for name in ("parameters", "optimizer", "activations"))
        + max(mixed.loss_forward, mixed.loss_backward)
    )
    assert pure.state["parameters"] * 2 == mixed.state["parameters"]
    assert pure.activations["weight_copies"] == 0
    assert pure.peak < 2 / 3 * mixed.peak
    assert twice.at_loss - mixed.at_loss == mixed.state["gradients"], "of the earlier micro-step"
    selective, full = (estimate(activation_checkpointing=kind) for kind in ("selective", "full"))
    assert mixed.peak > selective.peak > full.peak
    eager, ours = (estimate(activation_checkpointing="full", loss=loss).peak for loss in (STANDARD, KAHAN))
    assert eager > 1.3 * ours, "with checkpointing the output layer decides the peak"
