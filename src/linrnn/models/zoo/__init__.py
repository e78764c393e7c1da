"""One file for each model with its facts. Importing this package makes all of them known."""

from linrnn.models.zoo import gla, gated_deltanet, kda, transformer  # noqa: F401, I001 (the order of the tables)
from linrnn.models.zoo import delta_net, recurrences  # noqa: F401 (with model=fla)
