"""What a run has around its training: its directory, the console, the metrics file and wandb. Rank 0 alone writes."""

import contextlib
import time
from pathlib import Path
from typing import Any

from linrnn.config import identity, run_name, to_yaml
from linrnn.config.schema import Config
from linrnn.core.errors import LinrnnError
from linrnn.core.output import say
from linrnn.data import PreparedData
from linrnn.distributed import Ranks
from linrnn.models.architecture import Architecture
from linrnn.runs.directory import LOG, SUMMARY, RunDirectory
from linrnn.runs.environment import command_line, describe_process
from linrnn.runs.figures import wall_seconds_of_run
from linrnn.runs.loggers import Console, Silence, WandbMirror
from linrnn.runs.metrics import JsonlWriter, read_jsonl
from linrnn.runs.summary import final_lines, finished_lines, progress_line, summary_without_figures
from linrnn.training import checkpoint
from linrnn.training.plan import Plan
from linrnn.training.resume import check_not_beyond
from linrnn.training.step import RunState


class Session:
    """The files and the listeners of one process of a run.

    Attributes:
        name: of the run.
        directory: of the run.
        console: where lines go; silent before :meth:`begin`, and on every rank but the first.

    Raises:
        LinrnnError: the directory holds another configuration.
    """

    def __init__(self, config: Config, plan: Plan, ranks: Ranks) -> None:
        self._config, self._plan, self._ranks = config, plan, ranks
        self.name = run_name(config, plan.world_size)
        self._identity = identity(config, plan.world_size)
        self.directory = RunDirectory(
            Path(config.results_dir) / config.group / self.name,
            identity=self._identity,
            resume=config.trainer.resume,
        )
        self.console: Silence = Silence()
        self._seconds_before = 0.0  # that earlier processes of the run took
        self._began_at = time.monotonic()

    # ------------------------------------------------------------------------------------------- begin and end
    def open(self, closing: contextlib.ExitStack) -> None:
        """Claim the directory; nothing is written."""
        if self._ranks.is_first:
            self.directory.open()
            closing.callback(self.directory.close)

    def finished(self) -> dict[str, Any] | None:
        """The summary of a run that has nothing left to do; what can be done with it is printed, nothing is written."""
        summary = None if self.directory.begins_anew else self.directory.read_summary()
        if summary is None or summary["status"] != "finished":
            return None
        check_not_beyond(summary["steps"], self._plan, self.directory)
        if summary["steps"] < self._plan.total_steps:
            return None
        for line in finished_lines(self.directory.path, summary["steps"], self._plan.horizon):
            say(line)
        return summary

    def begin(self, closing: contextlib.ExitStack, state: RunState, data: PreparedData) -> None:
        """Write the first files of this process, and open those that it goes on writing."""
        if not self._ranks.is_first:
            return
        self.directory.begin(to_yaml(self._config))
        self.directory.begin_process(describe_process(self._config, state.step, state.continues))
        for name, text in (data.tokenizer.files() if data.tokenizer else {}).items():
            self.directory.write_text(name, text)
        checkpoint.remove_partial(self.directory.checkpoints)
        self.console = console = Console(self.directory.path / LOG, self._config.logger.console_every_seconds)
        closing.callback(console.close)
        self._metrics = JsonlWriter(self.directory.metrics)
        closing.callback(self._metrics.close)
        # A process that has no step left to train makes the last validation again.
        self._metrics.truncate_after(state.step, keep_validation=state.step < self._plan.total_steps)
        self._seconds_before = wall_seconds_of_run(self.records())

    def mirror_to_wandb(self) -> None:
        """Join the run's page on wandb, or say why not."""
        if self._ranks.is_first:
            self._wandb = WandbMirror(
                self._config.logger.wandb,
                self.directory.path,
                run_name=self.name,
                group=self._config.group,
                tags=[getattr(self._config, group).name for group in ("model", "size", "loss", "data")],
                hyperparameters=self._identity,
                history=self.records,
                say=self.console.line,
            )

    def start_clock(self) -> None:
        """The wall-clock time of this process begins."""
        self._began_at = time.monotonic()

    def write_summary(self, step: int, summary: dict[str, Any]) -> None:
        """Raises StorageError: the disk does not take it."""
        if self._ranks.is_first:
            self.directory.end_process(step)
            self.directory.write_json(SUMMARY, summary)

    def write_lost_summary(self, step: int, failure: LinrnnError) -> None:
        """The summary of a run whose first rank waits in vain for a rank that has failed."""
        summary = summary_without_figures(self._config, self.name, "failed", failure.cause, command_line())
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
        """Say what is trained, on what, for how long, and every note that is not None."""
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
        if plan.horizon != plan.total_steps:
            say_line(f"the {config.optimizer.schedule} schedule ends at step {plan.horizon}")
        for note in notes:
            if note:
                say_line(note)
        if plan.device.type == "cuda":
            say_line("the first steps tune GPU kernels: minutes on a machine that has not run this model before")

    def show_progress(self, step: int, epochs: float, loss: float, floor: float | None, seconds: float | None) -> None:
        """The console's line of progress.

        Args:
            floor: entropy of the data, nats, where it is known.
            seconds: of a recent step; None during the warm-up.
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
        """All records of metrics of the run; empty on every rank but the first."""
        return read_jsonl(self.directory.metrics) if self._ranks.is_first else []

    def has_validation_of(self, step: int) -> bool:
        """Whether the run has validated at this step; every rank gets the same answer."""
        return self._ranks.from_first(
            lambda: any(record["step"] == step and "valid/loss_nats" in record for record in self.records())
        )

    def wall_seconds(self) -> float:
        """That all processes of the run have taken so far, without the time between them."""
        return self._seconds_before + time.monotonic() - self._began_at

    @property
    def started(self) -> str | None:
        """The date at which the run's first process began; None on every rank but the first."""
        return self.directory.started if self._ranks.is_first else None
