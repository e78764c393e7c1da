"""What the rest of linrnn knows about a model: one `ModelFacts` for each, in `linrnn.models.zoo`.

What is not given is unknown. Costs then say *unknown*, and what needs the fact is refused. No model takes the formula
of another one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

FP32 = 4  # bytes
KEPT_IN_FP32 = ("A_log", "dt_bias")  # parameters that FLA's kernels always read in fp32: logarithms of decay rates
DEFAULT_CHUNK = 64  # tokens per chunk of FLA's kernels if `model.chunk_size` is null

# (module, name) where FLA looks a function up, and its version in plain torch.
Replacements = dict[tuple[str, str], Callable[..., Any]]


@dataclass(frozen=True)
class Architecture:
    """A model at a size: everything that decides the shapes of its parameters, and figures of the built modules.

    Heads, `intermediate_size` and `chunk_size` are those of a matched model.

    Attributes:
        model: the name of its facts; for `model=fla` another one, so that it takes no formula of a matched model.
        kind: FLA's `model_type`.
        size: the name of the size.
        head_k_dim, head_v_dim: dimensions per head of keys (and queries) and of values.
        intermediate_size: width of the SwiGLU MLP.
        chunk_size: tokens per chunk of the recurrent kernel; None: the kernel's own default.
        settings: JSON of the arguments of FLA's configuration.
        body_parameters: all but those of the embedding and the head.
        linears: weights of the linear layers of all mixers and of all MLPs. A token takes each weight once.
        matrices: (outputs, inputs) of every matrix of all layers, which Muon trains.
        recurrence_flops: of one token in one layer, by the model's definition; None: unknown.
        keeps_fp32: whether FLA's kernels need some parameters in fp32, whatever the dtype of all others. FSDP then
            gathers blocks in fp32 under autocast.
        attention_windows: for each layer that is softmax attention, the latest tokens that it sees; None: all.
    """

    model: str
    kind: str
    size: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    tie_embeddings: bool
    num_heads: int = 0
    head_k_dim: int = 0
    head_v_dim: int = 0
    intermediate_size: int = 0
    chunk_size: int | None = None
    settings: str = ""
    body_parameters: int = 0
    linears: tuple[int, int] = (0, 0)
    matrices: tuple[tuple[int, int], ...] = ()
    recurrence_flops: int | None = None
    keeps_fp32: bool = False
    attention_windows: tuple[int | None, ...] = ()

    @property
    def matched(self) -> bool:
        """Whether the model was built at a size, with the formulas of its facts."""
        return self.model == self.kind

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
        """Parameters of one layer's mixer in a matched model, including its inner norm, gates and convolutions."""
        layers_and_norms = self.body_parameters - self.hidden_size  # without the final norm
        return layers_and_norms // self.num_layers - self.mlp_parameters - 2 * self.hidden_size

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one layer's SwiGLU MLP: gate, up and down projections."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding. An untied output head has as many again."""
        return self.vocab_size * self.hidden_size

    @property
    def n_parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        return self.body_parameters + self.embedding_parameters * (1 if self.tie_embeddings else 2)


def chunk_length(arch: Architecture, seq_len: int) -> int:
    """Tokens per chunk (C) of the recurrent kernel."""
    return min(arch.chunk_size or DEFAULT_CHUNK, seq_len)


class Mixer:
    """How a matched model is built at a `size`, with the depth, width and norms of the other ones, and its memory.

    Attributes:
        linears: number of linear layers that take the first norm's output; None: memory is unknown.
        gated: whether a gated norm follows the scan.
    """

    linears: ClassVar[int | None] = None
    gated: ClassVar[bool] = False

    def settings(self, arch: Architecture) -> dict[str, Any]:
        """The heads as fields of FLA's configuration."""
        return {"num_heads": arch.num_heads}

    def check(self, arch: Architecture) -> None:
        """Raise ConfigError for heads that FLA's layer cannot express."""

    def saved(self, arch: Architecture, seq_len: int, compute: int) -> int:
        """Bytes per token that the recurrent kernel or attention saves on a GPU; a product's element has `compute`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Chunks:
    """The kernel whose chunk size `model.chunk_size` sets.

    Attributes:
        module, name: where FLA's layer looks the kernel up.
        sizes: the chunk sizes that it takes.
        own: a version with the argument `chunk_size`, if FLA's has none.
    """

    module: str
    name: str
    sizes: tuple[int, ...]
    own: Callable[..., Any] | None = None


@dataclass(frozen=True)
class ModelFacts:
    """Everything that linrnn knows about one of FLA's models.

    Attributes:
        name: FLA's `model_type`.
        title: the name as people write it.
        mixer: how it is built at a size; None: it has no `model=NAME` of its own and runs with `model=fla`.
        chunks: the kernel whose chunk size can be set; None: it has none.
        cpu: plain-torch versions of the functions of its mixer; None: it needs a GPU.
        sized: for `model=fla`: settings of FLA's that follow from (width, heads), besides `num_heads` and `head_dim`.
        recurrence: FLOPs of the recurrence for one token in one layer, by the model's definition, from FLA's
            configuration. None for settings that it does not describe.
    """

    name: str
    title: str
    mixer: Mixer | None = None
    chunks: Chunks | None = None
    cpu: Replacements | None = None
    sized: Callable[[int, int], dict[str, Any]] = lambda width, heads: {}
    recurrence: Callable[[Any], int | None] = lambda fla: None


FACTS: dict[str, ModelFacts] = {}


def register_model(facts: ModelFacts) -> None:
    """Make a model known."""
    FACTS[facts.name] = facts


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
