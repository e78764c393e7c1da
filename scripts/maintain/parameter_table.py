"""Print the table that docs/study/appendix/i_sizes.md holds between its markers `sizes`."""

from linrnn.config import load_config
from linrnn.config.schema import MarkovDataConfig, SizeConfig
from linrnn.core.tables import Table
from linrnn.models.architecture import MODELS, resolve

SIZES = ("smoke", "mve", "350m", "1b3")


def main() -> None:
    sizes = [load_config([f"size={name}"]).size for name in SIZES]
    data = load_config(["data=markov"]).data
    assert isinstance(data, MarkovDataConfig)
    print(parameters(sizes, data.vocab_size))


def parameters(sizes: list[SizeConfig], vocab_size: int) -> str:
    """Every model at every size. Sizes that take their vocabulary from the data get `vocab_size`."""
    columns = "size, model, layers, width, heads, key dim, value dim, MLP width, body, vocabulary, tied, untied"
    rows = []
    for size in sizes:
        for name in MODELS:
            arch = resolve(load_config([f"model={name}"]).model, size, size.vocab_size or vocab_size)
            tied = arch.body_parameters + arch.embedding_parameters
            totals = (tied, tied + arch.embedding_parameters)
            heads = arch.num_layers, arch.hidden_size, arch.num_heads, arch.head_k_dim, arch.head_v_dim
            parts = arch.intermediate_size, millions(arch.body_parameters), f"{arch.vocab_size:,}"
            marked = (f"**{millions(n)}**" if n == arch.n_parameters else millions(n) for n in totals)
            rows.append((size.name, name, *heads, *parts, *marked))
    return "\n".join(Table(columns.split(", "), rows, words=("size", "model")).markdown())


def millions(n: int) -> str:
    return f"{n / 1e6:,.2f} M" if n < 1e8 else f"{n / 1e6:,.0f} M"


if __name__ == "__main__":
    main()
