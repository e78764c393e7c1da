"""The commands. `linrnn sweep …` and `python scripts/sweep.py …` are the same: both call :func:`start`.

What takes seconds to import, such as torch, is imported inside of them: --help and wrong keys are answered at once.
"""

import difflib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from linrnn.config import cli, load_config, run_name
from linrnn.config.bounds import check_outputs
from linrnn.config.schema import (
    BreakdownConfig,
    Config,
    EvaluateConfig,
    ExportConfig,
    FindMaxBatchConfig,
    GenerateConfig,
    ReportConfig,
    RunsConfig,
    RunSweepConfig,
)
from linrnn.core.errors import ConfigError
from linrnn.core.files import write_json, write_text
from linrnn.core.output import PROGRAM, as_started, say


# ------------------------------------------------------------------------------------------------------------- training
def train(config: Config) -> None:
    """Train one model with one loss backend."""
    if not config.dry_run:
        check_outputs(config)
    if os.environ.get("RANK", "0") == "0":
        say("starting: importing PyTorch")
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
        breakdown = measure(trainer, config.warmup_steps, config.steps)
    directory = Path(config.output)
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / f"{name}.json", breakdown)
    write_text(directory / f"{name}.md", markdown(breakdown))
    print(markdown(breakdown))
    print(f"wrote {directory / name}.json and .md")


def find_max_batch(config: FindMaxBatchConfig, overrides: list[str]) -> None:
    """Find the largest batch for a memory budget."""
    from linrnn.experiments.max_batch import find_max_batch

    find_max_batch(config, overrides)


def sweep(config: RunSweepConfig, overrides: list[str]) -> None:
    """Run many runs, each in its own process, and skip finished ones."""
    from linrnn.experiments.sweep import run_sweep

    run_sweep(config, overrides)


# ------------------------------------------------------------------------------------ data, this machine, runs, reports
def doctor(config: Config) -> None:
    """Print what can run on this machine, what cannot, why, and what to install."""
    from linrnn.experiments.doctor import diagnose

    print(as_started(diagnose(config)))


def prepare_data(config: Config) -> None:
    """Tokenise data once, or check prepared data."""
    if config.dry_run:
        raise ConfigError("dry_run: this command prepares or checks data, it has no forecast", "drop dry_run=true")
    from linrnn.data import prepare

    data = prepare(config.data)
    data.verify()
    print(data.description)
    for name, split in (("training", data.train), ("validation", data.valid)):
        counts = [f"{split.n_documents:,} documents", f"{split.n_tokens:,} tokens"]
        if split.n_bytes:
            counts.insert(1, f"{split.n_bytes:,} bytes of text")
        print(f"  {name}: {', '.join(counts)}")
    print(f"  in {data.directory}, every file as its hash in meta.json says")


def report(config: ReportConfig) -> None:
    """Write a group's report in Markdown and HTML."""
    from linrnn.report.write import make_report

    paths = make_report(config)
    print(paths[0].read_text(encoding="utf-8"))
    print("wrote " + ", ".join(str(path) for path in paths))


def runs(config: RunsConfig) -> None:
    """List the runs of a group, compare two, or write all their metrics as CSV."""
    from linrnn.report.overview import compared, overview, write_csv

    group = Path(config.results_dir) / config.group
    if len(config.compare) not in (0, 2):
        raise ConfigError(f"compare names {len(config.compare)} runs", "name two: compare=[RUN,RUN]")
    if config.csv:
        print(f"wrote {config.csv}: {write_csv(group, Path(config.csv)):,} rows")
        return
    print("\n".join(compared(group, config.compare) if config.compare else overview(group)))


# ------------------------------------------------------------------------------------------------------- trained models
def evaluate(config: EvaluateConfig) -> None:
    """Compute a checkpoint's loss, perplexity and bits per byte, or lm-eval's tasks."""
    if config.output:
        Path(config.output).parent.mkdir(parents=True, exist_ok=True)  # fails before the work
    if config.tasks:
        from linrnn.inference.tasks import evaluate_tasks

        results = evaluate_tasks(config)
    else:
        from linrnn.inference.evaluate import evaluate_loss

        results = evaluate_loss(config)
    if config.output:
        write_json(Path(config.output), {"checkpoint": config.checkpoint, **results})


def export(config: ExportConfig) -> None:
    """Export a model as a Hugging Face directory."""
    import torch

    from linrnn.inference.export import check_output, export
    from linrnn.inference.load import load_trained

    check_output(Path(config.output))  # before the model is loaded, which takes longer
    trained = load_trained(config.checkpoint, torch.device("cpu"))
    export(trained, Path(config.output))
    tokenizer = "with its tokenizer" if trained.tokenizer else "without a tokenizer (the run recorded none)"
    print(f"wrote {config.output}, {tokenizer}, from {trained.source}; load it with")
    print(f"  from linrnn.inference import load_trained; load_trained({config.output!r}).model  # CPU or GPU")
    print(f"  import fla, transformers; transformers.AutoModelForCausalLM.from_pretrained({config.output!r})")
    flash = ", and the flash_attn package" * (trained.model.config.model_type == "transformer")
    print(f"    # without linrnn; FLA's kernels need a GPU{flash}")


def generate(config: GenerateConfig) -> None:
    """Generate text from a model."""
    from linrnn.inference.generate import Printer, prompts, samples
    from linrnn.inference.load import load_trained
    from linrnn.models import tuning

    trained = load_trained(config.checkpoint, config.device)
    printer = Printer(trained)
    with tuning.show_progress():
        for one in prompts(config):
            for number, _ in enumerate(samples(trained, one, printer), start=1):
                if number < one.n_samples:
                    say("---")


# ---------------------------------------------------------------------------------------------------------- the program
@dataclass(frozen=True)
class Command:
    """A command. `main` gets its configuration, and with `makes_runs` all other overrides, which are for its runs."""

    main: Callable[..., int | None]
    config_name: str = "train"  # of its schema
    makes_runs: bool = False


COMMANDS = {
    "train": Command(train),
    "sweep": Command(sweep, "run_sweep", makes_runs=True),
    "find_max_batch": Command(find_max_batch, "find_max_batch", makes_runs=True),
    "report": Command(report, "report"),
    "runs": Command(runs, "runs"),
    "doctor": Command(doctor),
    "prepare_data": Command(prepare_data),
    "evaluate": Command(evaluate, "evaluate"),
    "generate": Command(generate, "generate"),
    "export": Command(export, "export"),
    "breakdown": Command(breakdown, "breakdown", makes_runs=True),
}


def start(name: str) -> None:
    """Run a command with the arguments of this process.

    Raises:
        SystemExit: the command failed.
    """
    command = COMMANDS[name]
    cli.run(command.main, command.config_name, command.main.__doc__ or "", makes_runs=command.makes_runs)


def main() -> None:
    """`linrnn COMMAND [group=option …] [group.key=value …]`

    Raises:
        SystemExit: the command failed.
    """
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        sys.argv = [f"{PROGRAM} {name}", *arguments]
        start(name)
    elif code := cli.guarded(lambda: _answer(name)):
        raise SystemExit(code)


def _answer(name: str) -> None:
    if name == "--version":
        print(f"{PROGRAM} {importlib.metadata.version(PROGRAM)}")
    elif name in cli.HELP_FLAGS:
        lines = [f"  {name:<17} {(command.main.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
        print("What the loss layer costs when you pretrain linear RNNs.\n")
        print(f"usage: {PROGRAM} COMMAND [group=option …] [group.key=value …]\n\ncommands:", *lines, sep="\n")
        print(f"\n{PROGRAM} COMMAND --help lists its groups and keys; {PROGRAM} --version")
    else:
        [likely, *_] = [*difflib.get_close_matches(name, COMMANDS, n=1), "COMMAND"]
        meant = f"train {name}" if "=" in name else likely
        raise ConfigError(f"{name}: there is no such command", f"{PROGRAM} {meant}; all: {', '.join(COMMANDS)}")
