"""Print the tables that docs/develop/sizes.md holds between its markers `sizes` and `shared projections`."""

from linrnn.config import load_config
from linrnn.config.cli import run_plain
from linrnn.config.schema import MarkovDataConfig
from linrnn.models.architecture import MODELS, parameter_table, shared_projection_table

SIZES = ("smoke", "mve", "350m", "1b3")
LARGE = ("350m", "1b3")  # the sizes of the second table


def main() -> None:
    models = [load_config([f"model={name}"]).model for name in MODELS]
    sizes = [load_config([f"size={name}"]).size for name in SIZES]
    data = load_config(["data=markov"]).data
    assert isinstance(data, MarkovDataConfig)
    print(parameter_table(models, sizes, data.vocab_size), end="\n\n")
    print(shared_projection_table([size for size in sizes if size.name in LARGE]))


if __name__ == "__main__":
    run_plain(main, __doc__ or "")
