"""One training run, from its plan to its summary. Read it top to bottom: build, fit, resume, the loop, a step, the end.

`starting` has what it starts from, `run_log` what it writes, `checkpoint` what it saves, `failures` how it may end.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from linrnn.config import to_yaml
from linrnn.config.schema import Config
from linrnn.core.errors import DivergedError, InterruptedRun, StorageError, first_line
from linrnn.core.garbage import collect_after, collected_at_known_points
from linrnn.core.interrupts import StopRequest
from linrnn.core.machine import seconds_since_start
from linrnn.core.output import say
from linrnn.data import Batch, BatchesOnce, BatchLoader, vocabulary_size
from linrnn.distributed import Ranks
from linrnn.losses import LossBackend, build_loss
from linrnn.models import BlankModel, tuning
from linrnn.models.language_model import compute_dtype, loss_inputs, parameter_dtype
from linrnn.profiling import LossObserver, watched_loss
from linrnn.runs.directory import RunDirectory
from linrnn.runs.environment import gpu_state
from linrnn.training import checkpoint, failures, starting
from linrnn.training.checkpoint import Checkpointer
from linrnn.training.evaluation import Evaluation, evaluate
from linrnn.training.execution import compilation
from linrnn.training.execution.cuda_graph import GraphedPasses
from linrnn.training.execution.float8 import use_float8
from linrnn.training.optimizer import Schedule, build_optimizer, clip_gradients
from linrnn.training.plan import check_step_fits, make_training_plan
from linrnn.training.run_log import RunLog, StepRecord
from linrnn.training.runtime import prepare_process, synchronize

LossAndStats = tuple[torch.Tensor, dict[str, torch.Tensor]]


class Trainer:
    """Builds everything that `config` names, and trains it. The model has no weights before :meth:`ensure_weights`.

    Args:
        ranks: the processes that share the run, each with its own Trainer; None: only this process.

    Attributes:
        step, steps_here: optimizer steps that the run has done, and this process.
        continues: the run, step and tokens behind step 0; None for a run from scratch.
        replica: the model as the ranks share it; the same object as `model` in one process.
        parameters: the model's. To walk through all modules for them takes the host a millisecond.
        seconds_to: seconds from the command's start to the end of each stage that the run has reached so far:
            `libraries` imported, `model` built, `kernels` compiled, `weights` drawn, `first_step` ended.

    Raises:
        LinrnnError: a loss, model or device cannot run here (before anything is built), the data is unusable, or the
            run directory holds another configuration.
    """

    # ------------------------------------------------------------------------------------------------------- build
    def __init__(self, config: Config, ranks: Ranks | None = None) -> None:
        self.config, self.ranks = config, ranks or Ranks()
        self.step = self.steps_here = 0
        self.continues: dict[str, Any] | None = None
        self.seconds_to = {"libraries": seconds_since_start()}
        self.stop = StopRequest()
        self._has_weights = self._validating = False
        self._graphed: GraphedPasses | None = None
        self.plan = make_training_plan(config)
        if self.plan.world_size != self.ranks.world_size:
            raise ValueError(f"{self.plan.world_size} processes, and ranks of {self.ranks.world_size}")
        self.device, self.precision = self.plan.device, self.plan.precision
        prepare_process(config, self.device)
        # The data's vocabulary may turn out smaller than this one, never larger.
        memory_note = check_step_fits(self.plan, self.plan.architecture(vocabulary_size(config.data)))
        if self.ranks.is_first:
            say(f"opening the data ({config.data.name})")
        self.data = starting.prepared_data(config, self.ranks)
        weights = starting.find_weights(config.init_from, self.data) if config.init_from else None
        self.architecture = self.plan.architecture(self.data.vocab_size)
        if weights:
            weights.check(self.architecture)
        self.directory = RunDirectory(config, self.plan.world_size)
        self._notes = [weights.remark if weights else None]  # lines for the user, before the first step
        if self.ranks.is_first:
            say(f"building {self.architecture.model}: {self.architecture.n_parameters:,} parameters")
        self._build(weights)
        self._notes.append(memory_note)
        self.checkpointer = Checkpointer(self.directory.checkpoints, config.trainer.keep_checkpoints)
        self.log = RunLog(
            self.plan, self.directory, self.ranks, self.architecture, self.data, self.model, self.optimizer,
            sequences=self.loader.n_sequences,
        )  # fmt: skip

    def _build(self, weights: starting.Weights | None) -> None:
        """Build model, loss, optimizer, learning-rate schedule and loader."""
        config, trainer, arch = self.config, self.config.trainer, self.architecture
        dtype, compute = parameter_dtype(self.precision), compute_dtype(self.precision)
        self._blank = BlankModel(arch, self.ranks.row_shard, device=self.device, dtype=dtype)
        self.model = self._blank.model
        if trainer.float8 == "blocks":
            self._notes.append(use_float8(self.model, self.device))
        self.model.set_activation_checkpointing(trainer.activation_checkpointing)
        if trainer.compile != "none":
            self.model.set_compile(trainer.compile)
        self.replica = self.ranks.parallelize(self.model, compute)
        if weights:
            weights.load(self.model, self._blank.row_shard)
            self._has_weights = True
        vocabulary = self.ranks.vocabulary(arch.vocab_size)
        self.loss: LossBackend = build_loss(config.loss, device=self.device, vocabulary=vocabulary)
        self._valid_loss = self.loss  # the same object where it can be: torch.compile compiles once
        if (validating := config.loss.for_validation()) != config.loss:
            self._valid_loss = build_loss(validating, device=self.device, vocabulary=vocabulary)
        self.model.set_softcap(config.loss.softcap)
        self.optimizer = build_optimizer(self.model, config.optimizer, self.device)
        self.parameters = list(self.model.parameters())
        self.schedule = Schedule(self.optimizer, config.schedule, config.optimizer.lr, self.plan.horizon)
        self._batching: dict[str, Any] = {
            "seq_len": trainer.seq_len,
            "batch_size": self.plan.sequences_of_rank,
            "reset_at_document": config.data.reset_at_document,
        }
        rank, world_size = self.ranks.rank, self.ranks.world_size
        self.loader = BatchLoader(self.data.train, seed=config.seed, rank=rank, world_size=world_size, **self._batching)
        self._notes.append(self.loader.remark(self.plan.total_steps * self.plan.sequences_per_step))

    # ---------------------------------------------------------------------------------------------------- the run
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
            if self.ranks.is_first:
                self.directory.open()
                closing.callback(self.directory.close)
            if summary := self.ranks.from_first(lambda: starting.finished(self.directory, self.plan, self.data)):
                return summary
            self._begin(closing)
            with self.stop, collected_at_known_points():
                summary, failure = self._run()
            self.log.end(summary, failed=failure is not None)
            if failure is not None:
                raise failure
            return summary

    def _begin(self, closing: contextlib.ExitStack) -> None:
        """Resume and check the disk's room; only then write the first files, and print what the run will do."""
        where_it_begins, room = self.resume(), None
        if self.ranks.is_first:
            room = checkpoint.check_room(
                self.config.trainer,
                self.directory.path,
                size=checkpoint.estimated_bytes(self.model.hf, self.optimizer),
                there=0 if self.directory.begins_anew else len(checkpoint.found(self.directory.checkpoints)),
                steps=self.plan.total_steps - self.step,
            )
        self.log.begin(closing, self.step, self.continues)
        self.checkpointer.begin(self.step)
        self.log.announce(where_it_begins, *self._notes, room)
        tokens, tokenizer = self.config.trainer.valid_tokens, self.data.tokenizer
        self._valid_batches = BatchesOnce(self.data.valid, max_tokens=tokens, tokenizer=tokenizer, **self._batching)
        self.ranks.on_lost_rank(lambda failure: self.log.write_lost_summary(self.step, failure))
        closing.enter_context(tuning.show_progress(self.log.line))

    def resume(self) -> str | None:
        """Restore the newest undamaged checkpoint, or what `continue_from` names. Returns a line that says so, or None.

        Only if neither is there, initial weights are drawn. It only reads, so an error leaves the directory as it is.
        """
        start = starting.restore(
            self.plan, self.ranks, self.directory, self.data, self.model.hf, self.optimizer, self.loader
        )
        if start is None:
            self.seconds_to["model"] = seconds_since_start()
            self.ensure_weights()
            return starting.starting_again(self.directory)
        line, progress = start
        self._has_weights = True
        self.step, self.continues = progress.step, progress.continues
        self.log.recent_losses.extend(progress.recent_losses)
        return line

    def ensure_weights(self) -> None:
        """Return once the model has weights: those that were loaded or restored, or else its initial ones."""
        if not self._has_weights:
            self._blank.init_weights(self.config.seed)
            self.ranks.broadcast_weights(self.model)
            self._has_weights = True
            self.seconds_to["weights"] = seconds_since_start()

    def _run(self) -> tuple[dict[str, Any], BaseException | None]:
        """Train, save and validate, and write the summary in any case. Returns the summary and the failure, if any."""
        status, evaluation = "finished", None
        failure: BaseException | None = None
        try:
            self._train()
            evaluation = self.validate()
            evaluation.check_finite(self.step)
            self.checkpointer.wait()
        except BaseException as error:
            self.log.forget()
            where = f"in the validation after step {self.step}" if self._validating else f"at step {self.step + 1}"
            status, failure = failures.explained(error, where, self.ranks, self.plan, self.architecture, self.log)
        if self._graphed is not None:
            self._graphed.drop()
        together = failure is None or isinstance(failure, InterruptedRun | DivergedError)  # at this very step
        if together or (self.ranks.world_size == 1 and not isinstance(failure, KeyboardInterrupt)):
            try:
                if self._validating and status == "out_of_memory" and self.config.trainer.checkpoint_every != 0:
                    self.save()  # a validation changes nothing of the state after its step
                self.checkpointer.wait()  # the last good checkpoint may still be being written
            except Exception as error:
                self.log.line(f"error: {first_line(error)}")
        summary = self.log.summary(self.step, self.continues, status, failure, evaluation, together=together)
        if together:
            self.ranks.end_together()
        try:
            self.log.write_summary(self.step, summary)
        except StorageError as error:
            failure = failure or error
        return summary, failure

    def _train(self) -> None:
        """Take all remaining steps, with checkpoints and validations between them, and a checkpoint at the end."""
        trainer, last = self.config.trainer, self.plan.total_steps
        with self.log.recordings() as end_of_step:
            self.model.train()
            if self.log.misses_validation(self.step):
                self.validate()
            self.log.speed.start()
            requests = self.ranks.max_on_host_async(self._requests)
            while self.step < last:
                if self.steps_here == self.plan.steps_before_memory:
                    self.log.memory.start()
                record = self.train_step() if self.steps_here else self._first_step()
                end_of_step()
                collect_after(self.steps_here)  # at the same step on all ranks
                self.log.append(record)  # writes the previous step, while the device works on this one
                if self.step == last:
                    break
                if trainer.checkpoint_every and self.step % trainer.checkpoint_every == 0:
                    self.save()
                if trainer.valid_every and self.step % trainer.valid_every == 0:
                    self.validate()
                self._handle_requests(requests())
                requests = self.ranks.max_on_host_async(self._requests)
            self.log.gpu_state = gpu_state(self.device)  # while the device works on the last steps
            self.log.write()
            if trainer.checkpoint_every != 0:
                self.save()
                self.checkpointer.wait()

    # ----------------------------------------------------------------------------------------------------- a step
    def train_step(self) -> StepRecord:
        """One optimizer step over `accumulation_steps` micro-steps.

        Every micro-step's summed loss is divided by the tokens of the whole step on all ranks. The gradient therefore
        equals that of one large batch, however the batch is split and however many labels are ignored.
        """
        self.ensure_weights()
        self.log.speed.step_begins()
        lr = self.schedule.apply(self.step)
        accumulation_steps = self.config.trainer.accumulation_steps
        n_tokens = max(self.loader.labels_ahead(accumulation_steps), 1)
        batches = [next(self.loader) for _ in range(accumulation_steps)]
        mean_nats = torch.zeros((), device=self.device)
        stats: dict[str, torch.Tensor] = {}
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches)
            with contextlib.nullcontext() if last else self.ranks.no_sync(self.replica):
                nats, stats = self._forward_backward(batch, n_tokens)
            mean_nats += nats
        grad_norm = clip_gradients(self.parameters, self.config.optimizer.max_grad_norm)
        self.optimizer.step()
        self.ranks.zero_gradients(self.optimizer)
        self.log.speed.step_ended()
        self.step += 1
        self.steps_here += 1
        scalars = {"train/loss_nats": self.ranks.sum(mean_nats), "train/grad_norm": grad_norm, **stats}
        return StepRecord(self.step, self.steps_here, lr, scalars)

    def _forward_backward(self, batch: Batch, n_tokens: int) -> LossAndStats:
        """Gradients of one micro-step. Returns its share of the step's mean loss, and the backend's statistics."""
        passes = functools.partial(
            forward_backward, self.replica, self.loss, n_tokens=n_tokens, scale=self.ranks.loss_scale,
            precision=self.precision, device=self.device,
        )  # fmt: skip
        before = self.plan.steps_before_graph
        if before is None or self.steps_here < before:
            return passes(batch, observers=(self.log.memory, self.log.speed))
        if self._graphed is None:  # all steps have n_tokens labels; the output layer cannot be timed in a graph
            self.log.line(f"from step {self.step + 1} on a CUDA graph replays the forward and backward pass")
            graphed = functools.partial(passes, observers=(self.log.memory,))
            self._graphed = GraphedPasses(graphed, self.parameters, batch, self.device, self.ranks.reshard)
        return self._graphed(batch)

    def _first_step(self) -> StepRecord:
        """The first step of this process, in which kernels are tuned and compiled, and the model if it is to be."""
        number, began, compiled = self.step + 1, time.monotonic(), self.config.trainer.compile
        self.log.line(f"step {number} begins{', and compiles kernels' * (self.device.type == 'cuda')}")
        with tuning.during(f"step {number}" + (f", trainer.compile={compiled}" if compiled != "none" else "")):
            if compilation.compiles_ahead(self.config, self.device):
                self._compile_kernels()
            record = self.train_step()
        synchronize(self.device)
        self.stop.renew()
        took, since = time.monotonic() - began, seconds_since_start()
        self.seconds_to["first_step"] = since
        self.log.record_first_step(self.seconds_to)
        remark = f"; {of_kernels}" if (of_kernels := tuning.remark()) else ""
        self.log.line(f"step {number} took {took:.1f} s, {since:.1f} s after the start{remark}")
        return record

    def _compile_kernels(self) -> None:
        """Compile all kernels of a step at once, by a rehearsal of the step."""
        line = self.log.line if self.ranks.is_first else functools.partial(say, stream=sys.stderr)
        position = self.loader.state_dict()
        batch = next(self.loader)
        self.loader.load_state_dict(position)
        if compilation.compile_kernels(
            self.replica, batch, self.ranks, self.precision, self.device, say=line, loss=self.loss
        ):
            self.seconds_to["kernels"] = seconds_since_start()

    # -------------------------------------------------------------------------------- validations and checkpoints
    def validate(self) -> Evaluation:
        """One pass over the validation tokens. Its figures go to the metrics and to the console."""
        self.log.write()
        self._validating = True
        with self.log.speed.paused():
            evaluation = evaluate(
                self.model,
                self._valid_loss,
                self._valid_batches,
                precision=self.precision,
                device=self.device,
                ranks=self.ranks,
                before_batch=lambda: self._handle_requests(self.ranks.max_on_host(*self._requests())),
            )
            self.log.validation(self.step, evaluation)
        self._validating = False
        return evaluation

    def save(self) -> None:
        """Start a checkpoint of a state whose loss is known to be finite. Every rank writes its own part."""
        if self.step == self.checkpointer.saved_step:
            return
        self.log.write()
        progress = checkpoint.Progress(
            run=f"{self.config.group}/{self.directory.path.name}",
            step=self.step,
            tokens=self.step * self.plan.tokens_per_step,
            data=self.loader.state_dict(),
            recent_losses=list(self.log.recent_losses),
            token_fingerprint=self.data.token_fingerprint,
            continues=self.continues,
        )
        with self.log.speed.paused():
            self.checkpointer.save(progress, self.model.hf, self.optimizer, to_yaml(self.config))

    def _requests(self) -> tuple[float, float, float]:
        """What this rank asks of all ranks: whether a checkpoint has failed, which signal came, and whether to save."""
        return self.checkpointer.failed, self.stop.signal_number or 0, self.checkpointer.is_due(self.config.trainer)

    def _handle_requests(self, requests: Sequence[float]) -> None:
        """Save or stop if one rank asks for it. All ranks get the same `requests` at the same step.

        Several ranks act on a request one step later, so that none waits for the answers of the others.

        Raises:
            StorageError: the latest checkpoint could not be written.
            InterruptedRun: a signal has come; a checkpoint is written.
        """
        failed, signal_number, due = requests
        if failed:
            self.checkpointer.wait()
        if signal_number:
            self.save()
            self.checkpointer.wait()
            where = "in the validation after" if self._validating else "at"
            raise InterruptedRun(
                f"interrupted {where} step {self.step} of {self.plan.total_steps}; checkpoint written",
                "run the same command again to continue",
                int(signal_number),
            )
        if due:
            self.save()


def forward_backward(
    model: Any,
    loss: LossBackend,
    batch: Batch,
    *,
    n_tokens: int,
    scale: float,
    precision: str,
    device: torch.device,
    observers: Sequence[LossObserver] = (),
) -> LossAndStats:
    """Add the gradients of a micro-step.

    Args:
        model: as the ranks share it.
        batch: of this rank, (sequences, tokens), on any device.
        n_tokens: labels of the whole step on all ranks. Gradients are those of the mean loss over all of them.
        scale: a factor of the gradients, `Ranks.loss_scale`.
        precision: `trainer.precision` without `auto`.
        observers: are told when the passes of the loss begin and end.

    Returns:
        This rank's share of the step's mean loss, in nats, on the device; the backend's statistics by metric.
    """
    # The loss's inputs have no name here, so that they are freed before the blocks' backward pass.
    output = watched_loss(loss, *loss_inputs(model, batch, precision, device), *observers)
    mean_nats = output.sum_nats / n_tokens
    (mean_nats * scale).backward()
    return mean_nats.detach(), {f"loss/{name}": value for name, value in output.stats.items()}
