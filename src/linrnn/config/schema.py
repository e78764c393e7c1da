"""The typed configuration: every key, its type and its bounds.

Defaults stand in configs/*.yaml; those of a loss's options in the loss's own file, with :func:`option`. A field made
with :func:`at_least`, :func:`one_of` or :func:`between` carries its bound as metadata, which
:func:`linrnn.config.compose.validate` checks. The YAML file must give every field that has no default.
"""

import math
from dataclasses import MISSING, dataclass, field
from typing import Any

from linrnn.core.errors import ConfigError


def at_least(minimum: float, default: Any = MISSING) -> Any:
    """A number that must be >= `minimum` (or null, if the type allows it)."""
    return field(default=default, metadata={"minimum": minimum})


def between(minimum: float, maximum: float) -> Any:
    """A number in [minimum, maximum]."""
    return field(metadata={"minimum": minimum, "maximum": maximum})


def plain_name() -> Any:
    """A word that is safe as part of a file's name: no separators, no leading dot."""
    return field(metadata={"pattern": r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}"})


def input_path() -> Any:
    """A file or directory (or several). Every character must be printable."""
    return field(metadata={"path": "read"})


def input_paths() -> Any:
    """As :func:`input_path`, for one path or a list of them."""
    return field(metadata={"path": "read", "several": True})


def output_path() -> Any:
    """As :func:`input_path`, for a directory that the command creates or writes to."""
    return field(metadata={"path": "written"})


def one_of(*choices: Any) -> Any:
    """One of a closed set of values."""
    return field(metadata={"choices": choices})


def option(
    default: Any,
    meaning: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[Any, ...] = (),
    path: str | None = None,
) -> Any:
    """A key without a YAML file (of `loss`, or of a benchmark): its default, its comment in `--help`, and its bounds.

    Args:
        path: `read` or `written`, as :func:`input_path` and :func:`output_path`.
    """
    metadata = {"meaning": meaning, "minimum": minimum, "maximum": maximum, "choices": choices}
    metadata |= {} if path is None else {"path": path}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


# --------------------------------------------------------------------------------------------------- model x size
@dataclass
class ModelConfig:
    """The sequence mixer and its own options. Dimensions come from `size`."""

    name: str = plain_name()
    chunk_size: int | None = at_least(1)

    @property
    def label(self) -> str:
        """The model in summaries and tables. Two models that compute different things have different labels."""
        return self.name


@dataclass
class ProjectedModelConfig(ModelConfig):
    """A model whose queries, keys and values may come from one projection of low rank."""

    shared_projection_rank: int | None = field(default=None, metadata={"minimum": 1})

    @property
    def label(self) -> str:
        rank = self.shared_projection_rank
        return self.name if rank is None else f"{self.name} shared_projection_rank={rank}"


@dataclass
class FlaModelConfig(ModelConfig):
    """Any causal language model of flash-linear-attention."""

    config: str = input_path()
    options: dict[str, Any]
    attention_every: int | None = at_least(1)
    attention_window: int | None = at_least(1)

    @property
    def label(self) -> str:
        options = {**self.options, "attention_every": self.attention_every, "attention_window": self.attention_window}
        return " ".join(
            [f"fla:{self.config}", *(f"{key}={value}" for key, value in options.items() if value is not None)]
        )


@dataclass
class MixerDims:
    """Heads of one mixer at one size. Dimensions are per head."""

    num_heads: int = at_least(1)
    head_k_dim: int = at_least(1)
    head_v_dim: int = at_least(1)


@dataclass
class SizeConfig:
    """Dimensions that the four architectures share, and each mixer's heads.

    A layer of any architecture has about `layer_parameters_per_d2 * hidden_size**2` parameters. The mixer takes what it
    needs; the width of the SwiGLU MLP is chosen to fill the rest (see `linrnn.models.architecture`).
    """

    name: str = plain_name()
    hidden_size: int = at_least(1)
    num_layers: int = at_least(1)
    layer_parameters_per_d2: float = at_least(0)
    vocab_size: int | None = at_least(2)
    tie_embeddings: bool
    mixers: dict[str, MixerDims]


# ------------------------------------------------------------------------------------------------------------ loss
@dataclass
class LossConfig:
    """A loss backend. Its file adds the backend's options in a subclass."""

    name: str = plain_name()


# ------------------------------------------------------------------------------------------------------------ data
@dataclass
class DataConfig:
    """Keys that every data source has."""

    name: str = plain_name()
    cache_dir: str = input_path()  # not output_path: a complete cache may be read-only
    verify: bool
    reset_at_document: bool


@dataclass
class MarkovDataConfig(DataConfig):
    """Text generated by a Markov chain of known entropy."""

    vocab_size: int = at_least(4)
    branching: int = at_least(2)
    n_tokens: int = at_least(1)
    n_valid_tokens: int = at_least(1)
    data_seed: int = at_least(0)


@dataclass
class TokenizedDataConfig(DataConfig):
    """Text that a tokenizer turns into shards, once."""

    # A Hugging Face tokenizers JSON (also .xz) or a hub name. With null, a byte-level BPE is trained on this data.
    tokenizer: str | None = input_path()
    tokenizer_vocab_size: int = at_least(257)
    max_tokens: int | None = at_least(1)
    valid_fraction: float = between(0, 0.5)


@dataclass
class StdlibDataConfig(TokenizedDataConfig):
    """The source code of Python's standard library as text."""


@dataclass
class TextDataConfig(TokenizedDataConfig):
    """Local files: text or .jsonl, each also compressed (.xz, .gz, .bz2, .zst), or .parquet."""

    path: Any = input_paths()  # noqa: RUF009
    valid_path: Any = input_paths()  # noqa: RUF009
    text_field: str
    document_separator: str | None = None  # runs of earlier versions lack the key

    def __post_init__(self) -> None:
        if self.path in (None, []):
            raise ConfigError("data.path names no file", "add data.path=…: a file, a folder, a glob or a list of them")
        if self.document_separator == "":
            raise ConfigError(
                "data.document_separator is empty", "give the string that ends a document, or leave it out"
            )


@dataclass
class HubDataConfig(TokenizedDataConfig):
    """A dataset of the Hugging Face hub through `datasets`, or a local directory of the same layout."""

    path: str = input_path()
    subset: str | None
    train_split: str
    valid_split: str | None
    text_field: str
    document_start: str | None
    empty_row: str
    streaming: bool


# -------------------------------------------------------------------------------------------------------- training
@dataclass
class OptimizerConfig:
    """AdamW's keys and gradient clipping. Every optimizer has them."""

    name: str = plain_name()
    lr: float = at_least(0)
    beta1: float = between(0, 1)
    beta2: float = between(0, 1)
    eps: float = at_least(0)
    weight_decay: float = at_least(0)
    max_grad_norm: float | None = at_least(0)

    def __post_init__(self) -> None:
        if self.max_grad_norm == math.inf:  # in PyTorch: measure the norm, do not clip
            self.max_grad_norm = None


@dataclass
class MuonConfig(OptimizerConfig):
    """Muon for the layers' matrices. The keys of AdamW are for all other parameters."""

    momentum: float = between(0, 1)
    ns_steps: int = between(1, 99)


@dataclass
class ScheduleConfig:
    """A warm-up, and the step at which the schedule ends. Every schedule has these keys."""

    name: str = plain_name()
    steps: int | None = at_least(1)
    warmup_steps: int | None = at_least(0)


@dataclass
class FallingConfig(ScheduleConfig):
    """A schedule whose learning rate falls to a share of the peak."""

    min_lr_ratio: float = between(0, 1)


@dataclass
class WsdConfig(FallingConfig):
    """Warm-up, stable, decay: the rate falls only in the last share of the schedule."""

    decay_fraction: float = between(0, 1)


@dataclass
class TrainerConfig:
    max_steps: int | None = at_least(1)
    max_tokens: int | None = at_least(1)
    batch_size: int = at_least(1)
    accumulation_steps: int = at_least(1)
    seq_len: int = at_least(2)
    precision: str = one_of("auto", "fp32", "bf16_autocast", "bf16")
    activation_checkpointing: str = one_of("none", "selective", "full")
    compile: str = one_of("none", "blocks", "model")
    float8: str = one_of("none", "blocks")
    cuda_graph: bool
    deterministic: bool
    log_every: int = at_least(1)
    valid_every: int | None = at_least(1)
    valid_tokens: int | None = at_least(1)
    checkpoint_every: int | None = at_least(0)
    checkpoint_minutes: float | None = at_least(0)
    keep_checkpoints: int = at_least(1)
    resume: str = one_of("auto", "never", "must")
    warmup_measurement_steps: int = at_least(0)
    kernel_choices: str = one_of("stored", "first", "strict", "tune")
    profile_steps: int = at_least(0)
    memory_snapshot: bool


@dataclass
class WandbConfig:
    mode: str = one_of("auto", "online", "offline", "disabled")
    project: str
    entity: str | None
    tags: list[str]


@dataclass
class LoggerConfig:
    wandb: WandbConfig
    console_every_seconds: float = at_least(0)


@dataclass
class ParallelConfig:
    """How one run is spread over processes. Subclasses add the options of each method."""

    name: str = plain_name()

    def data_ranks(self, world_size: int) -> int:
        """How many different batches of `trainer.batch_size` sequences `world_size` processes read in a micro-step."""
        return world_size


@dataclass
class DistributedConfig(ParallelConfig):
    """Keys that every distributed method has."""

    timeout_seconds: float = between(1, 1e8)


@dataclass
class DdpConfig(DistributedConfig):
    """Every rank has a replica of the model; gradients are summed (torch's DistributedDataParallel)."""


@dataclass
class FsdpConfig(DistributedConfig):
    """Parameters, gradients and optimizer state are sharded; blocks are gathered when needed (torch's FSDP2)."""

    shard_ranks: int | None = at_least(1)
    blocks_together: int = field(default=1, metadata={"minimum": 1})
    keep_gathered: bool = False

    def ranks_of_model(self, world_size: int) -> int:
        """Number of ranks that share one model.

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
    """As FSDP, but every rank keeps its vocabulary rows of embedding and head. The loss is computed on these rows."""

    def data_ranks(self, world_size: int) -> int:
        return world_size // self.ranks_of_model(world_size)


@dataclass
class Config:
    """The configuration of a run. configs/train.yaml and the files that it names explain the keys."""

    model: ModelConfig
    size: SizeConfig
    loss: LossConfig
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    trainer: TrainerConfig
    logger: LoggerConfig
    parallel: ParallelConfig
    seed: int = at_least(0)
    group: str = plain_name()
    run_name: str | None = plain_name()
    results_dir: str = output_path()
    device: str = one_of("auto", "cpu", "cuda")
    memory_budget_gib: float | None = at_least(0)
    init_from: str | None = input_path()
    continue_from: str | None = input_path()
    dry_run: bool


@dataclass
class SweepConfig:
    """A sweep: a list of grids, whose points run in this order.

    A grid maps keys or groups to lists of values. Its points are all combinations of these values. `targets` are what
    a report asks of the runs (linrnn.report.targets).
    """

    name: str = plain_name()
    overrides: list[str]
    grids: list[dict[str, list[Any]]]
    targets: list[dict[str, Any]] = field(default_factory=list)
    ranks: int = at_least(1, default=1)


@dataclass
class RunSweepConfig:
    """scripts/sweep.py: keys are explained in configs/run_sweep.yaml."""

    sweep: SweepConfig
    jobs: int = at_least(1)
    share_gpus: bool
    retry: bool
    dry_run: bool
    report_every_seconds: float = at_least(0)


@dataclass
class FindMaxBatchConfig:
    """scripts/find_max_batch.py: keys are explained in configs/find_max_batch.yaml."""

    memory_budget_gib: float = at_least(0)
    probe_steps: int = at_least(3)
    warmup_steps: int = at_least(1)
    max_probes: int = at_least(1)
    ranks: int = at_least(1)
    group: str = plain_name()
    results_dir: str = output_path()


@dataclass
class BreakdownConfig:
    """scripts/breakdown.py: keys are explained in configs/breakdown.yaml."""

    warmup_steps: int = at_least(1)
    steps: int = at_least(1)
    output: str = output_path()


@dataclass
class TuneConfig:
    """scripts/tune.py: keys are explained in configs/tune.yaml."""

    models: list[str]
    sizes: list[str]
    batch_sizes: list[int]
    again: bool
    output_dir: str | None = output_path()


@dataclass
class ReadingConfig:
    """A command that reads the models of runs.

    `data` holds the overrides of the group `data`. They change each run's own data (`linrnn.config.data_for`), which is
    known only once the run is opened.
    """

    data: list[str]


@dataclass
class EvaluateConfig(ReadingConfig):
    """scripts/evaluate.py: keys are explained in configs/evaluate.yaml."""

    checkpoint: str = input_path()
    split: str = one_of("train", "valid")
    max_tokens: int | None = at_least(1)
    batch_size: int | None = at_least(1)
    seq_len: int | None = at_least(2)
    device: str = one_of("auto", "cpu", "cuda")
    loss: LossConfig | None = None  # an optional group; evaluate.yaml gives it no value


@dataclass
class ProfileSparsityConfig(ReadingConfig):
    """scripts/profile_sparsity.py: keys are explained in configs/profile_sparsity.yaml."""

    checkpoints: list[str] = input_path()  # noqa: RUF009
    max_tokens: int | None = at_least(1)
    output_dir: str = output_path()
    device: str = one_of("auto", "cpu", "cuda")


@dataclass
class ExportConfig:
    """scripts/export.py: keys are explained in configs/export.yaml."""

    checkpoint: str = input_path()
    output: str = output_path()


@dataclass
class GenerateConfig:
    """scripts/generate.py: keys are explained in configs/generate.yaml."""

    checkpoint: str = input_path()
    prompt: str | None
    prompt_file: str | None = input_path()
    prompt_tokens: list[int] | None
    max_new_tokens: int = at_least(1)
    n_samples: int = at_least(1)
    temperature: float = at_least(0)
    top_k: int | None = at_least(1)
    top_p: float | None = between(0, 1)
    seed: int = at_least(0)
    use_state: bool
    device: str = one_of("auto", "cpu", "cuda")


@dataclass
class ReportConfig:
    """scripts/report.py: keys are explained in configs/report.yaml."""

    group: str | None = plain_name()
    summary: str | None = input_path()
    results_dir: str = input_path()
    output_dir: str | None = output_path()
    origins: str = one_of("together", "apart")
    max_batch_group: str = plain_name()


# Commands: the schema of each configs/<name>.yaml. linrnn.config.compose.add_command adds those of benchmarks.
COMMANDS: dict[str, type] = {
    "train": Config,
    "evaluate": EvaluateConfig,
    "profile_sparsity": ProfileSparsityConfig,
    "export": ExportConfig,
    "generate": GenerateConfig,
    "report": ReportConfig,
    "run_sweep": RunSweepConfig,
    "find_max_batch": FindMaxBatchConfig,
    "breakdown": BreakdownConfig,
    "tune": TuneConfig,
}

# The schema of each `group=option`. A group with one schema for all options lists it under "". Losses belong to a
# package above this one, so each loss adds its own options (linrnn.config.compose.offer).
SCHEMAS: dict[str, dict[str, type]] = {
    "model": {
        "": ModelConfig,
        "gla": ProjectedModelConfig,
        "transformer": ProjectedModelConfig,
        "fla": FlaModelConfig,
    },
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
    "schedule": {
        "cosine": FallingConfig,
        "linear": FallingConfig,
        "wsd": WsdConfig,
        "constant": ScheduleConfig,
    },
    "trainer": {"": TrainerConfig},
    "logger": {"": LoggerConfig},
    "parallel": {
        "none": ParallelConfig,
        "ddp": DdpConfig,
        "fsdp": FsdpConfig,
        "vocab": VocabConfig,
    },
    "sweep": {"": SweepConfig},
}

# The models that take `model.shared_projection_rank`.
SHARING = tuple(name for name, schema in SCHEMAS["model"].items() if schema is ProjectedModelConfig)
