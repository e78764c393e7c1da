"""The typed configuration: its types and bounds, its composition, the command line, and names of runs."""

from linrnn.config.compose import CONFIG_DIR, data_for, load_config, nearest, overrides_of, read_config, to_yaml
from linrnn.config.naming import identity, operational_settings, place_of, run_name
from linrnn.config.overrides import last_of_each
from linrnn.config.schema import Config

__all__ = [
    "CONFIG_DIR", "Config", "data_for", "identity", "last_of_each", "load_config", "nearest", "operational_settings",
    "overrides_of", "place_of", "read_config", "run_name", "to_yaml",
]  # fmt: skip
