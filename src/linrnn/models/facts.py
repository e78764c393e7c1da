"""What the rest of linrnn knows about a model: one `ModelFacts` for each, in `linrnn.models.zoo`.

A fact that is None is unknown. Costs then say *unknown*, and what needs the fact is refused. No model takes the formula
of another one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from linrnn.config.schema import SizeConfig
from linrnn.core.errors import ConfigError

FP32 = 4  # bytes
DEFAULT_CHUNK = 64  # tokens per chunk of FLA's kernels if `model.chunk_size` is null

# (module, name) where FLA looks a function up, and its version in plain torch.
Replacements = dict[tuple[str, str], Callable[..., Any]]


@dataclass(frozen=True)
class Architecture:
    """A model at a size: everything that decides the shapes of its parameters.

    Attributes:
        model: the sequence mixer, by the name of its facts.
        size: the name of the size.
        head_k_dim, head_v_dim: dimensions per head of keys (and queries) and of values.
        intermediate_size: width of the SwiGLU MLP.
        chunk_size: tokens per chunk of the recurrent kernel; None: the kernel's own default.
        recurrence_flops: of `model=fla`: of one token in one layer, where the facts have no `flops`; None: unknown.
        attention_windows: of `model=fla`: for each layer that is softmax attention instead of the model's own mixer,
            the latest tokens that it sees; None: all.
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
    recurrence_flops: int | None = field(default=None, kw_only=True)
    attention_windows: tuple[int | None, ...] = field(default=(), kw_only=True)

    @property
    def kind(self) -> str:
        """FLA's `model_type`."""
        return self.model

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
        return matched(self.model).parameters(self)

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one layer's SwiGLU MLP: gate, up and down projections."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def matrices(self) -> list[tuple[int, int]] | None:
        """The two sides of every matrix of all layers, which Muon trains; None: unknown."""
        if (mixer := facts_of(self.model).flops) is None:
            return None
        return self.num_layers * [*mixer.projections(self), *[(self.hidden_size, self.intermediate_size)] * 3]

    @property
    def linears(self) -> tuple[int, int]:
        """Weights of the linear layers of all mixers and of all MLPs. A token takes each weight once."""
        of_mlps = self.num_layers * self.mlp_parameters
        return sum(rows * columns for rows, columns in self.matrices or []) - of_mlps, of_mlps

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


def bare_architecture(model: str, size: SizeConfig, vocab_size: int) -> Architecture:
    """The architecture of a model at a size that gives it heads, before its MLP has a width."""
    heads = size.mixers[model]
    return Architecture(
        model=model,
        size=size.name,
        num_layers=size.num_layers,
        hidden_size=size.hidden_size,
        num_heads=heads.num_heads,
        head_k_dim=heads.head_k_dim,
        head_v_dim=heads.head_v_dim,
        intermediate_size=0,
        vocab_size=vocab_size,
        tie_embeddings=size.tie_embeddings,
        chunk_size=None,
    )


def chunk_length(arch: Architecture, seq_len: int) -> int:
    """Tokens per chunk (C) of the recurrent kernel."""
    return min(arch.chunk_size or DEFAULT_CHUNK, seq_len)


@dataclass(frozen=True)
class Matched:
    """How a model is built at a `size`, with the same depth, width and norms as the other matched models.

    Attributes:
        parameters: of one mixer. The width of a layer's MLP depends on them.
        settings: the heads as fields of FLA's configuration.
        check: raises ConfigError for heads that FLA's layer cannot express.
    """

    parameters: Callable[[Architecture], int]
    settings: Callable[[Architecture], dict[str, Any]]
    check: Callable[[Architecture], None] = lambda arch: None


@dataclass(frozen=True)
class MixerFlops:
    """FLOPs of one mixer's forward pass. Formulas for one token and head take (architecture, sequence length).

    Attributes:
        projections: (inputs, outputs) of every linear layer of one mixer, as FLA builds them.
        definition: products of the recurrence, or of attention over the causal pairs.
        usual: the same, counted as :mod:`linrnn.costs.flops` does for `mfu_6n`.
        kernel: products that FLA's chunked kernel or flash attention computes.
        kernel_again: products that the kernel's backward pass recomputes.
        recurrent: whether the kernel holds a K x V state for each chunk; attention has none.
    """

    projections: Callable[[Architecture], list[tuple[int, int]]]
    definition: Callable[[Architecture, int], int]
    usual: Callable[[Architecture, int], int]
    kernel: Callable[[Architecture, int], int]
    kernel_again: Callable[[Architecture, int], int]
    recurrent: bool = True


@dataclass(frozen=True)
class MixerMemory:
    """What one mixer saves for its backward pass on a GPU.

    Attributes:
        linears: number of linear layers that take the first norm's output, with full projections.
        gated: whether a gated norm follows the scan.
        scan: (architecture, sequence length, bytes per element in products) -> bytes per token that the recurrent
            kernel or attention saves.
    """

    linears: int
    gated: bool
    scan: Callable[[Architecture, int, int], int]


@dataclass(frozen=True)
class Chunks:
    """The kernel whose chunk size `model.chunk_size` sets.

    Attributes:
        module, name: where FLA's layer looks the kernel up.
        sizes: the chunk sizes that it takes.
        own: a version with the argument `chunk_size`, if FLA's has none.
        recurrent_tokens: at this many tokens or fewer FLA's layer uses a kernel without chunks.
    """

    module: str
    name: str
    sizes: tuple[int, ...]
    own: Callable[..., Any] | None = None
    recurrent_tokens: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """Everything that linrnn knows about one of FLA's models.

    Attributes:
        name: FLA's `model_type`.
        title: the name as people write it.
        matched: how it is built at a size; None: it has no `model=NAME` of its own and runs with `model=fla`.
        flops, memory: formulas of costs; None: unknown.
        keeps_fp32: whether FLA's kernels need some parameters in fp32. FSDP then gathers blocks in fp32 under autocast.
        chunks: the kernel whose chunk size can be set; None: it has none.
        cpu: plain-torch versions of the functions of its mixer; None: it needs a GPU.
        sized: for `model=fla`: settings of FLA's that follow from (width, heads), besides `num_heads` and `head_dim`.
        state: (heads, key dimension, value dimension) of the recurrence that `flops` describes, read from FLA's
            configuration. None for settings that `flops` does not describe. For `model=fla` and `init_from=`.
        recurrence: for `model=fla` without `flops`: FLOPs of the recurrence for one token in one layer, by the model's
            definition, from FLA's configuration. None for settings that it does not describe.
    """

    name: str
    title: str
    matched: Matched | None = None
    flops: MixerFlops | None = None
    memory: MixerMemory | None = None
    keeps_fp32: bool | None = None
    chunks: Chunks | None = None
    cpu: Replacements | None = None
    sized: Callable[[int, int], dict[str, Any]] = lambda width, heads: {}
    state: Callable[[Any], tuple[int, int, int] | None] = lambda fla: None
    recurrence: Callable[[Any], int | None] = lambda fla: None


FACTS: dict[str, ModelFacts] = {}


def register_model(facts: ModelFacts) -> ModelFacts:
    """Make a model known."""
    FACTS[facts.name] = facts
    return facts


def matched_models() -> tuple[str, ...]:
    """The models that can be built at a size, in the order in which they were registered."""
    return tuple(name for name, facts in FACTS.items() if facts.matched)


def matched(model: str) -> Matched:
    """How a model is built at a size.

    Raises:
        ConfigError: the model is not one of the matched models.
    """
    if model not in FACTS or (found := FACTS[model].matched) is None:
        raise ConfigError(f"model.name={model}: there is no such model", f"use one of {', '.join(matched_models())}")
    return found


def facts_of(model: str) -> ModelFacts:
    """The facts of a model; those of an unknown model are all unknown."""
    return FACTS.get(model) or ModelFacts(model, model)


def model_in_words(name: str, size: str = "", n_parameters: int | None = None) -> str:
    """A model's name as people write it, with the name of its size and the number of its parameters.

    Args:
        name: a model's label: its name, and options that change what it computes.
    """
    name, *options = name.split()
    words = " ".join([facts_of(name).title, *options, *size.split()])
    if not n_parameters:
        return words
    millions = n_parameters / 1e6
    count = f"{millions / 1e3:.2g} B" if millions >= 1000 else f"{millions:.{0 if millions >= 1 else 2}f} M"
    return f"{words} ({count} parameters)"
