"""What a run reads, and whether the files are here. Nothing is read, and the hub is not asked."""

import re
from pathlib import Path

from linrnn.config.schema import Config, HubDataConfig, TextDataConfig
from linrnn.core.errors import DataError
from linrnn.data.readers import find_files

DATA_OF_HUB = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # NAME or OWNER/NAME
MODEL_OF_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # OWNER/NAME, as of every model in FLA's format


def missing_inputs(config: Config, *, resumes: bool = False) -> list[DataError]:
    """The errors that the run would raise because text or weights are not on this machine.

    A tokenizer is not among them: without it no memory can be foreseen, so a sweep is refused.

    Args:
        resumes: the run has a checkpoint of its own, so that it does not read `continue_from`.
    """
    return [*_missing_text(config), *_missing_weights(config, resumes)]


def inputs_of_hub(config: Config) -> list[str]:
    """The data set and the model that the run may load from the Hugging Face hub, by their names there."""
    data, weights = config.data, config.init_from
    names = [data.path] if isinstance(data, HubDataConfig) and _data_may_be_on_hub(data.path) else []
    return names + ([weights] if weights and _weights_may_be_on_hub(weights) else [])


def _data_may_be_on_hub(path: str) -> bool:
    return not Path(path).expanduser().is_dir() and DATA_OF_HUB.fullmatch(path) is not None


def _weights_may_be_on_hub(source: str) -> bool:
    """Whether `source` is no path here: neither the directory nor its parent exists."""
    return not Path(source).is_dir() and MODEL_OF_HUB.fullmatch(source) is not None and not Path(source).parent.is_dir()


def _missing_text(config: Config) -> list[DataError]:
    data = config.data
    if isinstance(data, TextDataConfig):
        paths = {"data.path": data.path, "data.valid_path": data.valid_path}
        return [error for key, path in paths.items() if path is not None and (error := _not_found(path, key))]
    if isinstance(data, HubDataConfig) and not (
        Path(data.path).expanduser().is_dir() or _data_may_be_on_hub(data.path)
    ):
        remedy = "give a local copy of the data set, or its name on the hub, in data.path"
        return [DataError(f"data.path={data.path} is no directory", remedy)]
    return []


def _not_found(path: str, key: str) -> DataError | None:
    try:
        find_files(path, key)
    except DataError as error:
        return DataError(error.cause, f"{error.remedy} (docs/data.md), or use data=stdlib, which needs no file")
    return None


def _missing_weights(config: Config, resumes: bool) -> list[DataError]:
    sources = {"init_from": config.init_from, "continue_from": None if resumes else config.continue_from}
    return [
        DataError(f"{key}={source} is no directory", f"name the directory of a run in {key}; train.py makes one")
        for key, source in sources.items()
        if source and not Path(source).is_dir() and not (key == "init_from" and _weights_may_be_on_hub(source))
    ]
