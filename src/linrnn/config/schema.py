"""The typed configuration: every key with its type, default, meaning and bounds, in one place.

A field made with :func:`option` has all of them. `--help` shows the meaning, :func:`linrnn.config.bounds.validate`
checks the bounds. The files of configs/ choose options (the menu train.yaml, experiments, sweeps) and give the options
of model, size and data their values. They repeat no default.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction
from math import lcm
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from linrnn.core.errors import ConfigError

MUST_BE_GIVEN = "???"  # OmegaConf's word for a value without a default
GPUS = ("h100", "h200", "a100", "l40s", "rtx4090")  # that a forecast knows (linrnn.costs.gpus)
LONGEST_CYCLE = 100_000  # sequences until the order of a mixture's sources repeats
PLAIN_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}"  # safe as part of a file's name: no separators, no leading dot


def option(
    default: Any,
    meaning: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[Any, ...] = (),
    path: str | None = None,
    several: bool = False,
    pattern: str | None = None,
) -> Any:
    """A key: its default, its comment in `--help`, and its bounds. Bounds do not apply to null.

    Args:
        default: :data:`MUST_BE_GIVEN` for a key that has none.
        path: `read` or `written`: the key names a file or directory (or several) that the command reads or creates.
        several: the key holds one path or a list of them, so its type is Any.
    """
    bounds = {"minimum": minimum, "maximum": maximum, "choices": choices, "path": path, "pattern": pattern}
    given = {bound: value for bound, value in bounds.items() if value not in (None, ())}
    metadata = {"meaning": meaning, **given, **({"several": True} if several else {})}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def choice(meaning: str) -> Any:
    """A key that takes one of the words in its meaning, the first by default: `what: one (what that is) | another`."""
    words = tuple(re.sub(r" \([^)]*\)", "", meaning).rpartition(": ")[2].split(" | "))
    return option(words[0], meaning, choices=words)


def plain_name() -> Any:
    """The name of an option, which its file or its registration gives."""
    return field(metadata={"meaning": "fixed by this option", "pattern": PLAIN_NAME})


def gpu() -> Any:
    """The GPU of a forecast."""
    return option(None, f"with dry_run=true: of the forecast; {' | '.join(GPUS)}", choices=GPUS)


def device() -> Any:
    """Where a command computes."""
    return choice("auto (a GPU if there is one) | cpu | cuda")


# --------------------------------------------------------------------------------------------------- model x size
@dataclass
class ModelConfig:
    """The sequence mixer and its own options. Dimensions come from `size`."""

    name: str = plain_name()
    chunk_size: int | None = option(
        None, "tokens; null: 64. gla: 64, 128 | gated_deltanet: 16, 32, 64 | kda: 32, 64", minimum=1
    )

    @property
    def label(self) -> str:
        """The model in summaries and tables. Two models that compute different things have different labels."""
        return self.name


@dataclass
class FlaModelConfig(ModelConfig):
    """Any causal language model of flash-linear-attention."""

    config: str = option(
        MUST_BE_GIVEN,
        "FLA's model: delta_net, rwkv7, … (a wrong name lists all), or a config.json of Hugging Face's format",
        path="read",
    )
    options: dict[str, Any] = option({}, "further fields of FLA's configuration: model.options.num_heads=4")
    attention_every: int | None = option(None, "each n-th layer is attention; null: none", minimum=1)
    attention_window: int | None = option(None, "attention sees so many of the last tokens; null: all", minimum=1)

    @property
    def label(self) -> str:
        options = {**self.options, "attention_every": self.attention_every, "attention_window": self.attention_window}
        return " ".join(
            [f"fla:{self.config}", *(f"{key}={value}" for key, value in options.items() if value is not None)]
        )


@dataclass
class MixerDims:
    """Heads of one mixer at one size. Dimensions are per head."""

    num_heads: int = option(MUST_BE_GIVEN, "heads", minimum=1)
    head_k_dim: int = option(MUST_BE_GIVEN, "dimension of keys and queries", minimum=1)
    head_v_dim: int = option(MUST_BE_GIVEN, "dimension of values", minimum=1)


@dataclass
class SizeConfig:
    """Dimensions that the four architectures share, and each mixer's heads.

    A layer of any architecture has about `layer_parameters_per_d2 * hidden_size**2` parameters. The mixer takes what it
    needs; the width of the SwiGLU MLP is chosen to fill the rest (see `linrnn.models.architecture`).
    """

    name: str = plain_name()
    hidden_size: int = option(MUST_BE_GIVEN, "width of the residual stream, d", minimum=1)
    num_layers: int = option(MUST_BE_GIVEN, "blocks of mixer and MLP", minimum=1)
    layer_parameters_per_d2: float = option(MUST_BE_GIVEN, "parameters of one layer in units of d²", minimum=0)
    vocab_size: int | None = option(MUST_BE_GIVEN, "at least the tokenizer's; null: the tokenizer's", minimum=2)
    tie_embeddings: bool = option(MUST_BE_GIVEN, "true: the head is the embedding; false: a matrix of its own")
    mixers: dict[str, MixerDims] = option(MUST_BE_GIVEN, "heads of each mixer, and their dimensions")


# ------------------------------------------------------------------------------------------------------------ loss
@dataclass
class LossConfig:
    """A loss backend, and what it minimises. Its file adds the backend's options in a subclass.

    A backend that cannot compute one of the three says so before anything is built
    (`linrnn.losses.base.LossBackend.lacking`).
    """

    name: str = plain_name()
    _: KW_ONLY
    z_loss: float = option(0.0, "adds z_loss · LSE² to a token's training loss (often 1e-4)", minimum=0)
    softcap: float | None = option(None, "logits become softcap · tanh(logits / softcap), always", minimum=0)
    label_smoothing: float = option(0.0, "share of a label spread over the vocabulary", minimum=0, maximum=1)

    def __post_init__(self) -> None:
        if self.softcap == 0:
            raise ConfigError("loss.softcap=0 makes all logits equal", "use 30, say, or null for none")

    def for_validation(self) -> "LossConfig":
        """The loss of validations: the cross-entropy of the same logits, so that curves of all objectives compare."""
        return dataclasses.replace(self, z_loss=0.0, label_smoothing=0.0)


# ------------------------------------------------------------------------------------------------------------ data
@dataclass
class DataConfig:
    """Keys that every data source has."""

    name: str = plain_name()
    cache_dir: str = option("data_cache", "prepared data is kept here", path="read")  # a complete one may be read-only
    verify: bool = option(True, "true: compare every byte with its recorded sha256 before training; false: only sizes")
    reset_at_document: bool = option(False, "true: state and attention start anew at every document (cu_seqlens)")


@dataclass
class MarkovDataConfig(DataConfig):
    """Text generated by a Markov chain of known entropy."""

    vocab_size: int = option(512, "tokens, including the end of a document (0)", minimum=4)
    branching: int = option(4, "tokens that may follow a token, the k-th with p ∝ 1/k", minimum=2)
    n_tokens: int = option(4194304, "training tokens", minimum=1)
    n_valid_tokens: int = option(65536, "validation tokens", minimum=2)
    data_seed: int = option(0, "decides the chain and the text; independent of the run's seed", minimum=0)


@dataclass
class TokenizedDataConfig(DataConfig):
    """Text that a tokenizer turns into shards, once."""

    tokenizer: str | None = option(None, "JSON of tokenizers, directory or hub name; null: trained here", path="read")
    tokenizer_vocab_size: int = option(4096, "of a tokenizer that is trained here (on the first 16 MiB)", minimum=257)
    max_tokens: int | None = option(None, "stop after so many training tokens, with a document; null: all", minimum=1)
    valid_fraction: float = option(0.01, "share held out where no validation text is given", minimum=0, maximum=0.5)


@dataclass
class StdlibDataConfig(TokenizedDataConfig):
    """The source code of Python's standard library as text."""


@dataclass
class SourceConfig:
    """One of several sources of text."""

    path: Any = option(MUST_BE_GIVEN, "file, folder, glob or [a.txt,notes]", path="read", several=True)
    weight: float = option(1.0, "its share of the training sequences, relative to the other weights")

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ConfigError(f"data.sources: {self.path} has weight {self.weight:g}", "give it a number above 0")


@dataclass
class TextDataConfig(TokenizedDataConfig):
    """Local files: text or .jsonl, each also compressed (.xz, .gz, .bz2, .zst), or .parquet."""

    path: Any = option(MUST_BE_GIVEN, "training text: file, folder, glob or [a.txt,notes]", path="read", several=True)
    sources: list[SourceConfig] = option([], "or a mixture: [{path: a.txt, weight: 0.7}, {path: b.jsonl, weight: 0.3}]")
    valid_path: Any = option(None, "validation text, as above; null: text is held out", path="read", several=True)
    text_field: str = option("text", "the field or column of .jsonl and .parquet that holds the text")
    document_separator: str | None = option(None, "ends a document of a file: blank_line or a string; null: one only")

    def __post_init__(self) -> None:
        if self.sources and self.path is not None:
            raise ConfigError("data.path and data.sources are both given", "leave one of them out")
        if len(self.sources) == 1:
            raise ConfigError("data.sources names one source", "give its path in data.path, or name two or more")
        weights = [Fraction(str(source.weight)) for source in self.sources]
        if weights and lcm(*((weight / sum(weights)).denominator for weight in weights)) > LONGEST_CYCLE:
            raise ConfigError(
                f"data.sources: no {LONGEST_CYCLE:,} sequences have exactly the shares of weights with so many digits",
                "round them so that they add up to 1 or 100",
            )
        if self.path in (None, []) and not self.sources:
            raise ConfigError("data.path names no file", "add data.path=…: a file, a folder, a glob or a list of them")
        if self.document_separator == "":
            raise ConfigError("data.document_separator is empty", "give a string that ends a document, or leave it out")


@dataclass
class HubDataConfig(TokenizedDataConfig):
    """A dataset of the Hugging Face hub through `datasets`, or a local directory of the same layout."""

    path: str = option(MUST_BE_GIVEN, "hub name, or a local directory of the same layout", path="read")
    subset: str | None = option(None, "the data set's configuration; null: its default")
    train_split: str = option("train", "name of the training split")
    valid_split: str | None = option(None, "name of the validation split; null: held out of training")
    text_field: str = option("text", "column that holds the text")
    document_start: str | None = option(None, "regular expression of rows that begin a document; null: each row is one")
    empty_row: str = option("", 'text for an empty row; "": the row is skipped')
    streaming: bool = option(False, "true: read over the network; false: `datasets` downloads the whole subset, once")


# -------------------------------------------------------------------------------------------------------- training
@dataclass
class OptimizerConfig:
    """AdamW (decoupled weight decay) and gradient clipping. The group `schedule` has the learning-rate schedules."""

    name: str = plain_name()
    lr: float = option(3.0e-3, "peak learning rate, reached at the end of the warm-up", minimum=0)
    beta1: float = option(0.9, "AdamW: decay of the first moment, per step", minimum=0, maximum=1)
    beta2: float = option(0.95, "AdamW: decay of the second moment, per step", minimum=0, maximum=1)
    eps: float = option(1.0e-8, "AdamW: added to the root of the second moment", minimum=0)
    weight_decay: float = option(
        0.1, "per unit of rate; matrices, convolutions, embeddings (not norms, biases, A_log, dt_bias)", minimum=0
    )
    max_grad_norm: float | None = option(1.0, "gradients are clipped to this L2 norm; null or inf: never", minimum=0)

    def __post_init__(self) -> None:
        if self.max_grad_norm == math.inf:  # in PyTorch: measure the norm, do not clip
            self.max_grad_norm = None


@dataclass
class MuonConfig(OptimizerConfig):
    """Muon (torch.optim.Muon) for the matrices of the layers, AdamW for all other parameters (docs/training.md)."""

    momentum: float = option(0.95, "decay of the mean of a matrix's gradients, a step (Nesterov)", minimum=0, maximum=1)
    ns_steps: int = option(5, "Newton-Schulz iterations that make an update nearly orthogonal", minimum=1, maximum=99)


@dataclass
class ScheduleConfig:
    """A warm-up, and the step at which the schedule ends.

    A constant schedule has no end: a larger trainer.max_steps continues the run.
    """

    name: str = plain_name()
    steps: int | None = option(None, "its last step; null: the run's last. constant: only for warmup_steps", minimum=1)
    warmup_steps: int | None = option(None, "null: a tenth of `steps`; constant without steps: none", minimum=0)


@dataclass
class FallingConfig(ScheduleConfig):
    """A schedule whose learning rate falls to a share of the peak."""

    min_lr_ratio: float = option(0.1, "learning rate at the end of the schedule / optimizer.lr", minimum=0, maximum=1)


@dataclass
class WsdConfig(FallingConfig):
    """Warm-up, stable, decay (arXiv:2404.06395): the learning rate stays at its peak and falls linearly at the end."""

    decay_fraction: float = option(0.2, "last share of the schedule, in which the rate falls", minimum=0, maximum=1)


@dataclass
class TrainerConfig:
    """Length, batch, precision, checkpoints and measurements of a run.

    Figures are per data-parallel rank unless they say otherwise.
    """

    max_steps: int | None = option(200, "optimizer steps; null: until max_tokens", minimum=1)
    max_tokens: int | None = option(None, "tokens of the whole run; null: no limit. The first limit counts", minimum=1)
    batch_size: int = option(8, "sequences per micro-step", minimum=1)
    accumulation_steps: int = option(1, "micro-steps a step; the loss is the mean over all its tokens", minimum=1)
    seq_len: int = option(128, "tokens per sequence (T)", minimum=2)
    precision: str = choice("auto (GPU: bf16_autocast, CPU: fp32) | fp32 | bf16_autocast | bf16 (parameters, too)")
    activation_checkpointing: str = choice("recomputed backward: none | selective (all but linear layers) | full")
    compile: str = choice("by torch.compile: none | blocks (each by itself) | model (all blocks as one; not the loss)")
    float8: str = choice("what multiplies in float8: none | blocks (their linear layers; not head and loss)")
    cuda_graph: bool = option(False, "true: replay both passes as one CUDA graph: equal losses, less work for the CPU")
    deterministic: bool = option(False, "true: deterministic algorithms only; an operation without one is an error")
    log_every: int = option(1, "optimizer steps between lines of metrics.jsonl", minimum=1)
    valid_every: int | None = option(None, "optimizer steps between validations; null: once, at the end", minimum=1)
    valid_tokens: int | None = option(100000, "tokens of the validation set to read; null: all", minimum=1)
    checkpoint_every: int | None = option(
        None, "steps; null: by the clock and at the end; 0: when interrupted", minimum=0
    )
    checkpoint_minutes: float | None = option(10, "minutes between checkpoints; null: only by steps", minimum=0)
    keep_checkpoints: int = option(2, "number of newest checkpoints to keep", minimum=1)
    resume: str = choice("auto (continue an existing run) | never (move it aside) | must (fail without one)")
    warmup_measurement_steps: int = option(5, "first steps of a process, in no figure of speed or memory", minimum=0)
    kernel_choices: str = choice(
        "FLA's tiles: stored (missing ones tuned) | first (not tuned) | tune (all, and store them)"
    )
    profile_steps: int = option(0, "steps after the warm-up to trace with torch.profiler; in no figure", minimum=0)
    memory_snapshot: bool = option(False, "true: record every CUDA allocation, for pytorch.org/memory_viz")


@dataclass
class WandbConfig:
    """Weights & Biases."""

    mode: str = choice("auto (WANDB_MODE, else online with an API key) | online | offline | disabled")
    project: str = option("linrnn", "wandb project")
    entity: str | None = option(None, "wandb user or team; null: the key's default")
    tags: list[str] = option([], "further tags; model, size, loss and data are always there")


@dataclass
class LoggerConfig:
    """metrics.jsonl in the run directory is always written and is the source of truth; wandb mirrors it."""

    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: bool = option(False, "true: mirror them to TensorBoard's event files in <run>/tensorboard, too")
    picture: bool = option(True, "true: draw progress.png (loss and speed) beside summary.json at the end")
    console_every_seconds: float = option(30.0, "s between progress lines; a terminal has one that moves", minimum=0)


@dataclass
class TensorboardLoggerConfig(LoggerConfig):
    """As the default, with TensorBoard beside wandb (pip install 'linrnn[tensorboard]')."""

    tensorboard: bool = option(True, "true: mirror metrics to TensorBoard's event files in <run>/tensorboard")


@dataclass
class ParallelConfig:
    """One process on one device. The other options use several GPUs, with a process for each."""

    name: str = plain_name()

    def data_ranks(self, world_size: int) -> int:
        """How many different batches of `trainer.batch_size` sequences `world_size` processes read in a micro-step."""
        return world_size

    def ranks_of_model(self, world_size: int) -> int:
        """Number of ranks that share one model."""
        return 1


@dataclass
class DistributedConfig(ParallelConfig):
    """Keys that every distributed method has."""

    timeout_seconds: float = option(1800, "that a rank waits for others before it gives up", minimum=1, maximum=1e8)


@dataclass
class DdpConfig(DistributedConfig):
    """A replica of the model on every GPU, or in every process on a CPU (torch's DistributedDataParallel).

    torchrun --nproc-per-node=N train.py … parallel=ddp. trainer.batch_size is each rank's.
    """


@dataclass
class FsdpConfig(DistributedConfig):
    """Parameters, gradients and optimizer state sharded over GPUs (torch's FSDP2).

    torchrun --nproc-per-node=N train.py … parallel=fsdp. trainer.batch_size is each rank's.
    """

    shard_ranks: int | None = option(None, "that share one model; null: all, or those of one machine (HSDP)", minimum=1)
    blocks_together: int = option(1, "blocks gathered at a time; more take fewer calls and more memory", minimum=1)
    keep_gathered: bool = option(False, "true: blocks stay gathered for their backward pass: fewer calls, more memory")

    def ranks_of_model(self, world_size: int) -> int:
        """As above.

        Raises:
            ConfigError: the ranks cannot form groups of `shard_ranks`.
        """
        size = self.shard_ranks or world_size
        if world_size % size:
            raise ConfigError(
                f"parallel.shard_ranks={size} does not divide {world_size} rank{'s' if world_size > 1 else ''}",
                "use a divisor of the number of ranks (for several machines that of a machine's GPUs), or null for all",
            )
        return size


@dataclass
class VocabConfig(FsdpConfig):
    """Every GPU keeps its vocabulary rows of embedding and head, and computes the loss on them.

    Blocks are sharded as in fsdp. trainer.batch_size is for a group of shard_ranks GPUs, which divide its sequences.
    Needs loss=cce_kahan or cce_filter.
    """

    def data_ranks(self, world_size: int) -> int:
        return world_size // self.ranks_of_model(world_size)


@dataclass
class Config:
    """A training run: its groups, whose options configs/train.yaml lists, and the keys of none of them."""

    model: ModelConfig
    size: SizeConfig
    loss: LossConfig
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    trainer: TrainerConfig
    logger: LoggerConfig
    parallel: ParallelConfig
    seed: int = option(0, "initial weights and order of the data", minimum=0)
    group: str = option("default", "related runs share a group: results/<group>/<run_name>/", pattern=PLAIN_NAME)
    run_name: str | None = option(None, "null: made from model, size, loss and all other choices", pattern=PLAIN_NAME)
    results_dir: str = option("results", "the directory of all groups", path="written")
    device: str = device()
    memory_budget_gib: float | None = option(None, "GiB of the GPU to use, as a smaller card has; null: all", minimum=0)
    init_from: str | None = option(
        None, "weights of a run, checkpoint or model in FLA's format; null: random", path="read"
    )
    continue_from: str | None = option(None, "weights and optimizer state of a run or checkpoint", path="read")
    dry_run: bool = option(False, "true: only print the expected parameters, memory and time")
    gpu: str | None = gpu()
    gpu_price: float | None = option(None, "of an hour of one GPU, for the forecast, in any currency", minimum=0)


@dataclass
class ExperimentConfig:
    """A set of choices by name. Further overrides of the command line beat them."""

    overrides: list[str] = option(MUST_BE_GIVEN, "overrides of train.py")


# -------------------------------------------------------------------------------------------------- other commands
@dataclass
class SweepConfig:
    """A sweep: a list of grids, whose points run in this order.

    A grid maps keys or groups to lists of values. Its points are all combinations of these values. `targets` are what
    a report judges the runs by (linrnn.report.targets).
    """

    name: str = plain_name()
    overrides: list[str] = option(MUST_BE_GIVEN, "overrides of every point")
    grids: list[dict[str, list[Any]]] = option(MUST_BE_GIVEN, "all combinations of each grid, one grid after another")
    targets: list[dict[str, Any]] = option([], "what a report judges the runs by (docs/sweeps.md)")
    ranks: int = option(1, "processes that share each point, as torchrun; needs parallel=fsdp, ddp or vocab", minimum=1)


@dataclass
class RunSweepConfig:
    """`python scripts/sweep.py sweep=mve [loss=compiled,cce_kahan seed=0]`: many runs, each in its own process.

    Overrides of the runs replace the sweep's values and may be lists: a,b,c. On a cluster: cluster=slurm
    resources.slurm_partition=… (pip install 'linrnn[slurm]').
    """

    sweep: SweepConfig
    jobs: int = option(1, "points at a time; each on GPUs of its own, one for each of its ranks", minimum=1)
    share_gpus: bool = option(False, "true: several points on each GPU; their losses count, times are not measured")
    retry: bool = option(False, "true: run points again that ran out of memory or diverged; false: it is their result")
    dry_run: bool = option(False, "true: only list the points with their expected memory and time")
    gpu: str | None = gpu()
    cluster: str = choice("where points run: none (this machine) | slurm | local (as submitit's jobs)")
    resources: dict[str, Any] = option({}, "of a job, by submitit's names: resources.gpus_per_node=1")


@dataclass
class FindMaxBatchConfig:
    """`python scripts/find_max_batch.py model=gla size=1b3 loss=cce_kahan memory_budget_gib=80`: the largest batch.

    A probe that was made before is not repeated. Probes of another commit, machine or version need another group.
    """

    memory_budget_gib: float = option(80.0, "that a process may take; on a CPU: its whole resident set", minimum=0)
    probe_steps: int = option(8, "steps of a probe, enough for the optimizer's state and fragmentation", minimum=3)
    warmup_steps: int = option(3, "first steps of a probe, left out of tokens/s and of the measured peak", minimum=1)
    max_probes: int = option(7, "maximum number of training runs", minimum=1)
    dry_run: bool = option(False, "true: only print the batch that the formulas estimate")
    gpu: str | None = gpu()
    ranks: int = option(1, "processes of each probe, one per GPU; more need parallel=fsdp, ddp or vocab", minimum=1)
    group: str = option("max_batch", "probes lie in <results_dir>/<group>/, answers in answers/", pattern=PLAIN_NAME)
    results_dir: str = option("results", "the directory of all groups", path="written")


@dataclass
class BreakdownConfig:
    """`python scripts/breakdown.py model=gla size=1b3 loss=cce_kahan trainer.batch_size=8`: memory and time by part."""

    warmup_steps: int = option(3, "optimizer steps before the measured ones, which tune kernels", minimum=1)
    steps: int = option(9, "steps timed; times are medians, shares have 90 % intervals over the steps", minimum=1)
    output: str = option("results/breakdown", "directory of <run_name>.json and .md", path="written")


@dataclass
class ReadingConfig:
    """A command that reads the models of runs.

    `data` holds the overrides of the group `data`. They change each run's own data (`linrnn.config.data_for`), which is
    known only once the run is opened.
    """

    data: list[str] = option([], "[]: each run's own; data.KEY=… changes it, data=… chooses other data")


@dataclass
class EvaluateConfig(ReadingConfig):
    """`python scripts/evaluate.py checkpoint=results/default/gla-smoke-cce_kahan-s0 [loss=standard]`

    With tasks=[arc_easy] lm-eval evaluates the model instead (pip install 'linrnn[eval]'), also one that
    scripts/export.py wrote.
    """

    checkpoint: str = option(MUST_BE_GIVEN, "a run (its newest checkpoint) or one of its checkpoints", path="read")
    tasks: list[str] = option([], "[]: loss and perplexity; names of lm-eval's tasks: these instead")
    tasks_path: str | None = option(None, "a folder with YAML files of further tasks", path="read")
    tasks_limit: int | None = option(None, "examples of each task; null: all", minimum=1)
    # No path that is written: those are directories.
    output: str | None = option(None, "a JSON file for the results, which is replaced; null: none", path="read")
    split: str = choice("valid | train")
    max_tokens: int | None = option(None, "tokens to read; null: the whole split", minimum=1)
    batch_size: int | None = option(None, "sequences at once; null: the run's; of tasks: 1", minimum=1)
    seq_len: int | None = option(None, "tokens per sequence; null: the run's", minimum=2)
    device: str = device()
    loss: LossConfig | None = None  # a group that may be left out


@dataclass
class ExportConfig:
    """`python scripts/export.py checkpoint=results/default/gla-smoke-cce_kahan-s0 output=my_model`"""

    checkpoint: str = option(MUST_BE_GIVEN, "a run (its newest checkpoint) or one of its checkpoints", path="read")
    output: str = option(MUST_BE_GIVEN, "a new directory for configuration, weights and tokenizer", path="written")


@dataclass
class GenerateConfig:
    """`python scripts/generate.py checkpoint=results/default/RUN prompt="Once upon a time" [temperature=0.8]`"""

    checkpoint: str = option(MUST_BE_GIVEN, "a run, a checkpoint, or a directory of scripts/export.py", path="read")
    prompt: str | None = option(None, 'text to continue: prompt="$(cat my.txt)"; -: asks for prompts, one a line')
    prompt_tokens: list[int] | None = option(None, "token ids, as [1,2,3]. Both null: a new document")
    max_new_tokens: int = option(100, "tokens per sample; a sample ends earlier at the end of a document", minimum=1)
    n_samples: int = option(1, "samples from the same prompt", minimum=1)
    temperature: float = option(1.0, "divides the logits; 0: the most probable token, always", minimum=0)
    top_k: int | None = option(None, "sample from this many most probable tokens; null: from all", minimum=1)
    top_p: float | None = option(None, "sample from the fewest tokens of this probability", minimum=0, maximum=1)
    seed: int = option(0, "the same seed gives the same samples on the same machine", minimum=0)
    device: str = device()


@dataclass
class ReportConfig:
    """`python scripts/report.py group=mve`: what a group's runs say, in tables and plots.

    It reads the group's runs below results_dir. Without runs it reads the committed report of that name. It writes
    report.md, the plots, and report.html: one page for a browser that needs no other file. Targets in the sweep's file
    (docs/sweeps.md) are answered: reached, not reached or inconclusive.
    """

    group: str = option("default", "the group", pattern=PLAIN_NAME)
    results_dir: str = option("results", "directory of all groups; its folder summaries holds the reports", path="read")
    output_dir: str | None = option(
        None, "null: <results_dir>/summaries/<group>; <group>/report if other runs' stands there", path="written"
    )
    max_batch_group: str = option("max_batch", "further answers of scripts/find_max_batch.py", pattern=PLAIN_NAME)


@dataclass
class RunsConfig:
    """`python scripts/runs.py group=default`: status, loss, speed, memory and age of every run of a group."""

    group: str = option("default", "the group", pattern=PLAIN_NAME)
    compare: list[str] = option([], "two runs, as [RUN,RUN]: only the keys in which they differ")
    csv: str | None = option(None, "a file for the metrics of all runs, one row a step, which is replaced", path="read")
    results_dir: str = option("results", "directory of all groups", path="read")


# The schema of each command, by its name. A command with groups has a menu, configs/<name>.yaml. Benchmarks add theirs.
COMMANDS: dict[str, type] = {
    "train": Config,
    "evaluate": EvaluateConfig,
    "export": ExportConfig,
    "generate": GenerateConfig,
    "report": ReportConfig,
    "runs": RunsConfig,
    "run_sweep": RunSweepConfig,
    "find_max_batch": FindMaxBatchConfig,
    "breakdown": BreakdownConfig,
}

# The schema of each `group=option`; "" is that of all options which are not listed. Options of model, size, data and
# sweep have files in configs/<group>/ with their values. Each loss adds its own option (linrnn.config.compose.offer).
SCHEMAS: dict[str, dict[str, type]] = {
    "model": {"": ModelConfig, "fla": FlaModelConfig},
    "size": {"": SizeConfig},
    "loss": {},
    "data": {
        "markov": MarkovDataConfig,
        "stdlib": StdlibDataConfig,
        "text": TextDataConfig,
        "wikitext103": HubDataConfig,
        "fineweb_edu": HubDataConfig,
    },
    "optimizer": {"adamw": OptimizerConfig, "muon": MuonConfig},
    "schedule": {"cosine": FallingConfig, "linear": FallingConfig, "wsd": WsdConfig, "constant": ScheduleConfig},
    "trainer": {"default": TrainerConfig},
    "logger": {"default": LoggerConfig, "tensorboard": TensorboardLoggerConfig},
    "parallel": {"none": ParallelConfig, "ddp": DdpConfig, "fsdp": FsdpConfig, "vocab": VocabConfig},
    "sweep": {"": SweepConfig},
    "experiment": {"": ExperimentConfig},
}
# What an option is, where the docstring of its schema does not say it.
ABOUT: dict[tuple[str, str], str] = {
    ("schedule", "constant"): "The learning rate stays at its peak. A larger trainer.max_steps continues the run.",
    ("schedule", "cosine"): "After the warm-up the learning rate falls along half a cosine.",
    ("schedule", "linear"): "After the warm-up the learning rate falls along a straight line.",
}


def kind_of(schema: Any, name: str) -> Any:
    """The type of a dataclass's field, without None; str for one that holds paths; None if there is no such field."""
    fields = {one.name: one for one in dataclasses.fields(schema)} if dataclasses.is_dataclass(schema) else {}
    if name not in fields or "several" in fields[name].metadata:
        return str if name in fields else None
    kind = get_type_hints(schema)[name]
    return next(iter(set(get_args(kind)) - {NoneType})) if isinstance(kind, UnionType) else kind


def leaves(nested: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested dictionaries as (dotted key, value)."""
    for key, value in nested.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
