"""The commands that train, or measure training."""

import os
from pathlib import Path

from linrnn.config import load_config, run_name
from linrnn.config.bounds import check_outputs
from linrnn.config.schema import (
    BreakdownConfig,
    Config,
    FindMaxBatchConfig,
    RunSweepConfig,
)
from linrnn.core.files import write_json, write_text
from linrnn.core.output import say


def train(config: Config) -> None:
    """Train one model with one loss backend."""
    if not config.dry_run:
        check_outputs(config)
    if os.environ.get("RANK", "0") == "0":
        say("starting: importing PyTorch")
    # Imported here, because torch takes seconds: --help and wrong keys answer at once.
    from linrnn.distributed import join

    with join(config.parallel, config.device) as ranks:
        if not config.dry_run:
            from linrnn.training.trainer import Trainer

            Trainer(config, ranks).fit()
        elif ranks.is_first:
            from linrnn.experiments.dry_run import print_forecast

            print_forecast(config)


def breakdown(config: BreakdownConfig, overrides: list[str]) -> None:
    """Measure where a step's memory and time go."""
    from linrnn.experiments.breakdown import check_parts, markdown, measure
    from linrnn.models import tuning
    from linrnn.training.trainer import Trainer

    run = load_config([*overrides, f"trainer.max_steps={config.warmup_steps + config.steps + 3}"])
    check_parts(run.trainer)
    name = run_name(run)
    trainer = Trainer(run)
    with tuning.show_progress(), tuning.during(name):
        breakdown = measure(trainer, name, config.warmup_steps, config.steps)
    directory = Path(config.output)
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / f"{name}.json", breakdown)
    write_text(directory / f"{name}.md", markdown(breakdown))
    print(markdown(breakdown))
    print(f"wrote {directory / name}.json and .md")


def find_max_batch(config: FindMaxBatchConfig, overrides: list[str]) -> None:
    """Find the largest batch for a memory budget."""
    from linrnn.experiments.max_batch import find_max_batch

    find_max_batch(config, overrides, say)


def sweep(config: RunSweepConfig, overrides: list[str]) -> None:
    """Run many runs, each in its own process, and skip finished ones."""
    from linrnn.experiments.sweep import run_sweep

    run_sweep(config, overrides, say)
