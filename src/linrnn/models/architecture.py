"""Dimensions of a model, and its parameters counted from formulas. Nothing is built here.

All four architectures of a size have the same depth, width and norms. A layer has about `layer_parameters_per_d2 ·
hidden_size²` parameters. The mixer takes what its heads need; the SwiGLU MLP gets the rest. Its width is rounded to the
nearest multiple of d / 16 (in steps of 8, at least 8), which is 3/16 d² parameters. At 12 d² per layer the bodies of
the four are therefore within 1.6 % of each other.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from linrnn.config.schema import ModelConfig, SizeConfig
from linrnn.core.errors import ConfigError
from linrnn.core.tables import Table

CONV_SIZE = 4  # taps of the short convolutions of Gated DeltaNet and KDA
GLA_GATE_RANK = 16  # inner width of GLA's low-rank forget gate
MAX_KEY_DIM = 256  # per head; FLA's delta-rule kernels take no more


@dataclass(frozen=True)
class Architecture:
    """A model at a size: everything that decides the shapes of its parameters.

    Attributes:
        model: the sequence mixer: gla, gated_deltanet, kda or transformer.
        size: the name of the size.
        head_k_dim, head_v_dim: dimensions per head of keys (and queries) and of values.
        intermediate_size: width of the SwiGLU MLP.
        chunk_size: tokens per chunk of the recurrent kernel; None: the kernel's own default.
    """

    model: str
    size: str
    num_layers: int
    hidden_size: int
    num_heads: int
    head_k_dim: int
    head_v_dim: int
    intermediate_size: int
    vocab_size: int
    tie_embeddings: bool
    chunk_size: int | None

    @property
    def key_dim(self) -> int:
        """Width of the keys of all heads."""
        return self.num_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        """Width of the values of all heads."""
        return self.num_heads * self.head_v_dim

    @property
    def mixer_parameters(self) -> int:
        """Parameters of one layer's mixer, including its inner norm, gates and convolutions."""
        if (formula := MIXER_PARAMETERS.get(self.model)) is None:
            raise ConfigError(f"model.name={self.model}: there is no such model", f"use one of {', '.join(MODELS)}")
        return formula(self)

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one layer's SwiGLU MLP: gate, up and down projections."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def norm_parameters(self) -> int:
        """Parameters of all norms over the hidden size: two per layer and the final one."""
        return (2 * self.num_layers + 1) * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding. An untied output head has as many again."""
        return self.vocab_size * self.hidden_size

    @property
    def body_parameters(self) -> int:
        """All parameters but those of the embedding and the head."""
        return self.num_layers * (self.mixer_parameters + self.mlp_parameters) + self.norm_parameters

    @property
    def n_parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        return self.body_parameters + self.embedding_parameters * (1 if self.tie_embeddings else 2)


# ----------------------------------------------------------------------------------------- parameters of one mixer
def _projections(arch: Architecture) -> int:
    """Queries, keys, values, output."""
    return arch.hidden_size * (2 * arch.key_dim + 2 * arch.value_dim)


def _convolutions(arch: Architecture) -> int:
    return CONV_SIZE * (2 * arch.key_dim + arch.value_dim)


def _gla(arch: Architecture) -> int:
    """Output gate; low-rank forget gate with bias; norm."""
    d, keys = arch.hidden_size, arch.key_dim
    return _projections(arch) + d * arch.value_dim + GLA_GATE_RANK * (d + keys) + keys + arch.head_v_dim


def _gated_deltanet(arch: Architecture) -> int:
    """Output gate; decay and beta; A_log and dt_bias; norm."""
    d, heads = arch.hidden_size, arch.num_heads
    gates = d * arch.value_dim + 2 * d * heads
    return _projections(arch) + _convolutions(arch) + gates + 2 * heads + arch.head_v_dim


def _kda(arch: Architecture) -> int:
    """Low-rank decay and output gate (with bias); beta; A_log and dt_bias; norm."""
    d, heads, keys, values = arch.hidden_size, arch.num_heads, arch.key_dim, arch.value_dim
    low_rank = arch.head_v_dim * (2 * d + keys + values) + values
    return _projections(arch) + _convolutions(arch) + low_rank + d * heads + heads + keys + arch.head_v_dim


# Parameters of one mixer; the width of a layer's MLP depends on them. A new model needs an entry here and a class in
# linrnn.models.fla_models. Formulas of its FLOPs and memory in linrnn.costs are optional.
MIXER_PARAMETERS: dict[str, Callable[[Architecture], int]] = {
    "gla": _gla,
    "gated_deltanet": _gated_deltanet,
    "kda": _kda,
    "transformer": _projections,
}
MODELS = tuple(MIXER_PARAMETERS)


def resolve(model: ModelConfig, size: SizeConfig, vocab_size: int) -> Architecture:
    """The architecture of `model` at `size` with a vocabulary of `vocab_size` entries.

    Raises:
        ConfigError: dimensions do not fit together, or the mixer leaves its layer no room for an MLP.
    """
    if model.name not in size.mixers:
        raise ConfigError(
            f"size={size.name} gives no heads for model={model.name}",
            f"add size.mixers.{model.name}, or use one of {', '.join(size.mixers)}",
        )
    heads = size.mixers[model.name]
    bare = Architecture(
        model=model.name,
        size=size.name,
        num_layers=size.num_layers,
        hidden_size=size.hidden_size,
        num_heads=heads.num_heads,
        head_k_dim=heads.head_k_dim,
        head_v_dim=heads.head_v_dim,
        intermediate_size=0,
        vocab_size=vocab_size,
        tie_embeddings=size.tie_embeddings,
        chunk_size=model.chunk_size,
    )
    _check_heads(bare)
    d = size.hidden_size
    unit = max(8, d // 128 * 8)
    left = size.layer_parameters_per_d2 * d**2 - bare.mixer_parameters
    width = round(left / (3 * d * unit)) * unit
    if width < unit:
        raise ConfigError(
            f"size={size.name}: {model.name} mixers of {bare.mixer_parameters / d**2:.2f} d² parameters "
            f"leave no MLP within {size.layer_parameters_per_d2:g} d² per layer",
            f"lower size.mixers.{model.name}'s heads or raise size.layer_parameters_per_d2",
        )
    return Architecture(**{**vars(bare), "intermediate_size": width})


def _check_heads(arch: Architecture) -> None:
    """Reject dimensions that FLA's layers cannot express: widths are ratios, and attention splits the hidden size."""
    where = f"size.mixers.{arch.model}"
    k_dim, v_dim = arch.head_k_dim, arch.head_v_dim
    if arch.model == "transformer":
        if not arch.key_dim == arch.value_dim == arch.hidden_size:
            raise ConfigError(
                f"{where}: {arch.num_heads} heads of {k_dim} do not make up the width of {arch.hidden_size}",
                "attention needs num_heads · head_k_dim = num_heads · head_v_dim = size.hidden_size",
            )
        if k_dim % 2:
            raise ConfigError(f"{where}.head_k_dim={k_dim} is odd", "rotary positions need an even one")
    if arch.model in ("gated_deltanet", "kda"):
        if k_dim > MAX_KEY_DIM:
            raise ConfigError(
                f"{where}.head_k_dim={k_dim} is above {MAX_KEY_DIM}, the most FLA's kernels take",
                f"use more heads with head_k_dim={MAX_KEY_DIM} or less",
            )
        if int(k_dim * (v_dim / k_dim)) != v_dim:
            raise ConfigError(
                f"{where}: FLA takes the value dimension as a ratio, and {v_dim}/{k_dim} is not exact",
                "use a head_v_dim that is a multiple of head_k_dim, or half of it",
            )


def parameter_table(models: Iterable[ModelConfig], sizes: Iterable[SizeConfig], default_vocab_size: int) -> str:
    """The table of sizes in docs/models.md: Markdown, one row per size and model.

    Args:
        default_vocab_size: the vocabulary of sizes that take theirs from the data.
    """
    columns = (
        *("size", "model", "layers", "width", "heads", "key dim", "value dim", "MLP width", "body", "vocabulary"),
        *("tied", "untied"),
    )
    models, rows = list(models), []
    for size in sizes:
        for model in models:
            arch = resolve(model, size, size.vocab_size or default_vocab_size)
            tied = arch.body_parameters + arch.embedding_parameters
            untied = tied + arch.embedding_parameters
            totals = [f"**{_millions(n)}**" if n == arch.n_parameters else _millions(n) for n in (tied, untied)]
            row = (
                arch.size,
                arch.model,
                arch.num_layers,
                arch.hidden_size,
                arch.num_heads,
                arch.head_k_dim,
                arch.head_v_dim,
                arch.intermediate_size,
                _millions(arch.body_parameters),
                f"{arch.vocab_size:,}",
                *totals,
            )
            rows.append(row)
    return "\n".join(Table(columns, rows, words=("size", "model")).markdown())


def _millions(n: int) -> str:
    return f"{n / 1e6:,.2f} M" if n < 1e8 else f"{n / 1e6:,.0f} M"
