"""A step's scalars: on their way from the device, then in the metrics and on the console."""

import math

import torch

from linrnn.core.errors import DivergedError
from linrnn.training.build import BuiltRun
from linrnn.training.starting import RunState


class StepRecord:
    """A step's scalars on their way from the device. They are copied without waiting, and read once they have arrived.

    Attributes:
        step: number of the step in the run.
        number_here: number of the step in this process, from 1.
        lr: the step's learning rate.
    """

    def __init__(self, state: RunState, lr: float, tensors: dict[str, torch.Tensor]) -> None:
        self.step, self.number_here, self.lr = state.step, state.steps_here, lr
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


class StepLog:
    """Writes every step's metrics one step later, while the device works on the next one."""

    def __init__(self, run: BuiltRun) -> None:
        self._run = run
        self._pending: StepRecord | None = None  # the latest step's, whose scalars are on their way

    def append(self, record: StepRecord) -> None:
        """Write the step before this one, and keep this one until its scalars have arrived."""
        self.write()
        self._pending = record

    def forget(self) -> None:
        """Drop the latest step."""
        self._pending = None

    def write(self) -> None:
        """Write the latest step's metrics, if they are not written yet.

        Raises:
            DivergedError: its loss or its gradient is not finite.
        """
        if (record := self._pending) is None:
            return
        self._pending = None
        run = self._run
        values = record.read()
        loss, grad_norm = values["train/loss_nats"], values["train/grad_norm"]
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise DivergedError(
                f"step {record.step}: loss {loss}, gradient norm {grad_norm}",
                "lower optimizer.lr or optimizer.max_grad_norm, or raise schedule.warmup_steps; the last good "
                "checkpoint is kept",
            )
        run.state.recent_losses.append(loss)
        speed, epochs = run.measurements.speed, run.epochs(record.step)
        speed.arrived(record.number_here)
        floor = run.data.entropy_floor_nats
        run.session.show_progress(record.step, epochs, loss, floor, speed.recent_step_seconds())
        if record.step % run.config.trainer.log_every == 0 or record.step == run.plan.total_steps:
            metrics: dict[str, float | None] = {
                **values,
                "train/lr": record.lr,
                "train/tokens": record.step * run.plan.tokens_per_step,
                "train/epoch": epochs,
                "train/wall_seconds": run.session.wall_seconds(),
                **run.measurements.of_steps(run.state),
            }
            run.session.log(record.step, metrics)
