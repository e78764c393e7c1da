"""What a configuration decides before anything is built: device, precision, steps. It also rejects impossible ones.

Among these are steps that do not fit into memory. On a CPU the system kills a process that takes too much without a
message, so what cannot fit is rejected. (CPU kernels need more than the formulas say, which describe GPU kernels.) A
GPU raises its own out-of-memory error, which loses nothing. There only what no step could hold is rejected.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from linrnn import costs
from linrnn.config import steps
from linrnn.config.naming import HORIZON
from linrnn.config.schema import Config, FsdpConfig, VocabConfig
from linrnn.core.errors import ConfigError, OutOfMemoryError, UnsupportedError
from linrnn.core.machine import GIB, available_memory, ranks_here
from linrnn.data import vocabulary_size
from linrnn.distributed import Launch
from linrnn.losses import check_loss, check_objective, check_vocabulary_parallel
from linrnn.models import check_device, check_installed
from linrnn.models.architecture import Architecture, resolve
from linrnn.models.language_model import compute_dtype
from linrnn.runs.loggers import check_loggers
from linrnn.training.execution.cuda_graph import check_cuda_graph
from linrnn.training.execution.float8 import check_float8
from linrnn.training.runtime import a_gpu, resolve_device, resolve_precision


@dataclass(frozen=True)
class Plan:
    """A configuration that can run on this machine, with `world_size` processes."""

    config: Config
    device: torch.device
    precision: str
    world_size: int = 1

    @property
    def sequences_per_step(self) -> int:
        """Sequences in one optimizer step, over all ranks and micro-steps."""
        return steps.sequences_per_step(self.config, self.world_size)

    @property
    def sequences_of_rank(self) -> int:
        """Sequences in one micro-step of one rank."""
        return steps.sequences_of_rank(self.config, self.world_size)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step, over all ranks. Ignored labels count."""
        return steps.tokens_per_step(self.config, self.world_size)

    @cached_property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return steps.last_step(self.config, self.world_size)

    @cached_property
    def horizon(self) -> int:
        """The step at which the learning-rate schedule ends."""
        return steps.horizon(self.config, self.world_size)

    @property
    def unmeasured_steps(self) -> int:
        """Number of first steps whose speed and memory are not measured: warm-up and traced steps.

        In a short run all but the last step.
        """
        trainer = self.config.trainer
        return min(trainer.warmup_measurement_steps + trainer.profile_steps, self.total_steps - 1)

    @property
    def steps_before_graph(self) -> int | None:
        """Steps that a process takes before it captures a CUDA graph in the warm-up's last step; None: no graph."""
        trainer = self.config.trainer
        return min(trainer.warmup_measurement_steps, self.total_steps - 1) - 1 if trainer.cuda_graph else None

    @property
    def steps_before_memory(self) -> int:
        """Steps that a process takes before its memory is measured.

        A CUDA graph's memory is measured in the step that captures the graph. Replays allocate nothing.
        """
        return self.unmeasured_steps if self.steps_before_graph is None else self.steps_before_graph

    def architecture(self, data_vocab_size: int) -> Architecture:
        """The architecture of vocabulary size `size.vocab_size`, or the data's number if that is null.

        Raises:
            ConfigError: `size.vocab_size` is smaller than the data's vocabulary.
        """
        vocab_size = self.config.size.vocab_size or data_vocab_size
        if vocab_size < data_vocab_size:
            raise ConfigError(
                f"size.vocab_size={vocab_size} is smaller than the data's vocabulary of {data_vocab_size}",
                f"use size.vocab_size={data_vocab_size} or more, or null",
            )
        return resolve(self.config.model, self.config.size, vocab_size)

    def training_state(self, arch: Architecture) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer state on each rank."""
        return costs.training_state(arch, self.config, self.precision, self.world_size)

    def memory_estimate(self, arch: Architecture) -> costs.MemoryEstimate | None:
        """Expected memory of a step on each rank; None for a model or a loss without formulas, and for float8."""
        if self.config.trainer.float8 != "none":
            return None
        return costs.memory_estimate(arch, self.config, self.precision, self.world_size)


def make_plan(config: Config) -> Plan:
    """Resolve every `auto`, and reject what cannot run here. A plan is enough to evaluate a checkpoint.

    Raises:
        UnsupportedError: the device, the loss, the model or its heads cannot run here.
        ConfigError: dimensions do not fit together.
    """
    device = torch.device("cuda") if config.gpu else resolve_device(config.device)
    precision = resolve_precision(config.trainer.precision, device)
    check_objective(config.loss)
    if not config.gpu:
        check_loss(config.loss, device, compute_dtype(precision))
    check_installed(config.model)
    plan = Plan(config, device, precision)
    plan.architecture(vocabulary_size(config.data))  # refuses a model that cannot be built anywhere
    if not config.gpu:
        check_device(config.model, device)
    return plan


def make_training_plan(config: Config) -> Plan:
    """:func:`make_plan`, plus the checks that only training needs.

    Raises:
        UnsupportedError: as for `make_plan`, or the logger or the memory snapshot cannot run here.
        ConfigError: as for `make_plan`, or the settings contradict each other: no limit of steps or tokens, fewer
            tokens than one step takes, or more steps than the schedule has. Also two sources of weights, a trace
            that would hold no step, and processes that do not match `parallel`.
    """
    world_size = Launch.from_environment().world_size_of(config.parallel)
    plan = replace(make_plan(config), world_size=world_size)
    check_loggers(config.logger)
    trainer = config.trainer
    if trainer.memory_snapshot and plan.device.type != "cuda":
        raise UnsupportedError(
            "trainer.memory_snapshot=true records CUDA allocations, and this run is on the CPU",
            f"use trainer.memory_snapshot=false, or {a_gpu()}",
        )
    if trainer.float8 != "none" and not config.gpu:
        check_float8(config, plan.device, plan.precision, plan.sequences_of_rank * trainer.seq_len)
    if trainer.cuda_graph:
        check_cuda_graph(config, plan.device, world_size, plan.total_steps)
    if world_size > 1 and isinstance(config.parallel, VocabConfig):
        check_vocabulary_parallel(config.loss)
    _ = plan.horizon  # raises for a run without an end, and for one that outlasts its schedule
    parallel, skipped, last = config.parallel, trainer.warmup_measurement_steps, plan.total_steps
    sharded = isinstance(parallel, FsdpConfig)
    shard_ranks = parallel.ranks_of_model(world_size)  # raises if the ranks form no groups
    if config.gpu and not config.dry_run:
        cause = f"gpu={config.gpu} names the GPU of a forecast, and this is a run"
        raise ConfigError(cause, "use dry_run=true, or leave gpu out")
    if trainer.activation_checkpointing == "selective" and trainer.compile != "none":
        cause = "trainer.activation_checkpointing=selective keeps single products, and a compiled block shows none"
        raise ConfigError(cause, "use trainer.compile=none, or trainer.activation_checkpointing=full")
    if trainer.compile == "model" and sharded:
        cause = "trainer.compile=model makes one graph of all blocks, and"
        cause += f" parallel={parallel.name} gathers each block's weights before it"
        raise ConfigError(cause, "use trainer.compile=blocks")
    if isinstance(parallel, VocabConfig) and trainer.batch_size % shard_ranks:
        cause = f"parallel=vocab: {shard_ranks} ranks cannot share {trainer.batch_size} sequences out evenly"
        remedy = f"use a multiple of {shard_ranks} for trainer.batch_size, or less parallel.shard_ranks"
        raise ConfigError(cause, remedy)
    if trainer.profile_steps and last <= skipped:
        cause = f"trainer.profile_steps={trainer.profile_steps}: the run ends after step {last}, and the trace begins "
        longer = steps.ending_at(skipped + trainer.profile_steps, config)
        longer += f" {HORIZON}=null" if config.schedule.steps else ""
        remedy = f"use {longer}, or trainer.warmup_measurement_steps={last - 1} or less"
        raise ConfigError(f"{cause}after trainer.warmup_measurement_steps={skipped}", remedy)
    if config.init_from and config.continue_from:
        remedy = "use continue_from=null to take weights alone, or init_from=null to take the optimizer's state as well"
        raise ConfigError("init_from and continue_from are both given", remedy)
    return plan


# ------------------------------------------------------------------------------------------ memory
def check_step_fits(plan: Plan, arch: Architecture) -> str | None:
    """Reject a training step that cannot fit. Return a line for the user if it probably will not fit, else None.

    On a CPU the processes of a run on one machine (torchrun's LOCAL_WORLD_SIZE) share its memory.

    Raises:
        UnsupportedError: on a CPU, a step needs at least more than this machine has free now.
        OutOfMemoryError: parameters, gradients and optimizer state alone exceed the GPU's memory or
            `memory_budget_gib`.
    """
    state, estimate = sum(plan.training_state(arch).values()), plan.memory_estimate(arch)
    parts = f"{state / GIB:.1f} GiB of it parameters, gradients and optimizer state"
    if plan.device.type == "cpu":
        least, processes = max(state, estimate.peak if estimate else 0), ranks_here()
        each = f" in each of {processes} processes" if processes > 1 else ""
        what = f"a training step needs {least / GIB:.1f} GiB or more{each} ({parts})"
        _check_memory(processes * state, what, "a smaller size")  # a smaller batch would not help
        _check_memory(processes * least, what, lighter(plan.config))
        return None
    gpu = costs.GPUS[plan.config.gpu] if plan.config.gpu else None  # that of a forecast
    total = int(gpu.memory_bytes) if gpu else torch.cuda.get_device_properties(plan.device).total_memory
    budget = plan.config.memory_budget_gib
    limit = total if budget is None else min(total, int(budget * GIB))
    name = (gpu.name if gpu else "this GPU") if budget is None else "memory_budget_gib"
    if state > limit:
        sharded = isinstance(plan.config.parallel, FsdpConfig)
        ways = ["a smaller size", "more GPUs" if sharded else "parallel=fsdp on several GPUs"]
        ways += ["a larger memory_budget_gib"] * (budget is not None)
        ways += ["trainer.precision=bf16"] * (plan.precision != "bf16" and not sharded)  # some do not shard with it
        raise OutOfMemoryError(
            f"parameters, gradients and optimizer state alone need {state / GIB:.1f} GiB, {name} has {limit / GIB:.1f}",
            f"use {' or '.join(ways)}",
        )
    if estimate and estimate.peak > limit:
        needed = f"a step is estimated to need {estimate.peak / GIB:.1f} GiB ({parts})"
        return f"{needed}, {name} has {limit / GIB:.1f}{': it is tried all the same' * (not gpu)}"
    return None


def lighter(config: Config) -> str:
    """What could make a step of this run take less memory, beyond what is in use."""
    trainer, ways = config.trainer, []
    batch, accumulation = trainer.batch_size, trainer.accumulation_steps
    if not trainer.cuda_graph:  # which takes neither of these
        if batch > 1 and not isinstance(config.parallel, VocabConfig):
            divisor = next(number for number in range(2, batch + 1) if batch % number == 0)
            less = f"trainer.batch_size={batch // divisor} trainer.accumulation_steps={divisor * accumulation}"
            ways.append(less)
        ways += ["trainer.activation_checkpointing=full"] * (trainer.activation_checkpointing != "full")
    ways += ["loss=cce_kahan"] * (not config.loss.name.startswith("cce"))
    ways += ["parallel=fsdp"] * (config.parallel.name == "ddp")
    return ", or ".join([*ways, "a smaller size" if batch > 1 else "a smaller size or trainer.seq_len"])


def _check_memory(needed: int, what: str, remedy: str) -> None:
    """On a CPU, reject `what` (a sentence with the expected figure) if it needs more bytes than are free."""
    free = available_memory()
    if free is not None and needed > free:
        cause = f"{what}, and {free / GIB:.1f} GiB of memory are free here"
        raise UnsupportedError(cause, f"use {remedy}; or free memory, or use a GPU or a larger machine")


def check_reading_fits(arch: Architecture, device: torch.device, loss_bytes: int = 0) -> None:
    """On a CPU, reject a model whose fp32 weights do not fit (for evaluation and generation).

    Args:
        loss_bytes: bytes that the loss holds in addition.

    Raises:
        UnsupportedError: weights and loss need more than this machine has free.
    """
    if device.type == "cpu":
        needed = torch.float32.itemsize * arch.n_parameters + loss_bytes
        what = f"{arch.n_parameters:,} parameters{' and the loss' if loss_bytes else ''} need {needed / GIB:.1f} GiB"
        _check_memory(needed, what, f"a smaller model{', batch_size=1 or loss=cce_kahan' if loss_bytes else ''}")
