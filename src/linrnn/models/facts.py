"""What the rest of linrnn knows about a model: one `ModelFacts` for each, in `linrnn.models.zoo`.

What is not given is unknown. Costs then say *unknown*, and what needs the fact is refused. No model takes the formula
of another one.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from linrnn.config.schema import SizeConfig
from linrnn.core.errors import ConfigError

FP32 = 4  # bytes
DEFAULT_CHUNK = 64  # tokens per chunk of FLA's kernels if `model.chunk_size` is null

# (module, name) where FLA looks a function up, and its version in plain torch.
Replacements = dict[tuple[str, str], Callable[..., Any]]


@dataclass(frozen=True)
class Architecture:
    """A model at a size: everything that decides the shapes of its parameters, and what follows from them.

    The first seven are known for every model, those with a default of zero for a matched model alone.

    Attributes:
        model: the name of its facts; for `model=fla` another one, so that it takes no formula of a matched model.
        kind: FLA's `model_type`.
        size: the name of the size.
        head_k_dim, head_v_dim: dimensions per head of keys (and queries) and of values.
        intermediate_size: width of the SwiGLU MLP.
        chunk_size: tokens per chunk of the recurrent kernel; None: the kernel's own default.
        mixer_parameters: of one layer's mixer, including its inner norm, gates and convolutions.
        settings: JSON of the arguments of FLA's configuration.
        body_parameters: all but those of the embedding and the head.
        linears: weights of the linear layers of all mixers and of all MLPs. A token takes each weight once.
        matrices: the two sides of every matrix of all layers, which Muon trains.
        recurrence_flops: of one token in one layer, by the model's definition; None: unknown.
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
    mixer_parameters: int = 0
    settings: str = ""
    body_parameters: int = 0
    linears: tuple[int, int] = (0, 0)
    matrices: tuple[tuple[int, int], ...] = ()
    recurrence_flops: int | None = None
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


def bare_architecture(model: str, size: SizeConfig, vocab_size: int, chunk_size: int | None = None) -> Architecture:
    """A matched model at a size that gives it heads, before its MLP has a width."""
    heads = size.mixers[model]
    return Architecture(
        model=model,
        kind=model,
        size=size.name,
        num_layers=size.num_layers,
        hidden_size=size.hidden_size,
        vocab_size=vocab_size,
        tie_embeddings=size.tie_embeddings,
        num_heads=heads.num_heads,
        head_k_dim=heads.head_k_dim,
        head_v_dim=heads.head_v_dim,
        chunk_size=chunk_size,
    )


def completed(bare: Architecture) -> Architecture:
    """A matched model with the figures and settings that follow from its dimensions."""
    mixer, layers, d, width = matched(bare.model), bare.num_layers, bare.hidden_size, bare.intermediate_size
    projections, parameters = mixer.projections(bare), mixer.parameters(bare)
    recurrence = mixer.products and mixer.products * bare.num_heads * bare.head_k_dim * bare.head_v_dim
    settings = {
        "hidden_size": d,
        "num_hidden_layers": layers,
        "intermediate_size": width,
        "vocab_size": bare.vocab_size,
        "tie_word_embeddings": bare.tie_embeddings,
        "use_cache": False,
        **mixer.settings(bare),
    }
    return replace(
        bare,
        mixer_parameters=parameters,
        settings=json.dumps(settings, sort_keys=True),
        body_parameters=layers * (parameters + bare.mlp_parameters + 2 * d) + d,  # two norms per layer, a final one
        linears=(layers * entries(projections), layers * bare.mlp_parameters),
        matrices=(*projections, *[(d, width)] * 3) * layers,
        recurrence_flops=recurrence,
        attention_windows=(None,) * layers if mixer.attention else (),
    )


def entries(matrices: list[tuple[int, int]]) -> int:
    """The entries of all matrices."""
    return sum(rows * columns for rows, columns in matrices)


def chunk_length(arch: Architecture, seq_len: int) -> int:
    """Tokens per chunk (C) of the recurrent kernel."""
    return min(arch.chunk_size or DEFAULT_CHUNK, seq_len)


class Mixer:
    """Formulas of a matched model, which is built at a `size` with the depth, width and norms of the other ones.

    FLOPs are those of the forward pass for one token and one head, in a sequence of T tokens.

    Attributes:
        products: FLOPs of the recurrence by its definition, for each entry of a K x V state; None: unknown.
        attention: whether it is softmax attention, which has no recurrence.
        linears: number of linear layers that take the first norm's output; None: memory is unknown.
        gated: whether a gated norm follows the scan.
        keeps_fp32: whether FLA's kernels need some parameters in fp32. FSDP then gathers blocks in fp32 under autocast.
            None: unknown.
    """

    products: ClassVar[int | None] = None
    attention: ClassVar[bool] = False
    linears: ClassVar[int | None] = None
    gated: ClassVar[bool] = False
    keeps_fp32: ClassVar[bool | None] = None

    def projections(self, arch: Architecture) -> list[tuple[int, int]]:
        """(inputs, outputs) of every linear layer of one mixer: queries, keys, values, output, and further ones."""
        d, keys, values = arch.hidden_size, arch.key_dim, arch.value_dim
        return [(d, keys), (d, keys), (d, values), (values, d)]

    def others(self, arch: Architecture) -> int:
        """Parameters of one mixer beside its projections."""
        return 0

    def parameters(self, arch: Architecture) -> int:
        """Parameters of one mixer. The width of a layer's MLP depends on them."""
        return entries(self.projections(arch)) + self.others(arch)

    def settings(self, arch: Architecture) -> dict[str, Any]:
        """The heads as fields of FLA's configuration."""
        return {"num_heads": arch.num_heads}

    def check(self, arch: Architecture) -> None:
        """Raise ConfigError for heads that FLA's layer cannot express."""

    def kernel(self, arch: Architecture, seq_len: int) -> int:
        """FLOPs of the products that FLA's chunked kernel or flash attention computes."""
        raise NotImplementedError

    def kernel_again(self, arch: Architecture, seq_len: int) -> int:
        """FLOPs of the products that the kernel's backward pass recomputes."""
        raise NotImplementedError

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
        recurrence: for `model=fla`: FLOPs of the recurrence for one token in one layer, by the model's definition, from
            FLA's configuration. None for settings that it does not describe.
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


def matched_models() -> tuple[str, ...]:
    """The models that can be built at a size, in the order in which they were registered."""
    return tuple(name for name, facts in FACTS.items() if facts.mixer)


def matched(model: str) -> Mixer:
    """The formulas of a matched model.

    Raises:
        ConfigError: the model is not one of the matched models.
    """
    if model not in FACTS or (found := FACTS[model].mixer) is None:
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
