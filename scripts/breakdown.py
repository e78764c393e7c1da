"""Measure where a step's memory and time go: `python scripts/breakdown.py model=gla size=1b3 loss=cce_kahan`."""

import dataclasses
from pathlib import Path

from linrnn.config import load_config, run_name
from linrnn.config.cli import run_many
from linrnn.config.schema import BreakdownConfig
from linrnn.core.files import write_json, write_text


def main(config: BreakdownConfig, overrides: list[str]) -> None:
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
    write_json(directory / f"{name}.json", dataclasses.asdict(breakdown))
    write_text(directory / f"{name}.md", markdown(breakdown))
    print(markdown(breakdown))
    print(f"wrote {directory / name}.json and .md")


if __name__ == "__main__":
    run_many(main, "breakdown", __doc__, only_here="a breakdown is measured on this machine")
