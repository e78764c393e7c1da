"""The typed configuration: its types and bounds, its composition, the command line, and names of runs."""

from linrnn.config.compose import CONFIG_DIR, data_for, load_config, nearest, overrides_of, read_config, to_yaml
from linrnn.config.naming import identity, place_of, run_name, settings
from linrnn.config.overrides import last_of_each
from linrnn.config.schema import Config

__all__ = [
    "CONFIG_DIR", "Config", "data_for", "identity", "last_of_each", "load_config", "nearest", "overrides_of",
    "place_of", "read_config", "run_name", "settings", "to_yaml",
]  # fmt: skip
