"""One training run: build from the configuration, step, log, validate, checkpoint, summarise.

Read :meth:`Trainer.fit` first, then :meth:`Trainer.train_step`. Other modules hold the rest of a run: `session` the
files and the console, `measurements` speed and memory, `resume` where a run continues, and `outcome` how it ended.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from linrnn.config import to_yaml
from linrnn.config.schema import Config
from linrnn.core.errors import (
    DivergedError,
    InterruptedRun,
    LinrnnError,
    OutOfMemoryError,
    StorageError,
    ran_out_of_memory,
)
from linrnn.core.interrupts import StopRequest
from linrnn.data import (
    Batch,
    BatchesOnce,
    BatchLoader,
    ConsoleProgress,
    PreparedData,
    check_validation,
    prepare,
    vocabulary_size,
)
from linrnn.distributed import Launch, Ranks
from linrnn.losses import build_loss
from linrnn.models import build_model
from linrnn.profiling import watched_loss
from linrnn.runs.directory import RunDirectory
from linrnn.runs.environment import gpu_state
from linrnn.training import checkpoint
from linrnn.training.evaluation import Evaluation, evaluate
from linrnn.training.measurements import Measurements, recordings
from linrnn.training.optimizer import build_optimizer, build_schedule, clip_gradients
from linrnn.training.outcome import concerns_all_ranks, explain_out_of_memory, explained, first_line, summary_of_run
from linrnn.training.plan import Plan, make_training_plan
from linrnn.training.preflight import check_step_fits
from linrnn.training.resume import checkpoints_planned, newest_checkpoint, progress_to_resume
from linrnn.training.runtime import compute_dtype, parameter_dtype, prepare_process
from linrnn.training.session import Session
from linrnn.training.step import RunState, StepRecord, loss_inputs
from linrnn.training.warm_start import as_continued, continue_from, find_weights


class Trainer:
    """Builds everything that `config` names; :meth:`fit` runs it.

    Args:
        ranks: the processes that share the run, each with its own Trainer; None: only this process.

    Attributes:
        state: the state of the run, such as its step.
        session: the run's directory, console, metrics and wandb.
        measurements: speed and memory.

    Raises:
        LinrnnError: a loss, model or device cannot run here (before anything is built), the data is unusable, or the
            run directory holds another configuration.
    """

    def __init__(self, config: Config, ranks: Ranks | None = None) -> None:
        self.config = config
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
        self.session = Session(config, self.plan, self.ranks)
        try:
            self._build()
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"out of memory while the model was built: {first_line(error)}",
                "use a smaller size, a smaller size.vocab_size or a larger memory_budget_gib",
            ) from error
        self.saver = checkpoint.Saver(self.directory.checkpoints, config.trainer.keep_checkpoints)
        self.state = RunState()
        self.measurements = Measurements(self.plan, self.architecture, self.ranks, self.model, self.optimizer)
        self.stop = StopRequest()
        self._pending: StepRecord | None = None  # the latest step, whose scalars are on their way
        self._validating = False

    @property
    def directory(self) -> RunDirectory:
        """The run's directory."""
        return self.session.directory

    @property
    def step(self) -> int:
        """Optimizer steps that the run has done."""
        return self.state.step

    @functools.cached_property
    def _config_yaml(self) -> str:
        return to_yaml(self.config)  # takes some tens of milliseconds

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
        self.model = build_model(self.architecture, device=self.device, dtype=dtype, seed=config.seed)
        if self.weights:
            self.weights.load(self.model)
        self.model.set_activation_checkpointing(config.trainer.activation_checkpointing)
        if config.trainer.compile_blocks:
            self.model.compile_blocks()
        self.replica = self.ranks.spread(self.model, compute_dtype(self.precision))
        vocabulary = self.ranks.vocabulary(self.architecture.vocab_size)
        self.loss = build_loss(config.loss, device=self.device, vocabulary=vocabulary)
        self.optimizer = build_optimizer(self.model, config.optimizer, self.device)
        self.schedule = build_schedule(self.optimizer, config.optimizer, self.plan.horizon)
        self.loader = BatchLoader(
            self.data.train,
            seq_len=config.trainer.seq_len,
            batch_size=self.plan.sequences_of_rank,
            seed=config.seed,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            reset_at_document=config.data.reset_at_document,
        )

    # ------------------------------------------------------------------------------------------------- the run
    def fit(self) -> dict[str, Any]:
        """Train to the last step, validate, write summary.json and return it.

        Raises:
            InterruptedRun: a signal came (:data:`linrnn.core.interrupts.SIGNALS`); a checkpoint was written.
            StorageError: the disk has no room for the checkpoints, or a file could not be written.
            DivergedError: the loss is not finite; the last good checkpoint is kept.
            OutOfMemoryError: memory ran out. The error says where and what to lower; the log lists memory by component.
            RankFailedError: another process of the run has failed.
        """
        with contextlib.ExitStack() as closing:
            self.session.open(closing)
            if finished := self.ranks.from_first(self.session.finished):
                return finished
            where_it_begins = self._resume()
            room = self._room_for_checkpoints()
            self.session.begin(closing, self.state, self.data)
            if where_it_begins:
                self.session.console.line(where_it_begins)
            self.session.mirror_to_wandb()
            remark = self.weights.remark if self.weights else None
            self.session.announce(self.architecture, self.data, remark, self._memory_note, room)
            return self._fit()

    def _fit(self) -> dict[str, Any]:
        valid_tokens = self.config.trainer.valid_tokens
        self._valid_bytes = self.data.token_bytes(self.data.valid, valid_tokens, self.session.console.line)
        self.ranks.shield(self._write_lost_summary)
        self._saved_at = time.monotonic()
        self.session.start_clock()
        with self.stop:
            summary, failure = self._run()
        self.session.end(summary, failed=failure is not None)
        if failure is not None:
            raise failure
        return summary

    def _run(self) -> tuple[dict[str, Any], BaseException | None]:
        """Train, save and validate, and write the summary in any case. Returns the summary and the failure, if any."""
        status, evaluation = "finished", None
        failure: BaseException | None = None
        try:
            with self._recordings() as end_of_step:
                self._train(end_of_step)
                if self.config.trainer.checkpoint_every != 0:
                    self._save()
                    self.saver.wait()
            evaluation = self._validate()
            self.saver.wait()
        except BaseException as error:
            status, failure = explained(error, self.config, self.ranks, self._explain_out_of_memory)
        if concerns_all_ranks(failure) or (self.ranks.world_size == 1 and not isinstance(failure, KeyboardInterrupt)):
            try:
                self.saver.wait()  # the last good checkpoint may still be being written
            except StorageError as error:
                self.session.console.line(f"error: {error.cause}")
        summary = self._summarise(status, failure, evaluation)
        if concerns_all_ranks(failure):
            self.ranks.end_together()
        try:
            self.session.write_summary(self.step, summary)
        except StorageError as error:
            failure = failure or error
        return summary, failure

    def _train(self, end_of_step: Callable[[], None]) -> None:
        trainer, state = self.config.trainer, self.state
        self.model.train()
        if self._misses_validation():
            self._validate()
        self.measurements.speed.clock.start()
        while state.step < self.plan.total_steps:
            if state.steps_here == self.plan.unmeasured_steps:
                self.measurements.memory.start()
            record = self.train_step()
            end_of_step()
            self._flush()  # the previous step's scalars, while the device works on this one
            self._pending = record
            if state.step == self.plan.total_steps:
                break
            if trainer.checkpoint_every and state.step % trainer.checkpoint_every == 0:
                self._save()
            if trainer.valid_every and state.step % trainer.valid_every == 0:
                self._validate()
            self._heed()
        self.measurements.gpu_state = gpu_state(self.device)  # while the device works on the last steps
        self._flush()

    def train_step(self) -> StepRecord:
        """One optimizer step over `accumulation_steps` micro-steps.

        Every micro-step's summed loss is divided by the tokens of the whole step on all ranks. The gradient therefore
        equals that of one large batch, however the batch is split and however many labels are ignored.
        """
        self.measurements.speed.step_begins()
        lr = self.schedule.apply(self.state.step)
        batches = [next(self.loader) for _ in range(self.config.trainer.accumulation_steps)]
        n_tokens = max(int(self.ranks.total(sum(batch.n_tokens for batch in batches))[0]), 1)
        mean_nats = torch.zeros((), device=self.device)
        stats: dict[str, torch.Tensor] = {}
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches)
            with contextlib.nullcontext() if last else self.ranks.accumulating(self.replica):
                nats, stats = self._forward_backward(batch, n_tokens)
            mean_nats += nats
        grad_norm = clip_gradients(self.model.parameters(), self.config.optimizer.max_grad_norm)
        self.optimizer.step()
        self.ranks.zero_gradients(self.optimizer)
        self.measurements.speed.step_ended()
        self.state.step += 1
        self.state.steps_here += 1
        scalars = {"train/loss_nats": self.ranks.sum(mean_nats), "train/grad_norm": grad_norm, **stats}
        return StepRecord(self.state, lr, scalars)

    def _forward_backward(self, batch: Batch, n_tokens: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Gradients of one micro-step. Returns its share of the step's mean loss, and the backend's statistics.

        The loss's inputs have no name here, so that they are freed before the blocks' backward pass.
        """
        inputs = (self.replica, batch, self.precision, self.device)
        output = watched_loss(self.loss, *loss_inputs(*inputs), self.measurements.memory, self.measurements.speed.loss)
        mean_nats = output.sum_nats / n_tokens
        (mean_nats * self.ranks.loss_scale).backward()
        return mean_nats.detach(), {f"loss/{name}": value for name, value in output.stats.items()}

    def _validate(self) -> Evaluation:
        self._flush()
        self._validating = True
        with self.measurements.speed.clock.paused():
            evaluation = self._evaluate()
            self.session.log(self.step, {**evaluation.metrics(), **self.measurements.of_memory(self.state)})
        self._validating = False
        self.session.console.line(f"valid at step {self.step}: {evaluation}")
        return evaluation

    def _evaluate(self) -> Evaluation:
        trainer = self.config.trainer
        batches = BatchesOnce(
            self.data.valid,
            seq_len=trainer.seq_len,
            batch_size=self.plan.sequences_of_rank,
            max_tokens=trainer.valid_tokens,
            reset_at_document=self.config.data.reset_at_document,
            token_bytes=self._valid_bytes,
        )
        try:
            return evaluate(
                self.model,
                self.loss,
                batches,
                precision=self.precision,
                device=self.device,
                ranks=self.ranks,
                before_batch=self._heed,
            )
        except Exception as error:
            # The steps so far are good. With several ranks, all others wait in a collective and cannot save.
            if ran_out_of_memory(error) and self.ranks.world_size == 1 and trainer.checkpoint_every != 0:
                self._save()
            raise

    def _save(self) -> None:
        """Start a checkpoint of a state whose loss is known to be finite. Every rank writes its own part."""
        if self.step == self.state.saved_step:
            return
        self._flush()
        progress = checkpoint.Progress(
            run=f"{self.config.group}/{self.session.name}",
            step=self.step,
            tokens=self.step * self.plan.tokens_per_step,
            data=self.loader.state_dict(),
            recent_losses=list(self.state.recent_losses),
            schedule=self.schedule.describe(),
            token_fingerprint=self.data.token_fingerprint,
            continues=self.state.continues,
        )
        with self.measurements.speed.clock.paused():
            self.saver.save(progress, self.model.hf, self.optimizer, self._config_yaml)
        self.state.saved_step, self._saved_at = self.step, time.monotonic()

    def _heed(self) -> None:
        """If one rank has to save or stop, all ranks do so at the same step.

        Raises:
            StorageError: the latest checkpoint could not be written.
            InterruptedRun: a signal has come; a checkpoint is written.
        """
        failed, signal_number, due = self.ranks.largest(
            self.saver.failed, self.stop.signal_number or 0, self._checkpoint_is_due()
        )
        if failed:
            self.saver.wait()
        if signal_number:
            self._save()
            self.saver.wait()
            where = "in the validation after" if self._validating else "at"
            raise InterruptedRun(
                f"interrupted {where} step {self.step} of {self.plan.total_steps}; checkpoint written",
                "run the same command again to continue",
                int(signal_number),
            )
        if due:
            self._save()

    def _checkpoint_is_due(self) -> bool:
        """Whether a checkpoint is due by this rank's clock."""
        trainer = self.config.trainer
        if trainer.checkpoint_every == 0 or trainer.checkpoint_minutes is None:
            return False
        return time.monotonic() - self._saved_at >= 60 * trainer.checkpoint_minutes

    # ---------------------------------------------------------------------------------------------- bookkeeping
    def _flush(self) -> None:
        """Write the pending step's metrics; stop the run if its loss is not finite."""
        if (record := self._pending) is None:
            return
        self._pending = None
        values = record.read()
        loss, grad_norm = values["train/loss_nats"], values["train/grad_norm"]
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise DivergedError(
                f"step {record.step}: loss {loss}, gradient norm {grad_norm}",
                "lower optimizer.lr or optimizer.max_grad_norm, or raise optimizer.warmup_steps; the last good "
                "checkpoint is kept",
            )
        self.state.recent_losses.append(loss)
        speed, epochs = self.measurements.speed, self._epochs(record.step)
        speed.arrived(record.number_here)
        floor = self.data.entropy_floor_nats
        self.session.show_progress(record.step, epochs, loss, floor, speed.recent_step_seconds())
        if record.step % self.config.trainer.log_every == 0 or record.step == self.plan.total_steps:
            metrics: dict[str, float | None] = {
                **values,
                "train/lr": record.lr,
                "train/tokens": record.step * self.plan.tokens_per_step,
                "train/epoch": epochs,
                "train/wall_seconds": self.session.wall_seconds(),
                **self.measurements.of_steps(self.state),
            }
            self.session.log(record.step, metrics)

    def _epochs(self, step: int) -> float:
        """Passes over the training data after `step` steps."""
        return step * self.plan.sequences_per_step / self.loader.n_blocks

    def _misses_validation(self) -> bool:
        """Whether the previous process stopped after a step's checkpoint and before the step's validation."""
        every = self.config.trainer.valid_every
        if not every or self.step in (0, self.plan.total_steps) or self.step % every:
            return False
        return not self.session.has_validation_of(self.step)

    def _recordings(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """The requested trace and snapshot, on the first rank. Yields a function to call after each step."""
        if not self.ranks.is_first:
            return contextlib.nullcontext(lambda: None)
        return recordings(self.config.trainer, self.directory.path, self.device)

    def _room_for_checkpoints(self) -> str | None:
        """A line that says when checkpoints will be written. Raises if the disk cannot hold them."""
        if not self.ranks.is_first:
            return None
        return checkpoints_planned(self.plan, self.directory, self.model.hf, self.step)

    def _resume(self) -> str | None:
        """Restore the newest undamaged checkpoint, or what `continue_from` names. Returns a line that says so, or None.

        It only reads, so an error leaves the directory as it is.
        """
        state = self.state
        if newest := self.ranks.from_first(lambda: newest_checkpoint(self.directory)):
            progress = progress_to_resume(newest, self.plan, self.directory, self.schedule.describe())
            self.loader.load_state_dict(progress.data)
            checkpoint.load(newest, self.model.hf, self.optimizer)
            state.recent_losses.extend(progress.recent_losses)
            state.step = state.saved_step = progress.step
            state.continues = progress.continues
            return f"resuming at step {state.step} from {newest}"
        if source := self.config.continue_from:
            progress = continue_from(source, self.model.hf, self.optimizer, self.data)
            state.continues = as_continued(progress)
            goes_on = self.loader.go_on_after(progress.data)
            data = "goes on where it stood" if goes_on else "begins anew, in its own order"
            return (
                f"continuing {progress.run} after step {progress.step}: its weights and optimizer state, under a plan "
                f"of {self.plan.total_steps} steps; the data {data}"
            )
        return "this run left no checkpoint: starting again at step 0" if self.directory.resumed else None

    def _write_lost_summary(self, failure: LinrnnError) -> None:
        self.session.write_lost_summary(self.step, failure)

    def _explain_out_of_memory(self, error: BaseException) -> OutOfMemoryError:
        self._pending = None
        where = f"in the validation after step {self.step}" if self._validating else f"at step {self.step + 1}"
        measured = self.measurements.memory.report()
        return explain_out_of_memory(error, where, self.plan, self.architecture, measured, self.session.console.line)

    def _summarise(self, status: str, failure: BaseException | None, evaluation: Evaluation | None) -> dict[str, Any]:
        return summary_of_run(
            status,
            failure,
            evaluation,
            plan=self.plan,
            session=self.session,
            state=self.state,
            architecture=self.architecture,
            data=self.data,
            measurements=self.measurements,
            epochs=self._epochs(self.step),
        )
