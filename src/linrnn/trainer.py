"""One training run: build from the configuration, step, log, validate, checkpoint, summarise.

Read :meth:`Trainer.fit` first, then :meth:`Trainer.train_step`.
"""

import itertools
import math
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from linrnn import accounting, checkpoint
from linrnn.architecture import Architecture
from linrnn.architecture import resolve as resolve_architecture
from linrnn.config import identity, run_name, to_yaml
from linrnn.config.schema import Config
from linrnn.data import Batch, BatchLoader, PreparedData, prepare
from linrnn.environment import describe_environment
from linrnn.errors import ConfigError, DivergedError, InterruptedRun, LinrnnError, OutOfMemoryError
from linrnn.evaluation import Evaluation, evaluate, loss_inputs
from linrnn.interrupts import StopRequest
from linrnn.loggers import Console, WandbMirror
from linrnn.losses import build_loss, check_loss
from linrnn.metrics import JsonlWriter
from linrnn.models import build_model, check_supported, load_weights
from linrnn.optim import build_optimizer, build_schedule, clip_gradients
from linrnn.run_directory import ENVIRONMENT, LOG, SUMMARY, RunDirectory
from linrnn.runtime import parameter_dtype, prepare_process, resolve_device, resolve_precision

MEAN_OF_LAST = 50  # steps that the summary's train_loss_nats averages over


class StepRecord:
    """A step's scalars on their way from the device: copied without waiting, read when they have arrived."""

    def __init__(self, step: int, lr: float, tensors: dict[str, torch.Tensor]) -> None:
        self.step, self.lr = step, lr
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

    Raises:
        LinrnnError: a loss, model or device that cannot run here (before anything is built), unusable data, or a run
            directory that holds another configuration.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.device = resolve_device(config.device)
        self.precision = resolve_precision(config.trainer.precision, self.device)
        check_loss(config.loss, self.device)
        prepare_process(config, self.device)
        self.data: PreparedData = prepare(config.data, progress=print)
        self.architecture: Architecture = architecture_of(config, self.data.vocab_size)
        check_supported(self.architecture, self.device)

        self.name = run_name(config)
        self.directory = RunDirectory(
            Path(config.results_dir) / config.group / self.name,
            config_yaml=to_yaml(config),
            identity=identity(config),
            resume=config.trainer.resume,
        )
        self.directory.write_json(ENVIRONMENT, describe_environment())
        self.console = Console(self.directory.path / LOG, config.logger.console_every_seconds)

        self.loss = build_loss(config.loss, device=self.device)
        self.model = build_model(
            self.architecture, device=self.device, dtype=parameter_dtype(self.precision), seed=config.seed
        )
        self.model.set_activation_checkpointing(config.trainer.activation_checkpointing)
        if config.init_from:
            self._initialise_from(config.init_from)
        self.optimizer = build_optimizer(self.model, config.optimizer, self.device)
        self.loader = BatchLoader(
            self.data.train,
            seq_len=config.trainer.seq_len,
            batch_size=config.trainer.batch_size,
            seed=config.seed,
            reset_at_document=config.data.reset_at_document,
        )
        self.tokens_per_step = (
            config.trainer.batch_size * config.trainer.seq_len * config.trainer.accumulation_steps
        )
        self.total_steps = total_steps(config, self.tokens_per_step)
        self.schedule = build_schedule(self.optimizer, config.optimizer, self.total_steps)
        self.step, self.tokens = 0, 0
        self.recent_losses: deque[float] = deque(maxlen=MEAN_OF_LAST)
        self._pending: StepRecord | None = None
        if config.trainer.compile_blocks:
            self.model.compile_blocks()

    # ------------------------------------------------------------------------------------------------- the run
    def fit(self) -> dict[str, Any]:
        """Train to the last step, validate, write summary.json and return it.

        Raises:
            InterruptedRun: after Ctrl-C or SIGTERM, with a checkpoint written.
            DivergedError: the loss is not finite; the last good checkpoint is kept.
            OutOfMemoryError: with the memory by component and what to lower.
        """
        if self._resume() and (summary := self._already_finished()):
            return summary
        self.metrics = JsonlWriter(self.directory.metrics)
        self.metrics.truncate_after(self.step)
        self._announce()
        self.wandb = WandbMirror(
            self.config.logger.wandb,
            self.directory.path,
            run_name=self.name,
            group=self.config.group,
            tags=self._tags(),
            hyperparameters=identity(self.config),
            say=self.console.line,
        )
        started = time.monotonic()
        status, evaluation, failure = "finished", None, None
        try:
            with StopRequest() as stop:
                self._train(stop)
            evaluation = self._validate()
            self._flush()
            if self.config.trainer.checkpoint_every != 0:
                self._save()
        except InterruptedRun as error:
            status, failure = "interrupted", error
        except DivergedError as error:
            status, failure = "diverged", error
        except torch.OutOfMemoryError as error:
            status, failure = "out_of_memory", self._explain_out_of_memory(error)
        except BaseException as error:
            status, failure = "failed", error
        summary = self._summarise(status, evaluation, time.monotonic() - started)
        self.directory.write_json(SUMMARY, summary)
        self.wandb.finish(summary, exit_code=0 if failure is None else 1)
        for line in final_lines(self.config, self.directory.path, summary):
            self.console.line(line)
        if failure is not None:
            raise failure
        return summary

    def _train(self, stop: StopRequest) -> None:
        every = self.config.trainer
        self.model.train()
        while self.step < self.total_steps:
            record = self.train_step()
            self._flush()  # reads the previous step's scalars while the device works on this one
            self._pending = record
            if every.valid_every and self.step % every.valid_every == 0 and self.step < self.total_steps:
                self._flush()
                self._validate()
            if every.checkpoint_every and self.step % every.checkpoint_every == 0:
                self._flush()
                self._save()
            if stop.signal_number is not None:
                self._flush()
                self._save()
                raise InterruptedRun(
                    f"interrupted at step {self.step} of {self.total_steps}; checkpoint written",
                    "run the same command again to continue",
                    stop.signal_number,
                )
        self._flush()

    def train_step(self) -> StepRecord:
        """One optimizer step over `accumulation_steps` micro-steps.

        Every micro-step's summed loss is divided by the tokens of the whole step, so that the gradient equals that of
        one large batch whatever the split and however many labels are ignored.
        """
        self.timer.start()
        batches = [next(self.loader) for _ in range(self.config.trainer.accumulation_steps)]
        n_tokens = max(sum(batch.n_tokens for batch in batches), 1)
        stats: dict[str, torch.Tensor] = {}
        mean_nats = torch.zeros((), device=self.device)
        for batch in batches:
            mean_nats += self._forward_backward(batch, n_tokens, stats)
        grad_norm = clip_gradients(self.model.parameters(), self.config.optimizer.max_grad_norm)
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        self.timer.stop()
        self.step += 1
        self.tokens += self.tokens_per_step
        return StepRecord(self.step, lr, {"train/loss_nats": mean_nats, "train/grad_norm": grad_norm, **stats})

    def _forward_backward(self, batch: Batch, n_tokens: int, stats: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = loss_inputs(self.model, self.loss, batch, self.precision, self.device)
        output = self.loss(*inputs)
        mean_nats = output.sum_nats / n_tokens
        mean_nats.backward()
        stats.update({f"loss/{name}": value for name, value in output.stats.items()})
        return mean_nats.detach()

    # ---------------------------------------------------------------------------------------------- bookkeeping
    def _flush(self) -> None:
        """Write the pending step's metrics; stop the run if its loss is not finite."""
        if (record := self._pending) is None:
            return
        self._pending = None
        values = record.read()
        loss = values["train/loss_nats"]
        if not (math.isfinite(loss) and math.isfinite(values["train/grad_norm"])):
            raise DivergedError(
                f"step {record.step}: loss {loss}, gradient norm {values['train/grad_norm']}",
                "lower optimizer.lr, raise optimizer.warmup_steps or lower optimizer.max_grad_norm; the last good "
                "checkpoint is kept",
            )
        self.recent_losses.append(loss)
        speed = self.speed.after(record.step)
        self.console.progress(self._progress_line(record.step, loss, speed), final=record.step == self.total_steps)
        if record.step % self.config.trainer.log_every == 0 or record.step == self.total_steps:
            self._log(record.step, {**values, "train/lr": record.lr, **speed})

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics.write({"step": step, **metrics})
        self.wandb.log(step, metrics)
