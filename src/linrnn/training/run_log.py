"""What a run writes about itself: console, train.log, metrics.jsonl, wandb, TensorBoard, environment, summary, picture.

Only the first rank writes. All ranks measure speed and memory.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

import torch

from linrnn import costs
from linrnn.config.naming import hyperparameters
from linrnn.core.errors import DivergedError, LinrnnError, described, first_line
from linrnn.core.machine import GIB, busy_with_others, gpu_is_shared
from linrnn.data import PreparedData
from linrnn.distributed import Ranks
from linrnn.models import LanguageModel, tuning
from linrnn.models.architecture import Architecture
from linrnn.profiling import MemoryByComponent, SpeedMeter, memory_snapshot, trace
from linrnn.runs.directory import LOG, PICTURE, SUMMARY, RunDirectory
from linrnn.runs.environment import command_line, describe_process
from linrnn.runs.loggers import Console, TensorboardMirror, WandbMirror
from linrnn.runs.measurements import NOT_MEASURED, memory_of_run, speed_of_run, wall_seconds_of_run
from linrnn.runs.metrics import JsonlWriter, finite, read_jsonl
from linrnn.runs.picture import draw_progress
from linrnn.runs.summary import (
    MEAN_OF_LAST,
    final_lines,
    progress_line,
    status_of,
    summary_without_measurements,
)
from linrnn.training.evaluation import Evaluation
from linrnn.training.plan import Plan
from linrnn.training.runtime import device_name

SMOOTHED = 10  # steps in the mean loss of a progress line


class StepRecord:
    """A step's scalars on their way from the device. They are copied without waiting, and read once they have arrived.

    Attributes:
        step: number of the step in the run.
        number_here: number of the step in this process, from 1.
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


class RunLog:
    """The files, console and wandb mirror of one process of a run, and its measurements.

    Args:
        sequences: of the training data in one epoch.

    Attributes:
        recent_losses: of the latest steps, nats.
        speed: time of the steps and of the output layer.
        memory: bytes by component.
        gpu_state: clocks, power and temperature at the last steps; None on a CPU and before that.
    """

    def __init__(
        self,
        plan: Plan,
        directory: RunDirectory,
        ranks: Ranks,
        architecture: Architecture,
        data: PreparedData,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        sequences: int,
    ) -> None:
        self._plan, self._config, self._directory, self._ranks = plan, plan.config, directory, ranks
        self._architecture, self._data, self._sequences = architecture, data, sequences
        self._console = Console()
        self._tensorboard: TensorboardMirror | None = None
        self._pending: StepRecord | None = None  # the latest step's, whose scalars are on their way
        self._steps_here = 0
        self._seconds_before, self._began_at = 0.0, time.monotonic()  # of the run's earlier processes, and of this one
        self._memory_recorded = False
        self._gpu_shared = gpu_is_shared()  # then the speed is no measurement, and is not recorded
        self.recent_losses: deque[float] = deque(maxlen=MEAN_OF_LAST)
        self.speed = SpeedMeter(plan.device, plan.unmeasured_steps, plan.tokens_per_step)
        self.memory = MemoryByComponent(model, optimizer, plan.device)
        self.gpu_state: dict[str, Any] | None = None

    def line(self, text: str = "") -> None:
        """Print a line for people. Silent before :meth:`begin`, and on every rank but the first."""
        self._console.line(text)

    # ------------------------------------------------------------------------------------------- begin and end
    def begin(self, closing: contextlib.ExitStack, step: int, continues: dict[str, Any] | None) -> None:
        """Write this process's first files, and open those that it keeps writing until `closing` ends.

        Args:
            step: optimizer steps that the run has done.

        Raises:
            StorageError: a file cannot be written.
        """
        self._began_at = time.monotonic()
        if not self._ranks.is_first:
            return
        config, directory = self._config, self._directory
        directory.begin()
        directory.begin_process(describe_process(config, step, continues))
        for name, text in (self._data.tokenizer.files() if self._data.tokenizer else {}).items():
            directory.write_text(name, text)
        self._console = console = Console(directory.path / LOG, config.logger.console_every_seconds)
        closing.callback(console.close)
        self._metrics = JsonlWriter(directory.metrics)
        closing.callback(self._metrics.close)
        # A process that has no step left to train repeats the last validation.
        self._metrics.truncate_after(step, keep_validation=step < self._plan.total_steps)
        self._seconds_before = wall_seconds_of_run(self._records())
        if config.logger.tensorboard:
            self._tensorboard = TensorboardMirror(directory.path, step, self.line)
        self._wandb = WandbMirror(
            config.logger.wandb,
            directory.path,
            history=self._records,
            say=self.line,
            tags=[getattr(config, group).name for group in ("model", "size", "loss", "data")],
            name=directory.path.name,
            group=config.group,
            config=hyperparameters(config, self._plan.world_size),
        )

    def announce(self, *notes: str | None) -> None:
        """Print what is trained, on what data and for how long, and every note that is not None."""
        config, plan, arch = self._config, self._plan, self._architecture
        trainer, ranks = config.trainer, plan.world_size
        groups = config.parallel.data_ranks(ranks)
        micro = f" x {trainer.accumulation_steps} micro-steps"
        split = f" x {groups} {'ranks' if groups == ranks else f'group(s) of {ranks // groups} ranks'}"
        for line in (
            f"{arch.model} x {arch.size} x {config.loss.name}: {arch.n_parameters:,} parameters, "
            f"V = {arch.vocab_size:,}, {plan.precision} on {plan.device.type}" + f", {ranks} ranks" * (ranks > 1),
            f"data: {self._data.description}",
            f"{plan.total_steps} steps of {plan.tokens_per_step:,} tokens ({trainer.batch_size} sequences x "
            f"{trainer.seq_len} tokens{micro if trainer.accumulation_steps > 1 else ''}{split if ranks > 1 else ''}) "
            f"-> {self._directory.path}",
            # Never of a constant schedule.
            f"the {config.schedule.name} schedule ends at step {plan.horizon}"
            if plan.horizon != plan.total_steps
            else None,
            *notes,
        ):
            if line:
                self.line(line)

    def end(self, summary: dict[str, Any], *, failed: bool) -> None:
        """Tell all loggers how the run ended, and draw its picture. A full disk or a broken library leaves it out."""
        self._console.end_progress()
        if self._ranks.is_first:
            self._wandb.finish(summary, exit_code=int(failed))
            if self._tensorboard:
                self._tensorboard.finish()
            if self._config.logger.picture and summary["steps"]:
                try:
                    draw_progress(self._records(), self._directory.path.name, self._directory.path / PICTURE)
                except Exception as error:
                    self.line(f"{PICTURE} was not drawn ({described(error)})")
        for line in final_lines(self._config, self._directory.path, summary):
            self.line(line)

    # --------------------------------------------------------------------------------------------------- metrics
    def append(self, record: StepRecord) -> None:
        """Write the step before this one, and keep this one until its scalars have arrived."""
        self._steps_here = record.number_here
        self.write()
        self._pending = record

    def forget(self) -> None:
        """Drop the latest step."""
        self._pending = None

    def write(self) -> None:
        """Write the latest step's metrics, if they are not written yet: the device may work on the next one.

        Raises:
            DivergedError: its loss or its gradient is not finite.
        """
        if (record := self._pending) is None:
            return
        self._pending = None
        values, plan = record.read(), self._plan
        loss, grad_norm = values["train/loss_nats"], values["train/grad_norm"]
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise DivergedError(
                f"step {record.step}: loss {loss:.4f}, gradient norm {grad_norm:.4f}",
                "lower optimizer.lr or optimizer.max_grad_norm, or raise schedule.warmup_steps; checkpoints stay",
            )
        self.recent_losses.append(loss)
        self.speed.arrived(record.number_here)
        seconds = self.speed.recent_step_seconds()
        speed = None if seconds is None else plan.tokens_per_step / seconds  # None during the warm-up
        left = None if seconds is None else seconds * (plan.total_steps - record.step)
        smooth = fmean([*self.recent_losses][-SMOOTHED:])
        words = progress_line(smooth, record.lr, grad_norm, speed, self._mfu(seconds), left)
        self._console.progress(record.step, plan.total_steps, words)
        first_measured = record.number_here == plan.unmeasured_steps + 1
        if plan.device.type == "cpu" and first_measured and (busy := busy_with_others(torch.get_num_threads())):
            self.line(busy)
        if record.step % self._config.trainer.log_every == 0 or record.step == plan.total_steps:
            metrics: dict[str, float | None] = {
                **values,
                "train/lr": record.lr,
                "train/tokens": record.step * plan.tokens_per_step,
                "train/epoch": self._epochs(record.step),
                "train/wall_seconds": self._wall_seconds(),
                **self._of_steps(),
            }
            self._log(record.step, metrics)

    def validation(self, step: int, evaluation: Evaluation) -> None:
        """Write and print a validation's figures."""
        self._log(step, {**evaluation.metrics(), **self._of_memory()})
        self.line(f"valid at step {step}: {evaluation}")

    def misses_validation(self, step: int) -> bool:
        """Whether the previous process stopped after the checkpoint of `step` and before the validation of this step.

        Every rank gets the same answer.
        """
        every = self._config.trainer.valid_every
        if not every or step in (0, self._plan.total_steps) or step % every:
            return False
        return not self._ranks.from_first(
            lambda: any(record["step"] == step and "valid/loss_nats" in record for record in self._records())
        )

    def record_first_step(self, seconds_to: dict[str, float]) -> None:
        """Record how long this process took to each stage before the end of its first step, and the kernels' choices.

        Raises:
            StorageError: the file cannot be written.
        """
        if self._ranks.is_first:
            rounded = {stage: round(seconds, 2) for stage, seconds in seconds_to.items()}
            self._directory.add_to_process(seconds_to=rounded, kernel_choices=tuning.used())

    @contextlib.contextmanager
    def recordings(self) -> Iterator[Callable[[], None]]:
        """The requested trace and memory snapshot, on the first rank. Yields a function to call after each step."""
        trainer, path = self._config.trainer, self._directory.path
        with contextlib.ExitStack() as stack:
            if trainer.memory_snapshot and self._ranks.is_first:
                stack.enter_context(memory_snapshot(path / "memory_snapshot.pickle"))
            steps = trainer.profile_steps if self._ranks.is_first else 0
            yield stack.enter_context(trace(steps, path / "trace.json.gz", trainer.warmup_measurement_steps))

    def _log(self, step: int, metrics: dict[str, float | None]) -> None:
        if self._ranks.is_first:
            self._metrics.write({"step": step, **metrics})
            if self._tensorboard:
                self._tensorboard.log(step, metrics)
            self._wandb.log(step, metrics)

    def _records(self) -> list[dict[str, Any]]:
        """All metric records of the run; empty on every rank but the first."""
        return read_jsonl(self._directory.metrics) if self._ranks.is_first else []

    def _epochs(self, step: int) -> float:
        """Passes over the training data after `step` steps."""
        return step * self._plan.sequences_per_step / self._sequences

    def _wall_seconds(self) -> float:
        """Wall-clock seconds of all processes of the run so far, without the time between processes."""
        return self._seconds_before + time.monotonic() - self._began_at

    def _of_steps(self) -> dict[str, float | None]:
        """The metrics of the steps since the last call: speed and MFU; the first time also memory."""
        metrics = self.speed.record()
        if wall_ms := metrics.get("speed/wall_step_ms"):
            metrics = {} if self._gpu_shared else metrics | {"speed/mfu": self._mfu(wall_ms / 1e3)}
            if not self._memory_recorded:
                metrics |= self._of_memory()
        return metrics

    def _of_memory(self) -> dict[str, float | None]:
        """The metrics of memory; empty before the end of the warm-up, whose memory (tuning of kernels) never counts."""
        if self._steps_here <= self._plan.unmeasured_steps:
            return {}
        self._memory_recorded = True
        return {f"memory/{name}_gib": size / GIB for name, size in self._memory_of_ranks().items()}

    def _memory_of_ranks(self) -> dict[str, int]:
        """Bytes by component; each is the maximum over the ranks."""
        report = self.memory.report()
        sizes = self._ranks.max_on_host(*report.values())
        return {name: int(size) for name, size in zip(report, sizes, strict=True)}

    def _mfu(self, step_seconds: float | None) -> float | None:
        """Model FLOPs utilisation; None before anything is measured."""
        plan = self._plan
        return costs.mfu(
            self._architecture,
            seq_len=plan.config.trainer.seq_len,
            tokens_per_second=step_seconds and plan.tokens_per_step / step_seconds,
            device_name=device_name(plan.device),
            precision=plan.precision,
            n_devices=plan.world_size,
        )

    # --------------------------------------------------------------------------------------------------- summary
    def write_summary(self, step: int, summary: dict[str, Any]) -> None:
        """Write summary.json, and record in environment.json that this process ended after `step`.

        Raises:
            StorageError: the file cannot be written.
        """
        if self._ranks.is_first:
            self._directory.add_to_process(kernel_choices=tuning.used())
            if self._config.trainer.kernel_choices == "tune":
                self._store_choices()
            self._directory.end_process(step)
            self._directory.write_json(SUMMARY, summary)

    def _store_choices(self) -> None:
        """Add the tuned kernels' choices to the GPU's table. One that cannot be read or written ends no run."""
        try:
            if table := tuning.store():
                self.line(f"stored the tuned kernels' choices in {table}")
        except (OSError, LinrnnError) as error:
            self.line(f"the tuned kernels' choices are not stored: {first_line(error)}")

    def write_lost_summary(self, step: int, failure: LinrnnError) -> None:
        """Write the summary of a run whose first rank waits in vain for a rank that has failed."""
        if self._ranks.is_first:
            self.write_summary(step, self._without_measurements(step, status_of(failure.exit_code), failure.cause))

    def _without_measurements(self, step: int, status: str, reason: str | None) -> dict[str, Any]:
        """The summary of a run that ends after `step`, without what was measured."""
        summary = summary_without_measurements(self._plan.config, self._plan.world_size, status, reason, command_line())
        started = self._directory.started if self._ranks.is_first else None
        done = {"steps": step, "tokens": step * self._plan.tokens_per_step, "started": started}
        return summary | {"run_name": self._directory.path.name, **done}  # a path in the name may lead elsewhere by now

    def summary(
        self,
        step: int,
        continues: dict[str, Any] | None,
        status: str,
        failure: BaseException | None,
        evaluation: Evaluation | None,
        *,
        together: bool,
    ) -> dict[str, Any]:
        """The content of summary.json, from the records of all processes of the run and this process's measurements.

        Args:
            evaluation: the last validation.
            together: whether all ranks are here. Then the memory is that of the rank with most.
        """
        plan, arch, shared = self._plan, self._architecture, self._gpu_shared
        records = self._records()
        here = self._memory_of_ranks() if together else self.memory.report()
        memory = memory_of_run(records)
        if self._steps_here > plan.unmeasured_steps or not memory:
            memory = {name: max(size, memory.get(name, 0)) for name, size in (memory | here).items()}
        speed = speed_of_run([] if shared else records, plan.tokens_per_step)
        if shared:
            speed["tokens_per_second_is"] = NOT_MEASURED
        valid = evaluation.metrics() if evaluation else {}
        return {
            **self._without_measurements(step, status, first_line(failure) if failure else None),
            "n_parameters": arch.n_parameters,
            "hidden_size": arch.hidden_size,
            "world_size": plan.world_size,
            "vocab_size": arch.vocab_size,
            "precision": plan.precision,
            "continues": continues,
            "epochs": self._epochs(step),
            "train_loss_nats": fmean(self.recent_losses) if self.recent_losses else None,
            "entropy_floor_nats": self._data.entropy_floor_nats,
            **{  # null where they are not finite, or not there
                f"valid_{name}": finite(valid.get(f"valid/{name}"))
                for name in ("loss_nats", "perplexity", "bits_per_byte")
            },
            "peak_memory_bytes": memory.get("peak", memory.get("resident_peak")),
            "peak_memory_is": "allocated on the GPU" if "peak" in memory else "the process's resident set",
            "memory_bytes": memory,
            "gpu_shared": shared,
            **speed,
            "mfu": self._mfu(speed["wall_step_ms"] and speed["wall_step_ms"] / 1e3),
            "wall_seconds": self._wall_seconds(),
            "device": device_name(plan.device),
            "gpu_state": self.gpu_state,
            "data_fingerprint": self._data.fingerprint,
        }
