"""Everything that a run consists of, built from its configuration, and put back to where the run stood."""

import functools
from typing import Any

from linrnn.config import to_yaml
from linrnn.config.schema import Config
from linrnn.core.errors import first_line, out_of_memory, ran_out_of_memory
from linrnn.core.machine import seconds_since_start
from linrnn.data import BatchLoader, ConsoleProgress, PreparedData, check_validation, prepare, vocabulary_size
from linrnn.distributed import Launch, Ranks
from linrnn.losses import build_loss
from linrnn.models import BlankModel
from linrnn.runs.directory import RunDirectory
from linrnn.training import checkpoint
from linrnn.training.execution.float8 import use_float8
from linrnn.training.measurements import Measurements
from linrnn.training.optimizer import Schedule, build_optimizer
from linrnn.training.plan import Plan, check_step_fits, make_training_plan
from linrnn.training.runtime import compute_dtype, parameter_dtype, prepare_process
from linrnn.training.session import Session
from linrnn.training.starting import (
    RunState,
    as_continued,
    checkpoints_planned,
    continue_from,
    find_weights,
    newest_checkpoint,
    progress_to_resume,
    related,
    starting_again,
    unlike,
)


class BuiltRun:
    """Builds everything that `config` names. The model has no weights before :meth:`ensure_weights`.

    Args:
        ranks: the processes that share the run, each with its own Trainer; None: only this process.

    Attributes:
        state: the state of the run, such as its step.
        session: the run's directory, console, metrics and wandb.
        measurements: speed and memory.
        saver: writes checkpoints.
        replica: the model as the ranks share it; the same object as `model` in one process.
        parameters: the model's. To walk through all modules for them takes the host a millisecond.
        compiled: the graphs of the first step (`GraphCounter.report`); None if nothing is compiled.
        seconds_to: seconds from the command's start to the end of each stage that the run has reached so far:
            `libraries` imported, `model` built, `kernels` compiled, `weights` drawn, `first_step` ended.
        weights: what `init_from` names; None for random weights.

    Raises:
        LinrnnError: a loss, model or device cannot run here (before anything is built), the data is unusable, or the
            run directory holds another configuration.
    """

    def __init__(self, config: Config, ranks: Ranks | None = None) -> None:
        self.config = config
        self.compiled: dict[str, Any] | None = None
        self.seconds_to = {"libraries": seconds_since_start()}
        self._has_weights = False
        self._changes_note: str | None = None  # of a run that continues another
        self.ranks = ranks or Ranks()
        self.plan: Plan = make_training_plan(config)
        if self.plan.world_size != self.ranks.world_size:
            raise ValueError(f"{self.plan.world_size} processes, and ranks of {self.ranks.world_size}")
        self.device, self.precision = self.plan.device, self.plan.precision
        prepare_process(config, self.device)
        # The data's vocabulary may turn out smaller than this one, never larger.
        self._memory_note = check_step_fits(self.plan, self.plan.architecture(vocabulary_size(config.data)))
        self.data = self.ranks.first_then_others(self._prepare_data)
        check_validation(self.data.valid, config.trainer.valid_tokens, reset_at_document=config.data.reset_at_document)
        self.weights = find_weights(config.init_from, self.data) if config.init_from else None
        self.architecture = self.plan.architecture(self.data.vocab_size)
        if self.weights:
            self.weights.check(self.architecture)
        self.session = Session(config, self.plan, self.ranks)
        try:
            self._build()
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
            budget = "" if config.memory_budget_gib is None else ", or a larger memory_budget_gib"
            raise out_of_memory(
                f"out of memory while the model was built: {first_line(error)}",
                f"use a smaller size or size.vocab_size{budget}",
            ) from error
        self.saver = checkpoint.Saver(self.directory.checkpoints, config.trainer.keep_checkpoints)
        self.state = RunState()
        self.measurements = Measurements(self.plan, self.architecture, self.ranks, self.model, self.optimizer)

    @property
    def directory(self) -> RunDirectory:
        """The run's."""
        return self.session.directory

    @property
    def step(self) -> int:
        """Optimizer steps that the run has done."""
        return self.state.step

    @functools.cached_property
    def config_yaml(self) -> str:
        """The configuration, as the run's directory and every checkpoint hold it."""
        return to_yaml(self.config)  # takes some tens of milliseconds

    def epochs(self, step: int) -> float:
        """Passes over the training data after `step` steps."""
        return step * self.plan.sequences_per_step / self.loader.n_blocks

    def _prepare_data(self) -> PreparedData:
        """The prepared data. One rank of each machine compares all of it with the recorded hashes."""
        progress = ConsoleProgress() if self.ranks.is_first else None
        data = prepare(self.config.data, progress=progress)
        if self.config.data.verify and Launch.from_environment().local_rank == 0:
            data.verify(progress)
        return data

    def _build(self) -> None:
        config = self.config
        dtype = parameter_dtype(self.precision)
        self._blank = BlankModel(self.architecture, self.ranks.part, device=self.device, dtype=dtype)
        self.model = self._blank.model
        self._float8_note = None
        if config.trainer.float8 == "blocks":
            self._float8_note = use_float8(self.model, self.device)
        self.model.set_activation_checkpointing(config.trainer.activation_checkpointing)
        if config.trainer.compile != "none":
            self.model.set_compile(config.trainer.compile)
        self.replica = self.ranks.spread(self.model, compute_dtype(self.precision))
        if self.weights:
            self.weights.load(self.model, self._blank.part)
            self._has_weights = True
        vocabulary = self.ranks.vocabulary(self.architecture.vocab_size)
        self.loss = build_loss(config.loss, device=self.device, vocabulary=vocabulary)
        self.optimizer = build_optimizer(self.model, config.optimizer, self.device)
        self.parameters = list(self.model.parameters())
        self.schedule = Schedule(self.optimizer, config.schedule, config.optimizer.lr, self.plan.horizon)
        self.loader = BatchLoader(
            self.data.train,
            seq_len=config.trainer.seq_len,
            batch_size=self.plan.sequences_of_rank,
            seed=config.seed,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            reset_at_document=config.data.reset_at_document,
        )

    # ---------------------------------------------------------------------------------------- where the run stands
    def notes(self) -> list[str | None]:
        """Lines for the user before the first step: about runs like this one, weights, loss, memory and checkpoints.

        Raises:
            StorageError: the disk cannot hold the checkpoints.
        """
        remark = self.weights.remark if self.weights else None
        first = self.ranks.is_first
        parts = (self.model.hf, self.optimizer)
        room = checkpoints_planned(self.plan, self.directory, *parts, self.step) if first else None
        tokens = self.plan.sequences_of_rank * self.config.trainer.seq_len
        arch = self.architecture
        of_loss = self.loss.remark(tokens, arch.hidden_size, arch.vocab_size, compute_dtype(self.precision))
        new = first and not (self.step or self.state.continues or self.directory.begins_anew)
        like = related(self.directory, self.plan, self.data) if new else None
        return [like, self._changes_note, remark, self._float8_note, of_loss, self._memory_note, room]

    def progress(self) -> checkpoint.Progress:
        """Where the run stands, as a checkpoint records it."""
        return checkpoint.Progress(
            run=f"{self.config.group}/{self.session.name}",
            step=self.step,
            tokens=self.step * self.plan.tokens_per_step,
            data=self.loader.state_dict(),
            recent_losses=list(self.state.recent_losses),
            schedule=self.schedule.describe(),
            token_fingerprint=self.data.token_fingerprint,
            continues=self.state.continues,
        )

    def resume(self) -> str | None:
        """Restore the newest undamaged checkpoint, or what `continue_from` names. Returns a line that says so, or None.

        Only if neither is there, initial weights are drawn. It only reads, so an error leaves the directory as it is.
        """
        state = self.state
        if newest := self.ranks.from_first(lambda: newest_checkpoint(self.directory)):
            progress = progress_to_resume(newest, self.plan, self.directory, self.schedule.describe())
            self.loader.load_state_dict(progress.data)
            checkpoint.load(newest, self.model.hf, self.optimizer)
            self._has_weights = True
            state.recent_losses.extend(progress.recent_losses)
            state.step = state.saved_step = self.saver.begins_at = progress.step
            state.continues = progress.continues
            return f"resuming at step {state.step} from {newest}"
        if source := self.config.continue_from:
            directory, progress = continue_from(source, self.model.hf, self.optimizer, self.data)
            self._changes_note = unlike(directory, progress.run, self.config, self.ranks.world_size)
            self._has_weights = True
            state.continues = as_continued(progress)
            goes_on = self.loader.go_on_after(progress.data)
            data = "goes on where it stood" if goes_on else "begins anew, in its own order"
            return (
                f"continuing {progress.run} after step {progress.step}: its weights and optimizer state, under a plan "
                f"of {self.plan.total_steps} steps; the data {data}"
            )
        self.seconds_to["model"] = seconds_since_start()
        self.ensure_weights()
        return starting_again(self.directory)

    def ensure_weights(self) -> None:
        """Return once the model has weights: those that were loaded or restored, or else its initial ones."""
        if not self._has_weights:
            self._blank.draw(self.config.seed)
            self.ranks.copy_first(self.model)
            self._has_weights = True
            self.seconds_to["weights"] = seconds_since_start()
