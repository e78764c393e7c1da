"""A group of runs as people read it: a table with every run's figures and origin, and a plot of the losses."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from linrnn.errors import ConfigError
from linrnn.results import Run

GIB = 2**30
BASELINES = ("compiled", "standard")  # the losses that ratios are taken to: the first one that a group has
SMOOTHED_STEPS = 20
# What two runs must share for their figures to stand in one table.
SAME_ORIGIN = ("packages", "gpus", "cuda", "gpu_driver", "cpu", "git")


def write_report(runs: list[Run], directory: Path, title: str) -> list[Path]:
    """Write report.md, runs.json (all summaries) and loss_curves.png; returns their paths.

    Raises:
        ConfigError: the runs were made on different GPUs, with different versions or at different commits.
    """
    for key in SAME_ORIGIN:
        if len({json.dumps(run.environment.get(key), sort_keys=True) for run in runs}) > 1:
            raise ConfigError(
                f"the runs of {title} differ in {key}: their figures do not belong in one table",
                "give each origin a group of its own",
            )
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / name for name in ("report.md", "runs.json", "loss_curves.png")]
    paths[0].write_text(_markdown(runs, title))
    summaries = [run.summary for run in runs]
    paths[1].write_text(json.dumps({"environment": runs[0].environment, "runs": summaries}, indent=1) + "\n")
    _plot(runs, paths[2], title)
    return paths


def _markdown(runs: list[Run], title: str) -> str:
    lines = [
        f"# {title}",
        "",
        "| model | size | loss | status | train loss, nats | valid loss, nats | bits per byte | peak memory, GiB "
        "| ratio | tokens/s | ratio | step, ms | MFU |",
        "|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    baseline = _baseline(runs)
    baselines = {_pair(run.summary): run.summary for run in runs if run.summary["loss"] == baseline}
    for run in sorted(runs, key=lambda run: (_pair(run.summary), run.summary["loss"])):
        s, base = run.summary, baselines.get(_pair(run.summary), {})
        cells = [
            s["model"],
            s["size"],
            s["loss"],
            s["status"],
            _show(s["train_loss_nats"], ".4f"),
            _show(s["valid_loss_nats"], ".4f"),
            _show(s["valid_bits_per_byte"], ".4f"),
            _show(s["peak_memory_bytes"], ".2f", 1 / GIB),
            _show(_ratio(s["peak_memory_bytes"], base.get("peak_memory_bytes")), ".2f"),
            _show(s["tokens_per_second"], ",.0f"),
            _show(_ratio(s["tokens_per_second"], base.get("tokens_per_second")), ".3f"),
            _show(s["step_time_ms_median"], ".2f"),
            _show(s["mfu"], ".1%"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    first = runs[0]
    packages = ", ".join(f"{name} {version}" for name, version in first.environment["packages"].items() if version)
    gpus = ", ".join(gpu["name"] for gpu in first.environment["gpus"]) or first.environment["cpu"]
    git = first.environment["git"] or {}
    lines += [
        "",
        "Train loss: mean of the last 50 steps. Speed: median over the steps after the warm-up. Peak memory: "
        f"{first.summary['peak_memory_is']}. Ratios: to `{baseline}` of the same model and size.",
        "",
        f"* device: {gpus}, driver {first.environment['gpu_driver']}, Python {first.environment['python']}",
        f"* commit: {git.get('commit')}{' with uncommitted changes' if git.get('dirty') else ''}",
        f"* versions: {packages}",
        "* commands:",
        "",
        "```",
        *[run.summary["command"] for run in runs],
        "```",
        "",
        "![loss curves](loss_curves.png)",
        "",
    ]
    return "\n".join(lines)


def _plot(runs: list[Run], path: Path, title: str) -> None:
    """Training losses, and each run's difference from the baseline below them."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(2, 1))
    curves = {_label(run.summary): dict(run.losses) for run in runs}
    baseline = _baseline(runs)
    baselines = {_pair(run.summary): dict(run.losses) for run in runs if run.summary["loss"] == baseline}
    for number, run in enumerate(runs):
        label, curve = _label(run.summary), curves[_label(run.summary)]
        style = {"color": f"C{number}", "linewidth": 1.2, "alpha": 0.9}
        top.plot(list(curve), list(curve.values()), label=label, **style)
        base = baselines.get(_pair(run.summary), {})
        if shared := [step for step in curve if step in base]:
            bottom.plot(shared, _smooth([curve[step] - base[step] for step in shared]), **style)
    top.set_ylabel("training loss, nats per token")
    top.set_title(title)
    top.legend()
    bottom.set_ylabel(f"loss - {baseline}'s, nats\n(mean of {SMOOTHED_STEPS} steps; grey: ±0.01)")
    bottom.set_xlabel("optimizer step")
    bottom.axhspan(-0.01, 0.01, color="0.9")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _smooth(values: list[float]) -> list[float]:
    """Running mean over the last SMOOTHED_STEPS values."""
    windows = (values[max(0, end - SMOOTHED_STEPS) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def _baseline(runs: Iterable[Run]) -> str:
    losses = {run.summary["loss"] for run in runs}
    return next((name for name in BASELINES if name in losses), BASELINES[0])


def _pair(summary: dict[str, Any]) -> tuple[str, str]:
    return summary["model"], summary["size"]


def _label(summary: dict[str, Any]) -> str:
    return f"{summary['model']} x {summary['size']} x {summary['loss']}, seed {summary['seed']}"


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _show(value: float | None, form: str, scale: float = 1.0) -> str:
    if value is None:
        return "-"
    return f"{value:{form}}" if scale == 1.0 else f"{value * scale:{form}}"
