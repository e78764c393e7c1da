"""What a run reads, and whether the files are here. Nothing is read, and the hub is not asked."""

import re
from pathlib import Path

from linrnn.config.schema import Config, HubDataConfig, TextDataConfig
from linrnn.core.errors import DataError
from linrnn.data.readers import find_files

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # of a data set: NAME or OWNER/NAME


def missing_inputs(config: Config) -> list[DataError]:
    """The errors that the run would raise because text or weights are not on this machine."""
    return [*_missing_text(config), *_missing_weights(config)]


def data_of_hub(config: Config) -> str | None:
    """The data set that the run loads from the Hugging Face hub; None if the run needs no hub."""
    data = config.data
    if not isinstance(data, HubDataConfig) or Path(data.path).expanduser().is_dir():
        return None
    return data.path if HUB_NAME.fullmatch(data.path) else None


def _missing_text(config: Config) -> list[DataError]:
    data = config.data
    if isinstance(data, TextDataConfig):
        paths = {"data.path": data.path, "data.valid_path": data.valid_path}
        return [error for key, path in paths.items() if path is not None and (error := _not_found(path, key))]
    if isinstance(data, HubDataConfig) and not (Path(data.path).expanduser().is_dir() or HUB_NAME.fullmatch(data.path)):
        remedy = "give a local copy of the data set, or its name on the hub, in data.path"
        return [DataError(f"data.path={data.path} is no directory", remedy)]
    return []


def _not_found(path: str, key: str) -> DataError | None:
    try:
        find_files(path, key)
    except DataError as error:
        return DataError(error.cause, f"{error.remedy} (docs/data.md), or use data=stdlib, which needs no file")
    return None


def _missing_weights(config: Config) -> list[DataError]:
    sources = {"init_from": config.init_from, "continue_from": config.continue_from}
    return [
        DataError(f"{key}={source} is no directory", f"name the directory of a run in {key}; train.py makes one")
        for key, source in sources.items()
        if source and not Path(source).is_dir()
    ]
