"""One training run: build from the configuration, step, log, validate, checkpoint, summarise.

Read :meth:`Trainer.fit` first, then :meth:`Trainer.train_step`.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from linrnn import costs
from linrnn.config import identity, run_name, to_yaml
from linrnn.config.schema import Config
from linrnn.core.dates import utc_now
from linrnn.core.errors import (
    ConfigError,
    DivergedError,
    InterruptedRun,
    LinrnnError,
    OutOfMemoryError,
    RankFailedError,
    StorageError,
    ran_out_of_memory,
)
from linrnn.core.interrupts import StopRequest
from linrnn.core.output import say
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
from linrnn.models import build_model, explain_resources
from linrnn.profiling import MemoryByComponent, SpeedMeter, memory_snapshot, trace, watched_loss
from linrnn.runs.directory import LOG, SUMMARY, RunDirectory, differences
from linrnn.runs.environment import command_line, describe_process, gpu_state
from linrnn.runs.figures import memory_of_run, speed_of_run, wall_seconds_of_run
from linrnn.runs.loggers import Console, Silence, WandbMirror
from linrnn.runs.metrics import JsonlWriter, read_jsonl
from linrnn.runs.summary import (
    MEAN_OF_LAST,
    final_lines,
    finished_lines,
    memory_lines,
    names_of_run,
    progress_line,
    status_of,
    summary_without_figures,
)
from linrnn.training import checkpoint
from linrnn.training.evaluation import Evaluation, evaluate, loss_inputs
from linrnn.training.optimizer import build_optimizer, build_schedule, clip_gradients
from linrnn.training.plan import Plan, make_training_plan
from linrnn.training.preflight import check_step_fits
from linrnn.training.runtime import compute_dtype, parameter_dtype, prepare_process
from linrnn.training.warm_start import as_continued, continue_from, find_weights

GIB = 2**30


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _concerns_all(failure: BaseException | None) -> bool:
    """Whether every rank ends at this very step for the same reason."""
    return failure is None or isinstance(failure, InterruptedRun | DivergedError)


class StepRecord:
    """A step's scalars on their way from the device: copied without waiting, read once they have arrived.

    Attributes:
        step: of the run.
        number_here: of this process, from 1.
        lr: the step's learning rate.
    """

    def __init__(self, step: int, number_here: int, lr: float, tensors: dict[str, torch.Tensor]) -> None:
        self.step, self.number_here, self.lr = step, number_here, lr
        self._names = list(tensors)
        stacked = torch.stack([tensor.detach().float() for tensor in tensors.values()])
        self._values = stacked.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if stacked.is_cuda else None
        if self._arrived:
            self._arrived.record()

    def read(self) -> dict[str, float]:
        if self._arrived:
            self._arrived.synchronize()
        return dict(zip(self._names, self._values.tolist(), strict=True))


class Trainer:
    """Builds everything that `config` names; :meth:`fit` runs it.

    Args:
        ranks: the processes that share the run, each with a Trainer of its own; None: this one alone.

    Raises:
        LinrnnError: a loss, model or device that cannot run here (before anything is built), unusable data, or a run
            directory that holds another configuration.
    """

    def __init__(self, config: Config, ranks: Ranks | None = None) -> None:
        self.config = config
        self.ranks = ranks or Ranks()
        self.plan: Plan = make_training_plan(config)
        if self.plan.world_size != self.ranks.world_size:
            raise ValueError(f"{self.plan.world_size} processes, and ranks of {self.ranks.world_size}")
        self.device, self.precision = self.plan.device, self.plan.precision
        prepare_process(config, self.device)
        # The data's vocabulary may turn out smaller than it is known to be here: never larger.
        self.memory_note = check_step_fits(self.plan, self.plan.architecture(vocabulary_size(config.data)))
        self.data = self.ranks.first_then_others(self._prepare_data)
        check_validation(self.data.valid, config.trainer.valid_tokens, reset_at_document=config.data.reset_at_document)
        self.weights = find_weights(config.init_from, self.data) if config.init_from else None
        self.continues: dict[str, Any] | None = None  # the run, step and tokens behind step 0
        self.architecture = self.plan.architecture(self.data.vocab_size)
        self.name = run_name(config, self.plan.world_size)
        self.identity = identity(config, self.plan.world_size)
        self.directory = RunDirectory(
            Path(config.results_dir) / config.group / self.name,
            identity=self.identity,
            resume=config.trainer.resume,
        )
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
        self.console: Silence = Silence()
        self.step = 0
        self.recent_losses: deque[float] = deque(maxlen=MEAN_OF_LAST)
        self.steps_here = 0  # done by this process
        self.speed = SpeedMeter(self.device, self.plan.unmeasured_steps, self.plan.tokens_per_step)
        self.memory = MemoryByComponent(self.model, self.optimizer, self.device)
        self.gpu_state: dict[str, Any] | None = None
        self.stop = StopRequest()
        self._pending: StepRecord | None = None
        self._memory_recorded = False
        self._validating = False
        self._saved_step: int | None = None  # of the newest checkpoint
        self._seconds_before = 0.0  # that earlier processes of the run took

    def _prepare_data(self) -> PreparedData:
        """The data, prepared and mapped; one rank of a machine compares all of it with the recorded hashes."""
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
            InterruptedRun: after a signal (:data:`linrnn.core.interrupts.SIGNALS`), with a checkpoint written.
            StorageError: the disk has no room for the checkpoints, or a file could not be written.
            DivergedError: the loss is not finite; the last good checkpoint is kept.
            OutOfMemoryError: with the memory by component and what to lower.
            RankFailedError: another process of the run has failed.
        """
        with contextlib.ExitStack() as closing:
            if self.ranks.is_first:
                self.directory.open()
                closing.callback(self.directory.close)
            if finished := self.ranks.from_first(self._finished):
                return finished
            where_it_begins = self._resume()
            self.room = self._check_room()
            if self.ranks.is_first:
                self._begin(closing)
            if where_it_begins:
                self.console.line(where_it_begins)
            return self._fit()

    def _begin(self, closing: contextlib.ExitStack) -> None:
        """Write the first files of this process, and open those that it goes on writing."""
        self.directory.begin(to_yaml(self.config))
        self.directory.begin_process(describe_process(self.config, self.step, self.continues))
        for name, text in (self.data.tokenizer.files() if self.data.tokenizer else {}).items():
            self.directory.write_text(name, text)
        checkpoint.remove_partial(self.directory.checkpoints)
        self.console = console = Console(self.directory.path / LOG, self.config.logger.console_every_seconds)
        closing.callback(console.close)
        self.metrics = JsonlWriter(self.directory.metrics)
        closing.callback(self.metrics.close)
        # A process that has no step left to train makes the last validation again.
        self.metrics.truncate_after(self.step, keep_validation=self.step < self.plan.total_steps)
        self._seconds_before = wall_seconds_of_run(read_jsonl(self.directory.metrics))

    def _fit(self) -> dict[str, Any]:
        if self.ranks.is_first:
            self.wandb = WandbMirror(
                self.config.logger.wandb,
                self.directory.path,
                run_name=self.name,
                group=self.config.group,
                tags=[getattr(self.config, group).name for group in ("model", "size", "loss", "data")],
                hyperparameters=self.identity,
                history=lambda: read_jsonl(self.directory.metrics),
                say=self.console.line,
            )
        self._announce()
        self.valid_bytes = self.data.token_bytes(self.data.valid, self.config.trainer.valid_tokens, self.console.line)
        self.ranks.shield(self._write_lost_summary)
        self._began_at = self._saved_at = time.monotonic()
        with self.stop:
            summary, failure = self._run()
        if self.ranks.is_first:
            self.wandb.finish(summary, exit_code=0 if failure is None else 1)
        for line in final_lines(self.config, self.directory.path, summary):
            self.console.line(line)
        if failure is not None:
            raise failure
        return summary

    def _run(self) -> tuple[dict[str, Any], BaseException | None]:
        """Train, save, validate, and write the summary of whatever became of that; also returns why it failed."""
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
            status, failure = self._status_of(error)
        if _concerns_all(failure) or (self.ranks.world_size == 1 and not isinstance(failure, KeyboardInterrupt)):
            try:
                self.saver.wait()  # for the last good checkpoint, if it is being written
            except StorageError as error:
                self.console.line(f"error: {error.cause}")
        summary = self._summarise(status, failure, evaluation)
        if _concerns_all(failure):
            self.ranks.end_together()
        if self.ranks.is_first:
            try:
                self.directory.end_process(self.step)
                self.directory.write_json(SUMMARY, summary)
            except StorageError as error:
                failure = failure or error
        return summary, failure

    def _status_of(self, error: BaseException) -> tuple[str, BaseException]:
        """The status of a run that ends with this error, and the error that explains it best."""
        if isinstance(error, InterruptedRun | KeyboardInterrupt):
            return "interrupted", error
        if isinstance(error, DivergedError):
            return "diverged", error
        failure = self.ranks.explain(error)
        if isinstance(failure, RankFailedError):
            return status_of(failure.exit_code), failure
        if ran_out_of_memory(error):
            return "out_of_memory", self._explain_out_of_memory(error)
        if unsupported := explain_resources(error, self.config.model):
            return "unsupported", unsupported
        return "failed", failure

    def _train(self, end_of_step: Callable[[], None]) -> None:
        trainer = self.config.trainer
        self.model.train()
        if self._misses_validation():
            self._validate()
        self.speed.clock.start()
        while self.step < self.plan.total_steps:
            if self.steps_here == self.plan.unmeasured_steps:
                self.memory.start()
            record = self.train_step()
            end_of_step()
            self._flush()  # the previous step's scalars, while the device works on this one
            self._pending = record
            if self.step == self.plan.total_steps:
                break
            if trainer.checkpoint_every and self.step % trainer.checkpoint_every == 0:
                self._save()
            if trainer.valid_every and self.step % trainer.valid_every == 0:
                self._validate()
            self._heed()
        self.gpu_state = gpu_state(self.device)  # while the device works on the last steps
        self._flush()

    def _misses_validation(self) -> bool:
        """Whether the process before this one was stopped after the checkpoint of a step and before its validation."""
        every = self.config.trainer.valid_every
        if not every or self.step in (0, self.plan.total_steps) or self.step % every:
            return False
        return self.ranks.from_first(
            lambda: (
                not any(
                    record["step"] == self.step and "valid/loss_nats" in record
                    for record in read_jsonl(self.directory.metrics)
                )
            )
        )

    def _heed(self) -> None:
        """Do on all ranks, at the same step, what one of them has reason for.

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
        """Whether this rank's clock says so."""
        trainer = self.config.trainer
        if trainer.checkpoint_every == 0 or trainer.checkpoint_minutes is None:
            return False
        return time.monotonic() - self._saved_at >= 60 * trainer.checkpoint_minutes

    def train_step(self) -> StepRecord:
        """One optimizer step over `accumulation_steps` micro-steps.

        Every micro-step's summed loss is divided by the tokens of the whole step on all ranks, so that the gradient
        equals that of one large batch however it is split and however many labels are ignored.
        """
        self.speed.step_begins()
        lr = self.schedule.apply(self.step)
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
        self.speed.step_ended()
        self.step += 1
        self.steps_here += 1
        return StepRecord(
            self.step,
            self.steps_here,
            lr,
            {"train/loss_nats": self.ranks.sum(mean_nats), "train/grad_norm": grad_norm, **stats},
        )

    def _forward_backward(self, batch: Batch, n_tokens: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Gradients of one micro-step; returns its share of the step's mean loss, and the backend's statistics.

        What the loss gets has no name here, so that the blocks' backward pass does not find it in memory any more.
        """
        inputs = (self.replica, batch, self.precision, self.device)
        output = watched_loss(self.loss, *loss_inputs(*inputs), self.memory, self.speed.loss)
        mean_nats = output.sum_nats / n_tokens
        (mean_nats * self.ranks.loss_scale).backward()
        return mean_nats.detach(), {f"loss/{name}": value for name, value in output.stats.items()}

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
        self.recent_losses.append(loss)
        self.speed.arrived(record.number_here)
        self._show_progress(record.step, loss)
        if record.step % self.config.trainer.log_every == 0 or record.step == self.plan.total_steps:
            metrics: dict[str, float | None] = {
                **values,
                "train/lr": record.lr,
                "train/tokens": record.step * self.plan.tokens_per_step,
                "train/epoch": self._epochs(record.step),
                "train/wall_seconds": self._wall_seconds(),
                **self.speed.record(),
            }
            if wall_ms := metrics.get("speed/wall_step_ms"):
                metrics |= {f"speed/{name}": share for name, share in self._mfu(wall_ms / 1e3).items()}
                if not self._memory_recorded:
                    metrics |= self._memory_metrics()
            self._log(record.step, metrics)

    def _epochs(self, step: int) -> float:
        """Passes over the training data after so many steps."""
        return step * self.plan.sequences_per_step / self.loader.n_blocks

    def _wall_seconds(self) -> float:
        """That all processes of the run have taken so far, without the time between them."""
        return self._seconds_before + time.monotonic() - self._began_at

    @property
    def _has_measured(self) -> bool:
        """Whether this process is past its warm-up, whose memory (tuning of kernels) counts nowhere."""
        return self.steps_here > self.plan.unmeasured_steps

    def _memory_metrics(self) -> dict[str, float | None]:
        if not self._has_measured:
            return {}
        self._memory_recorded = True
        return {f"memory/{name}_gib": size / GIB for name, size in self._memory_of_ranks().items()}

    @contextlib.contextmanager
    def _recordings(self) -> Iterator[Callable[[], None]]:
        """The profiler's trace and the memory snapshot that were asked for; yields what ends a profiled step."""
        trainer, path = self.config.trainer, self.directory.path
        if not self.ranks.is_first:
            yield lambda: None
            return
        snapshot = (
            memory_snapshot(path / "memory_snapshot.pickle", self.device) if trainer.memory_snapshot else nullcontext()
        )
        with (
            snapshot,
            trace(trainer.profile_steps, path / "trace.json.gz", trainer.warmup_measurement_steps) as end_of_step,
        ):
            yield end_of_step

    def _log(self, step: int, metrics: dict[str, float | None]) -> None:
        if self.ranks.is_first:
            self.metrics.write({"step": step, **metrics})
            self.wandb.log(step, metrics)

    def _show_progress(self, step: int, loss: float) -> None:
        total = self.plan.total_steps
        seconds = self.speed.recent_step_seconds()
        line = progress_line(
            step,
            total,
            self._epochs(step),
            loss,
            self.data.entropy_floor_nats,
            None if seconds is None else self.plan.tokens_per_step / seconds,
            None if seconds is None else seconds * (total - step),
        )
        self.console.progress(line, final=step == total)

    def _validate(self) -> Evaluation:
        self._flush()
        self._validating = True
        with self.speed.clock.paused():
            evaluation = self._evaluate()
            self._log(self.step, {**evaluation.metrics(), **self._memory_metrics()})
        self._validating = False
        self.console.line(f"valid at step {self.step}: {evaluation}")
        return evaluation

    def _evaluate(self) -> Evaluation:
        trainer = self.config.trainer
        batches = BatchesOnce(
            self.data.valid,
            seq_len=trainer.seq_len,
            batch_size=self.plan.sequences_of_rank,
            max_tokens=trainer.valid_tokens,
            reset_at_document=self.config.data.reset_at_document,
            token_bytes=self.valid_bytes,
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
            # The steps so far are sound. Of several ranks, the others wait in a collective: they cannot save with this.
            if ran_out_of_memory(error) and self.ranks.world_size == 1 and trainer.checkpoint_every != 0:
                self._save()
            raise

    def _save(self) -> None:
        """Begin a checkpoint of a state whose loss is known to be finite; every rank writes what it holds."""
        if self.step == self._saved_step:
            return
        self._flush()
        progress = checkpoint.Progress(
            run=f"{self.config.group}/{self.name}",
            step=self.step,
            tokens=self.step * self.plan.tokens_per_step,
            data=self.loader.state_dict(),
            recent_losses=list(self.recent_losses),
            schedule=self.schedule.describe(),
            token_fingerprint=self.data.token_fingerprint,
            continues=self.continues,
        )
        with self.speed.clock.paused():
            self.saver.save(progress, self.model.hf, self.optimizer, to_yaml(self.config))
        self._saved_step, self._saved_at = self.step, time.monotonic()

    def _check_room(self) -> str | None:
        """When checkpoints will be written, and whether the disk can hold them; None for a run without checkpoints.

        Raises:
            StorageError: the disk cannot hold them.
        """
        trainer, root = self.config.trainer, self.directory.checkpoints
        if trainer.checkpoint_every == 0 or not self.ranks.is_first:
            return None
        every, left = trainer.checkpoint_every or self.plan.total_steps, self.plan.total_steps - self.step
        facts = checkpoint.check_room(
            self.directory.path,
            checkpoint.foreseen_bytes(self.model.hf),
            there=0 if self.directory.begins_anew else len(checkpoint.found(root)),
            keep=trainer.keep_checkpoints,
            writes=math.ceil(left / every),
            by_clock=trainer.checkpoint_minutes is not None,
        )
        times = [f"every {trainer.checkpoint_every} steps"] if trainer.checkpoint_every else []
        times += [f"every {trainer.checkpoint_minutes:g} minutes"] if trainer.checkpoint_minutes is not None else []
        return f"checkpoints {', '.join([*times, 'and at the end'])}: {facts}"

    def _finished(self) -> dict[str, Any] | None:
        """The summary of a run that has nothing left to do; what can be done with it is printed, nothing is written."""
        summary = None if self.directory.begins_anew else self.directory.read_summary()
        if summary is None or summary["status"] != "finished":
            return None
        self._check_not_beyond(summary["steps"])
        if summary["steps"] < self.plan.total_steps:
            return None
        for line in finished_lines(self.directory.path, summary["steps"], self.plan.horizon):
            say(line)
        return summary

    def _resume(self) -> str | None:
        """Restore the newest sound checkpoint, or what `continue_from` names; returns a line that says so, or None.

        Reads alone: a refusal leaves the directory as it is.
        """
        if newest := self.ranks.from_first(self._newest_checkpoint):
            progress = checkpoint.read_progress(newest)
            self._check_not_beyond(progress.step)
            self._check_schedule(newest, progress.schedule)
            self.loader.load_state_dict(progress.data)
            checkpoint.load(newest, self.model.hf, self.optimizer)
            self.recent_losses.extend(progress.recent_losses)
            self.step = self._saved_step = progress.step
            self.continues = progress.continues
            return f"resuming at step {self.step} from {newest}"
        if source := self.config.continue_from:
            progress = continue_from(source, self.model.hf, self.optimizer, self.data)
            self.continues = as_continued(progress)
            data = (
                "goes on where it stood" if self.loader.go_on_after(progress.data) else "begins anew, in its own order"
            )
            return (
                f"continuing {progress.run} after step {progress.step}: its weights and optimizer state, under a plan "
                f"of {self.plan.total_steps} steps; the data {data}"
            )
        return "this run left no checkpoint: starting again at step 0" if self.directory.resumed else None

    def _newest_checkpoint(self) -> Path | None:
        return None if self.directory.begins_anew else checkpoint.newest(self.directory.checkpoints)

    def _check_not_beyond(self, step: int) -> None:
        """Raises ConfigError: the run has gone further than this command asks for."""
        if step > self.plan.total_steps:
            raise ConfigError(
                f"{self.directory.path} holds a run of {step} steps, and this command stops at {self.plan.total_steps}",
                "raise trainer.max_steps (or max_tokens), or choose another run_name or group",
            )

    def _check_schedule(self, checkpoint: Path, there: dict[str, Any]) -> None:
        """Raises ConfigError: the checkpoint's next learning rates would be others than this run's."""
        if changed := differences(there, self.schedule.describe()):
            raise ConfigError(
                f"{checkpoint} was trained under another schedule ({'; '.join(changed)})",
                "continue_from= trains on under a new schedule, in a run of its own",
            )

    def _announce(self) -> None:
        arch, config = self.architecture, self.config
        self.console.line(
            f"{arch.model} x {arch.size} x {config.loss.name}: {arch.n_parameters:,} parameters, "
            f"V = {arch.vocab_size:,}, "
            f"{self.precision} on {self.device.type}"
            + (f", {self.plan.world_size} ranks" if self.plan.world_size > 1 else "")
        )
        self.console.line(f"data: {self.data.description}")
        if self.weights and self.weights.remark:
            self.console.line(self.weights.remark)
        groups = config.parallel.data_ranks(self.plan.world_size)
        unit = "ranks" if groups == self.plan.world_size else f"group(s) of {self.plan.world_size // groups} ranks"
        self.console.line(
            f"{self.plan.total_steps} steps of {self.plan.tokens_per_step:,} tokens "
            f"(B = {config.trainer.batch_size} x T = {config.trainer.seq_len} x {config.trainer.accumulation_steps}"
            + (f" x {groups} {unit}) " if self.plan.world_size > 1 else ") ")
            + f"-> {self.directory.path}"
        )
        if self.plan.horizon != self.plan.total_steps:
            self.console.line(f"the {config.optimizer.schedule} schedule ends at step {self.plan.horizon}")
        if self.memory_note:
            self.console.line(self.memory_note)
        if self.room:
            self.console.line(self.room)
        if self.device.type == "cuda":
            self.console.line(
                "the first steps tune GPU kernels: minutes on a machine that has not run this model before"
            )

    def _mfu(self, step_seconds: float | None) -> dict[str, float | None]:
        """`mfu` and `mfu_6n`; null before anything is measured."""
        return costs.mfu(
            self.architecture,
            seq_len=self.config.trainer.seq_len,
            tokens_per_second=step_seconds and self.plan.tokens_per_step / step_seconds,
            device_name=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            precision=self.precision,
            n_devices=self.plan.world_size,
        )

    def _memory_of_ranks(self) -> dict[str, int]:
        """Bytes by component: of each, those of the rank that has most."""
        report = self.memory.report()
        sizes = self.ranks.largest(*report.values())
        return {name: int(size) for name, size in zip(report, sizes, strict=True)}

    def _write_lost_summary(self, failure: LinrnnError) -> None:
        """The summary of a run whose rank 0 waits in vain for one that has failed, written beside it."""
        if self.ranks.is_first:
            summary = summary_without_figures(self.config, self.name, "failed", failure.cause, command_line())
            summary |= {"steps": self.step, "tokens": self.step * self.plan.tokens_per_step}
            summary |= {"started": self.directory.started}
            self.directory.end_process(self.step)
            self.directory.write_json(SUMMARY, summary)

    def _explain_out_of_memory(self, error: BaseException) -> OutOfMemoryError:
        """The measured components beside what the formula expects, and what to lower."""
        self._pending = None
        self.console.line("memory by component when it ran out:")
        for line in memory_lines(self.memory.report()):
            self.console.line(line)
        self.console.line("memory that a whole step was foreseen to need:")
        estimate = self.plan.memory_estimate(self.architecture)
        foreseen = self.plan.training_state(self.architecture) if estimate is None else estimate.components()
        for line in memory_lines(foreseen) if estimate else [*memory_lines(foreseen), "  all else: unknown"]:
            self.console.line(line)
        trainer = self.config.trainer
        options = [
            f"trainer.batch_size={max(trainer.batch_size // 2, 1)} with "
            f"trainer.accumulation_steps={2 * trainer.accumulation_steps}"
            if trainer.batch_size > 1
            else "a shorter trainer.seq_len",
            "trainer.activation_checkpointing=full" if trainer.activation_checkpointing == "none" else None,
            "loss=cce_kahan" if not self.config.loss.name.startswith("cce") else None,
            "parallel=fsdp" if self.config.parallel.name == "ddp" else None,
        ]
        where = f"in the validation after step {self.step}" if self._validating else f"at step {self.step + 1}"
        return OutOfMemoryError(
            f"out of memory {where}: {first_line(error)}",
            "try " + ", or ".join(option for option in options if option),
        )

    def _summarise(self, status: str, failure: BaseException | None, evaluation: Evaluation | None) -> dict[str, Any]:
        records = read_jsonl(self.directory.metrics) if self.ranks.is_first else []
        here = self._memory_of_ranks() if _concerns_all(failure) else self.memory.report()
        memory = memory_of_run(records)
        if self._has_measured or not memory:
            memory = {name: max(size, memory.get(name, 0)) for name, size in (memory | here).items()}
        speed = speed_of_run(records, self.plan.tokens_per_step)
        arch = self.architecture
        return {
            "status": status,
            "reason": failure and first_line(failure),
            **names_of_run(self.config, self.name, self.plan.world_size),
            "n_parameters": arch.n_parameters,
            "hidden_size": arch.hidden_size,
            "world_size": self.plan.world_size,
            "vocab_size": arch.vocab_size,
            "precision": self.precision,
            "steps": self.step,
            "tokens": self.step * self.plan.tokens_per_step,
            "continues": self.continues,
            "epochs": self._epochs(self.step),
            "train_loss_nats": fmean(self.recent_losses) if self.recent_losses else None,
            "entropy_floor_nats": self.data.entropy_floor_nats,
            "valid_loss_nats": evaluation and evaluation.loss_nats,
            "valid_perplexity": evaluation and evaluation.perplexity,
            "valid_bits_per_byte": evaluation and evaluation.bits_per_byte,
            "peak_memory_bytes": memory.get("peak", memory.get("resident_peak")),
            "peak_memory_is": "allocated on the GPU" if "peak" in memory else "the process's resident set",
            "memory_bytes": memory,
            **speed,
            **self._mfu(speed["wall_step_ms"] and speed["wall_step_ms"] / 1e3),
            "wall_seconds": self._wall_seconds(),
            "started": self.directory.started if self.ranks.is_first else None,
            "ended": utc_now(),
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "gpu_state": self.gpu_state,
            "data_fingerprint": self.data.fingerprint,
            "command": command_line(),
        }
