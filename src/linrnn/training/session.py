"""Everything around a run's training: its directory, the console, the metrics file and wandb. Only rank 0 writes."""

import contextlib
import time
from pathlib import Path
from typing import Any

from linrnn.config import identity, run_name
from linrnn.config.naming import choices
from linrnn.config.schema import Config
from linrnn.core.errors import ConfigError, LinrnnError
from linrnn.core.output import say
from linrnn.data import PreparedData
from linrnn.distributed import Ranks
from linrnn.models import tuning
from linrnn.models.architecture import Architecture
from linrnn.runs.directory import ASIDE, LOG, SUMMARY, RunDirectory
from linrnn.runs.environment import command_line, describe_process
from linrnn.runs.figures import wall_seconds_of_run
from linrnn.runs.loggers import Console, Silence, WandbMirror
from linrnn.runs.metrics import JsonlWriter, read_jsonl
from linrnn.runs.summary import final_lines, finished_lines, progress_line, status_of, summary_without_figures
from linrnn.training import checkpoint
from linrnn.training.plan import Plan
from linrnn.training.starting import RunState, check_not_beyond


class Session:
    """The files, console and wandb mirror of one process of a run.

    Attributes:
        name: the run's name.
        directory: the run's directory.
        console: prints lines; silent before :meth:`begin`, and on every rank but the first.

    Raises:
        LinrnnError: the directory holds another configuration.
    """

    def __init__(self, config: Config, plan: Plan, ranks: Ranks) -> None:
        self._config, self._plan, self._ranks = config, plan, ranks
        self.name = run_name(config, plan.world_size)
        self.directory = RunDirectory(
            Path(config.results_dir) / config.group / self.name,
            identity=identity(config, plan.world_size),
            resume=config.trainer.resume,
        )
        self.console: Silence = Silence()
        self._seconds_before = 0.0  # wall-clock seconds of earlier processes of the run
        self._began_at = time.monotonic()

    # ------------------------------------------------------------------------------------------- begin and end
    def open(self, closing: contextlib.ExitStack) -> None:
        """Claim the directory. Nothing is written."""
        if self._ranks.is_first:
            self.directory.open()
            closing.callback(self.directory.close)

    def finished(self, data: PreparedData) -> dict[str, Any] | None:
        """The summary if the run has nothing left to do, else None. Prints how to go on; writes nothing.

        Raises:
            ConfigError: the run has more steps than this command asks for, or was finished on other data.
        """
        summary = None if self.directory.begins_anew else self.directory.read_summary()
        if summary is None or summary["status"] != "finished":
            return None
        check_not_beyond(summary["steps"], self._plan, self.directory)
        if summary["steps"] < self._plan.total_steps:
            return None  # its checkpoint tells other data
        if summary.get("data_fingerprint") not in (None, data.fingerprint):
            raise ConfigError(
                f"{self.directory.path} holds a finished run on other data: text, tokenizer or options have changed",
                f"{self.directory.another_name} begins another run; {ASIDE}",
            )
        for line in finished_lines(self._config, self.directory, summary["steps"], self._plan.horizon):
            say(line)
        return summary

    def begin(self, closing: contextlib.ExitStack, state: RunState, data: PreparedData, config_yaml: str) -> None:
        """Write this process's first files, and open those that it keeps writing."""
        if not self._ranks.is_first:
            return
        self.directory.begin(config_yaml)
        self.directory.begin_process(describe_process(self._config, state.step, state.continues))
        for name, text in (data.tokenizer.files() if data.tokenizer else {}).items():
            self.directory.write_text(name, text)
        checkpoint.remove_partial(self.directory.checkpoints)
        self.console = console = Console(self.directory.path / LOG, self._config.logger.console_every_seconds)
        closing.callback(console.close)
        self._metrics = JsonlWriter(self.directory.metrics)
        closing.callback(self._metrics.close)
        # A process that has no step left to train repeats the last validation.
        self._metrics.truncate_after(state.step, keep_validation=state.step < self._plan.total_steps)
        self._seconds_before = wall_seconds_of_run(self.records())

    def mirror_to_wandb(self) -> None:
        """Open the run's page on wandb, or say why not."""
        if self._ranks.is_first:
            self._wandb = WandbMirror(
                self._config.logger.wandb,
                self.directory.path,
                run_name=self.name,
                group=self._config.group,
                tags=[getattr(self._config, group).name for group in ("model", "size", "loss", "data")],
                hyperparameters=choices(self._config, self._plan.world_size),
                history=self.records,
                say=self.console.line,
            )

    def start_clock(self) -> None:
        """Start this process's wall clock."""
        self._began_at = time.monotonic()

    def write_summary(self, step: int, summary: dict[str, Any]) -> None:
        """Write summary.json, and record that this process ended after `step`.

        Raises:
            StorageError: the file cannot be written.
        """
        if self._ranks.is_first:
            self.directory.add_to_process(kernel_choices=tuning.used())
            self.directory.end_process(step)
            self.directory.write_json(SUMMARY, summary)

    def record_first_step(self, seconds_to: dict[str, float]) -> None:
        """Record how long this process took to each stage before the end of its first step, and the kernels' choices.

        Raises:
            StorageError: the file cannot be written.
        """
        if self._ranks.is_first:
            rounded = {stage: round(seconds, 2) for stage, seconds in seconds_to.items()}
            self.directory.add_to_process(seconds_to=rounded, kernel_choices=tuning.used())

    def write_lost_summary(self, step: int, failure: LinrnnError) -> None:
        """Write the summary of a run whose first rank waits in vain for a rank that has failed."""
        status, ranks = status_of(failure.exit_code), self._plan.world_size
        summary = summary_without_figures(
            self._config, self.name, status, failure.cause, command_line(), world_size=ranks
        )
        tokens = step * self._plan.tokens_per_step
        self.write_summary(step, summary | {"steps": step, "tokens": tokens, "started": self.started})

    def end(self, summary: dict[str, Any], *, failed: bool) -> None:
        """Tell wandb and the console how the run ended."""
        if self._ranks.is_first:
            self._wandb.finish(summary, exit_code=int(failed))
        for line in final_lines(self._config, self.directory.path, summary):
            self.console.line(line)

    # --------------------------------------------------------------------------------------------- what happens
    def announce(self, architecture: Architecture, data: PreparedData, *notes: str | None) -> None:
        """Print what is trained, on what data and for how long, and every note that is not None."""
        config, plan = self._config, self._plan
        say_line = self.console.line
        say_line(
            f"{architecture.model} x {architecture.size} x {config.loss.name}: {architecture.n_parameters:,} "
            f"parameters, V = {architecture.vocab_size:,}, {plan.precision} on {plan.device.type}"
            + (f", {plan.world_size} ranks" if plan.world_size > 1 else "")
        )
        say_line(f"data: {data.description}")
        groups = config.parallel.data_ranks(plan.world_size)
        unit = "ranks" if groups == plan.world_size else f"group(s) of {plan.world_size // groups} ranks"
        say_line(
            f"{plan.total_steps} steps of {plan.tokens_per_step:,} tokens "
            f"(B = {config.trainer.batch_size} x T = {config.trainer.seq_len} x {config.trainer.accumulation_steps}"
            + (f" x {groups} {unit}) " if plan.world_size > 1 else ") ")
            + f"-> {self.directory.path}"
        )
        if plan.horizon != plan.total_steps:  # never of a constant schedule
            say_line(f"the {config.schedule.name} schedule ends at step {plan.horizon}")
        for note in notes:
            if note:
                say_line(note)

    def show_progress(self, step: int, epochs: float, loss: float, floor: float | None, seconds: float | None) -> None:
        """Print the console's progress line.

        Args:
            floor: entropy of the data in nats, if known.
            seconds: time of a recent step; None during the warm-up.
        """
        plan = self._plan
        speed = None if seconds is None else plan.tokens_per_step / seconds
        left = None if seconds is None else seconds * (plan.total_steps - step)
        line = progress_line(step, plan.total_steps, epochs, loss, floor, speed, left)
        self.console.progress(line, final=step == plan.total_steps)

    def log(self, step: int, metrics: dict[str, float | None]) -> None:
        """Write a record of metrics to the file and to wandb."""
        if self._ranks.is_first:
            self._metrics.write({"step": step, **metrics})
            self._wandb.log(step, metrics)

    def records(self) -> list[dict[str, Any]]:
        """All metric records of the run; empty on every rank but the first."""
        return read_jsonl(self.directory.metrics) if self._ranks.is_first else []

    def misses_validation(self, step: int) -> bool:
        """Whether the previous process stopped after the checkpoint of `step` and before the validation of this step.

        Every rank gets the same answer.
        """
        every = self._config.trainer.valid_every
        if not every or step in (0, self._plan.total_steps) or step % every:
            return False
        return not self._ranks.from_first(
            lambda: any(record["step"] == step and "valid/loss_nats" in record for record in self.records())
        )

    def wall_seconds(self) -> float:
        """Wall-clock seconds of all processes of the run so far, without the time between processes."""
        return self._seconds_before + time.monotonic() - self._began_at

    @property
    def started(self) -> str | None:
        """The date at which the run's first process began; None on every rank but the first."""
        return self.directory.started if self._ranks.is_first else None
