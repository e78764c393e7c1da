"""One training run. Read :meth:`Trainer.fit` first, then `train_step`, `validate` and `save`.

Other modules hold the rest of a run:

* `build`: its model, data and optimizer. `starting`: where it continues.
* `session`: its files and the console. `step`: a step's metrics. `measurements`: speed and memory.
* `outcome`: how it ended.
"""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch

from linrnn.config.schema import Config
from linrnn.core.errors import InterruptedRun, LinrnnError, ran_out_of_memory
from linrnn.core.garbage import collect_after, collected_at_known_points
from linrnn.core.interrupts import StopRequest
from linrnn.core.machine import seconds_since_start
from linrnn.data import Batch, BatchesOnce
from linrnn.distributed import Ranks
from linrnn.models import tuning
from linrnn.profiling import LossObserver
from linrnn.profiling.graphs import GraphCounter, in_words
from linrnn.runs.environment import gpu_state
from linrnn.training.build import BuiltRun
from linrnn.training.evaluation import Evaluation, evaluate
from linrnn.training.execution.compilation import compile_kernels
from linrnn.training.execution.cuda_graph import GraphedPasses
from linrnn.training.execution.passes import forward_backward
from linrnn.training.optimizer import clip_gradients
from linrnn.training.outcome import conclude, explained
from linrnn.training.runtime import synchronize
from linrnn.training.step import StepLog, StepRecord


class Trainer(BuiltRun):
    """Trains what :class:`BuiltRun` has built (its arguments, attributes and errors are there)."""

    def __init__(self, config: Config, ranks: Ranks | None = None) -> None:
        super().__init__(config, ranks)
        self.stop = StopRequest()
        self._step_log = StepLog(self)
        self._graphed: GraphedPasses | None = None
        self._validating = False

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
            if finished := self.ranks.from_first(lambda: self.session.finished(self.data)):
                return finished
            self._begin(closing)
            with self.stop, collected_at_known_points():
                summary, failure = self._run()
            self.session.end(summary, failed=failure is not None)
            if failure is not None:
                raise failure
            return summary

    def _begin(self, closing: contextlib.ExitStack) -> None:
        """Restore the run's state, open its files, and print what it will do."""
        where_it_begins = self.resume()
        notes = self.notes()
        self.session.begin(closing, self.state, self.data, self.config_yaml)
        if where_it_begins:
            self.session.console.line(where_it_begins)
        self.session.mirror_to_wandb()
        self.session.announce(self.architecture, self.data, *notes)
        valid_tokens = self.config.trainer.valid_tokens
        self._valid_bytes = self.data.token_bytes(self.data.valid, valid_tokens, self.session.console.line)
        self.ranks.shield(self._write_lost_summary)
        self._saved_at = time.monotonic()
        closing.enter_context(tuning.show_progress(self.session.console.line))
        self.session.start_clock()

    def _run(self) -> tuple[dict[str, Any], BaseException | None]:
        """Train, save and validate, and write the summary in any case. Returns the summary and the failure, if any."""
        status, evaluation = "finished", None
        failure: BaseException | None = None
        try:
            self._train()
            evaluation = self.validate()
            evaluation.check_finite(self.step)
            self.saver.wait()
        except BaseException as error:
            self._step_log.forget()
            where = f"in the validation after step {self.step}" if self._validating else f"at step {self.step + 1}"
            status, failure = explained(self, error, where)
        self._drop_graph()
        return conclude(self, status, failure, evaluation)

    def _drop_graph(self) -> None:
        """Drop the CUDA graph, because the ranks cannot leave NCCL while it holds their collectives.

        A rank that dropped its graph while collectives waited for a lost rank hung on two H200s. So did the thread of
        :mod:`linrnn.distributed.watch`, which had to end it. So a rank waits for its GPU first, without Python's lock.
        """
        if self._graphed is not None:
            with contextlib.suppress(RuntimeError):  # the device's error has ended the run already
                synchronize(self.device)
        self._graphed = None

    def _train(self) -> None:
        """Take all remaining steps, with checkpoints and validations between them, and a checkpoint at the end."""
        trainer, state = self.config.trainer, self.state
        with self.measurements.recordings(self.directory.path) as end_of_step:
            self.model.train()
            if self.session.misses_validation(state.step):
                self.validate()
            self.measurements.speed.clock.start()
            wishes = self.ranks.largest_later(self._wishes)
            while state.step < self.plan.total_steps:
                if state.steps_here == self.plan.memory_begins:
                    self.measurements.memory.start()
                record = self.train_step() if state.steps_here else self._first_step()
                end_of_step()
                collect_after(state.steps_here)  # at the same step on all ranks
                self._step_log.append(record)  # writes the previous step, while the device works on this one
                if state.step == self.plan.total_steps:
                    break
                if trainer.checkpoint_every and state.step % trainer.checkpoint_every == 0:
                    self.save()
                if trainer.valid_every and state.step % trainer.valid_every == 0:
                    self.validate()
                self._heed(wishes())
                wishes = self.ranks.largest_later(self._wishes)
            self.measurements.gpu_state = gpu_state(self.device)  # while the device works on the last steps
            self._step_log.write()
            if trainer.checkpoint_every != 0:
                self.save()
                self.saver.wait()

    def _first_step(self) -> StepRecord:
        """The first step of this process, in which kernels are tuned and compiled, and the model if it is to be."""
        number, began, compiled = self.step + 1, time.monotonic(), self.config.trainer.compile
        with tuning.during(f"step {number}" + (f", trainer.compile={compiled}" if compiled != "none" else "")):
            compile_kernels(self)
            counter = GraphCounter() if compiled != "none" else None
            record = self.train_step()
            if counter is not None:
                self.compiled = counter.report()
                self.session.console.line(in_words(self.compiled))
        synchronize(self.device)
        took, since = time.monotonic() - began, seconds_since_start()
        self.seconds_to["first_step"] = since
        self.session.record_first_step(self.seconds_to)
        remark = f"; {of_kernels}" if (of_kernels := tuning.remark()) else ""
        self.session.console.line(f"step {number} took {took:.1f} s, {since:.1f} s after the start{remark}")
        return record

    def train_step(self) -> StepRecord:
        """One optimizer step over `accumulation_steps` micro-steps.

        Every micro-step's summed loss is divided by the tokens of the whole step on all ranks. The gradient therefore
        equals that of one large batch, however the batch is split and however many labels are ignored.
        """
        self.ensure_weights()
        self.measurements.speed.step_begins()
        lr = self.schedule.apply(self.state.step)
        accumulation_steps = self.config.trainer.accumulation_steps
        n_tokens = max(self.loader.labels_ahead(accumulation_steps), 1)
        batches = [next(self.loader) for _ in range(accumulation_steps)]
        mean_nats = torch.zeros((), device=self.device)
        stats: dict[str, torch.Tensor] = {}
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches)
            with contextlib.nullcontext() if last else self.ranks.accumulating(self.replica):
                nats, stats = self._forward_backward(batch, n_tokens)
            mean_nats += nats
        grad_norm = clip_gradients(self.parameters, self.config.optimizer.max_grad_norm)
        self.optimizer.step()
        self.ranks.zero_gradients(self.optimizer)
        self.measurements.speed.step_ended()
        self.state.step += 1
        self.state.steps_here += 1
        scalars = {"train/loss_nats": self.ranks.sum(mean_nats), "train/grad_norm": grad_norm, **stats}
        return StepRecord(self.state, lr, scalars)

    def _forward_backward(self, batch: Batch, n_tokens: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Gradients of one micro-step. Returns its share of the step's mean loss, and the backend's statistics."""
        graphed_from = self.plan.graphed_from
        if graphed_from is None or self.state.steps_here < graphed_from:
            return self._passes(batch, n_tokens, self.measurements.memory, self.measurements.speed.clock)
        if self._graphed is None:
            self._graphed = self._graph_of(batch, n_tokens)
        return self._graphed(batch)

    def _graph_of(self, batch: Batch, n_tokens: int) -> GraphedPasses:
        """The passes as a CUDA graph. All steps have `n_tokens` labels. The output layer cannot be timed in it."""
        self.session.console.line(f"from step {self.step + 1} on a CUDA graph replays the forward and backward pass")

        def passes(batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return self._passes(batch, n_tokens, self.measurements.memory)

        return GraphedPasses(passes, self.parameters, batch, self.device, self.ranks.reshard)

    def _passes(
        self, batch: Batch, n_tokens: int, *observers: LossObserver
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return forward_backward(
            self.replica,
            self.loss,
            batch,
            *observers,
            tokens=n_tokens,
            scale=self.ranks.loss_scale,
            precision=self.precision,
            device=self.device,
        )

    def validate(self) -> Evaluation:
        """One pass over the validation tokens. Its figures go to the metrics and to the console."""
        self._step_log.write()
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
                before_batch=lambda: self._heed(self.ranks.largest(*self._wishes())),
            )
        except Exception as error:
            # The steps so far are good. With several ranks, all others wait in a collective and cannot save.
            if ran_out_of_memory(error) and self.ranks.world_size == 1 and trainer.checkpoint_every != 0:
                self.save()
            raise

    def save(self) -> None:
        """Start a checkpoint of a state whose loss is known to be finite. Every rank writes its own part."""
        if self.step == self.state.saved_step:
            return
        self._step_log.write()
        with self.measurements.speed.clock.paused():
            self.saver.save(self.progress(), self.model.hf, self.optimizer, self.config_yaml)
        self.state.saved_step, self._saved_at = self.step, time.monotonic()

    def _wishes(self) -> tuple[float, float, float]:
        """What this rank asks of all ranks: whether a checkpoint has failed, which signal came, and whether to save."""
        return self.saver.failed, self.stop.signal_number or 0, self._checkpoint_is_due()

    def _heed(self, wishes: Sequence[float]) -> None:
        """Save or stop if one rank wishes it. All ranks get the same `wishes` at the same step.

        Several ranks heed a wish one step later, so that none waits for the answers of the others.

        Raises:
            StorageError: the latest checkpoint could not be written.
            InterruptedRun: a signal has come; a checkpoint is written.
        """
        failed, signal_number, due = wishes
        if failed:
            self.saver.wait()
        if signal_number:
            self.save()
            self.saver.wait()
            where = "in the validation after" if self._validating else "at"
            raise InterruptedRun(
                f"interrupted {where} step {self.step} of {self.plan.total_steps}; checkpoint written",
                "run the same command again to continue",
                int(signal_number),
            )
        if due:
            self.save()

    def _checkpoint_is_due(self) -> bool:
        """Whether a checkpoint is due by this rank's clock."""
        trainer = self.config.trainer
        if trainer.checkpoint_every == 0 or trainer.checkpoint_minutes is None:
            return False
        return time.monotonic() - self._saved_at >= 60 * trainer.checkpoint_minutes

    def _write_lost_summary(self, failure: LinrnnError) -> None:
        self.session.write_lost_summary(self.step, failure)
