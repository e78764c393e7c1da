"""Load a model in FLA's Hugging Face format, from a directory or the hub. Only safetensors are read.

The weights are those that transformers would read: `model.safetensors`, else the shards that
`model.safetensors.index.json` lists. Other files beside them (a backup, older shards, an adapter) are left alone.
"""

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from linrnn.config.fla import fla_models
from linrnn.core.checksums import check_checksums
from linrnn.core.errors import ConfigError, DataError, first_line
from linrnn.core.files import read_object
from linrnn.models import cpu_ops
from linrnn.models.architecture import Architecture
from linrnn.models.attention import with_sdpa
from linrnn.models.build import WHOLE, RowShard, copy_rows, own_rows
from linrnn.models.fla_import import fla_classes
from linrnn.models.language_model import LanguageModel

# The files to download from the hub.
FILES = ["config.json", "*.safetensors", "*.index.json", "tokenizer.json", "tokenizer_config.json"]
FILES += ["special_tokens_map.json"]
DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}  # those of weights that need no scales
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
AGAIN = "copy the directory again, or save the model again with save_pretrained"
# Settings that change nothing that a model computes here.
FREE = {
    *("attn_mode", "bos_token_id", "eos_token_id", "pad_token_id", "fuse_cross_entropy", "fuse_linear_cross_entropy"),
    *("fuse_norm", "fuse_swiglu", "initializer_range", "max_position_embeddings", "use_cache", "use_l2warp"),
}


def find_pretrained(source: str) -> Path:
    """The directory of a Hugging Face model: `source` itself, or a local copy of the hub's model of this name.

    Raises:
        DataError: there is neither.
    """
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(
            f"init_from={source}: no such directory, and the hub gave nothing ({first_line(error)})",
            "name the directory of a run, a directory with config.json and *.safetensors, or a model of the hub",
        ) from error


def pretrained_vocab_size(directory: Path, source: str) -> int:
    """The vocabulary size of the model in `directory`.

    Raises:
        DataError: its config.json cannot be read.
        ConfigError: flash-linear-attention has no such model.
    """
    settings = read_object(directory / "config.json", remedy=AGAIN)
    return int(_classes(directory, settings)[1].from_dict(settings).vocab_size)


def load_weights(model: LanguageModel, directory: Path, source: str, row_shard: RowShard = WHOLE) -> None:
    """Copy the weights of a Hugging Face model into `model`, in the dtype and on the device of `model`.

    Args:
        directory: of the model's files; see :func:`find_pretrained`.
        source: the value of `init_from`, for messages.
        row_shard: the rows of each parameter that `model` holds.

    Raises:
        DataError: the weights are not whole: see :func:`_read`.
        ConfigError: the architectures differ. The remedy names the overrides that give this one.
    """
    check_checksums(directory)
    _check_config(directory, source, model.arch, model.hf.config)
    expected = model.hf.state_dict()
    for name, tensor in _read(directory, f"init_from={source}", expected, model.arch.tie_embeddings).items():
        copy_rows(expected[name], tensor, row_shard)


def open_pretrained(directory: Path, device: torch.device) -> Any:
    """The causal language model in `directory`, in fp32. No code from the directory is run.

    Raises:
        ConfigError: flash-linear-attention has no such model.
        UnsupportedError: the model has no CPU form, and `device` is a CPU.
        DataError: the weights are not whole (:func:`_read`), or a file differs from its checksum.
    """
    check_checksums(directory)
    settings = read_object(directory / "config.json", remedy=AGAIN)
    fla_class, config_class = _classes(directory, settings)
    cpu_ops.prepare(settings["model_type"], device)
    model_class = with_sdpa(fla_class)
    from transformers import GenerationConfig

    try:
        config = config_class.from_pretrained(directory, local_files_only=True)
        with torch.device("meta"):
            expected = model_class(config).state_dict()
        weights = _read(directory, str(directory), expected, config.tie_word_embeddings)
        model = model_class.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32)
        if (directory / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"{directory} cannot be loaded ({first_line(error)})", AGAIN) from error
    return model.to(device)


def check_finite(weights: dict[str, Tensor], source: str) -> None:
    """Raise a DataError for weights, or this rank's parts of them, that hold NaN or infinity."""
    for name, tensor in weights.items():
        if not own_rows(tensor).isfinite().all():
            raise DataError(f"{source}: {name} holds NaN or infinity", "name weights from before they came in")


def check_dimensions(given: str, there: Architecture, here: Architecture) -> None:
    """Check that the weights of `there` fit a model of `here`.

    Only names and shapes of the parameters tell whether FLA's other models agree.

    Args:
        given: the key that names the weights with its value, for messages.

    Raises:
        ConfigError: model or dimensions differ.
    """
    if there.kind != here.kind:
        raise _other_model(given, there.kind, here, fla=not there.matched)
    if not (there.matched and here.matched):
        return
    theirs, ours = json.loads(there.settings), json.loads(here.settings)
    if differing := [f"{name}={value}, here {ours[name]}" for name, value in theirs.items() if value != ours[name]]:
        raise ConfigError(
            f"{given}: the dimensions differ from size={here.size} ({', '.join(differing)})",
            f"use size={there.size} and the keys of size in the config.yaml of these weights",
        )


def _other_model(given: str, kind: str, arch: Architecture, *, fla: bool = False) -> ConfigError:
    return ConfigError(
        f"{given}: it is a {kind} and this run has model={arch.model}",
        f"use {f'model=fla model.config={kind}' if fla else f'model={kind}'}, or another {given.partition('=')[0]}",
    )


def _read(directory: Path, source: str, expected: dict[str, Tensor], tied: bool) -> dict[str, Tensor]:
    """The weights in `directory`, mapped from its files, once they are known to be those of the model, and whole.

    Args:
        source: what the user named, for messages.
        expected: the model's state, whose names and shapes the weights must have.
        tied: whether embeddings and head are one tensor, which may then be stored under either name, or under both.

    Raises:
        DataError: a file or a tensor is missing, surplus or damaged, has another shape, is quantised, or holds NaN
            or infinity.
    """
    weights: dict[str, Tensor] = {}
    for name, listed in _files(directory, source).items():
        try:
            with safe_open(directory / name, framework="pt") as file:
                weights |= {key: file.get_tensor(key) for key in listed or file.keys()}
        except (SafetensorError, OSError) as error:
            raise DataError(f"{source}: {name} cannot be read ({error})", AGAIN) from error
    ends = {name for name in expected if tied and name.endswith(("lm_head.weight", ".embeddings.weight"))}
    if surplus := sorted(weights.keys() - expected.keys()):
        raise DataError(f"{source} holds {surplus[0]}, which its config.json has no place for", AGAIN)
    if missing := sorted(expected.keys() - weights.keys() - (ends if ends & weights.keys() else set())):
        raise DataError(f"{source} lacks {missing[0]}", AGAIN)
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{tuple(tensor.shape)} there and {tuple(expected[name].shape)} by its config.json"
            raise DataError(f"{source}: {name} is {shapes}", AGAIN)
        if expected[name].is_floating_point() and tensor.dtype not in DTYPES:
            raise DataError(f"{source}: {name} is {tensor.dtype}", "save the model in fp32, bf16 or fp16")
    check_finite(weights, source)
    both = [weights[name] for name in ends & weights.keys()]
    if len(both) == 2 and not torch.equal(*both):
        raise DataError(f"{source}: {' and '.join(sorted(ends))} are tied, and differ", AGAIN)
    return weights


def _files(directory: Path, source: str) -> dict[str, list[str]]:
    """The files of the weights, each with the tensors that the index lists for it (none without an index: all)."""
    if (directory / WEIGHTS).is_file():
        return {WEIGHTS: []}
    if not (directory / INDEX).is_file():
        pickled = ", ".join(sorted(path.name for path in directory.glob("*.bin")))
        raise DataError(
            f"{source}: {directory} holds neither {WEIGHTS} nor {INDEX}"
            + (f", but {pickled}, which is pickled and not read" if pickled else ""),
            "save the model with save_pretrained, which writes them",
        )
    index = read_object(directory / INDEX, ("weight_map",), AGAIN)["weight_map"]
    files: dict[str, list[str]] = {}
    try:
        for name, file in index.items():
            files.setdefault(Path(file).name, []).append(name)
    except (AttributeError, TypeError) as error:
        raise DataError(f"{source}: {INDEX} has no weight_map from tensors to files", AGAIN) from error
    return files


def _check_config(directory: Path, source: str, arch: Architecture, ours: Any) -> None:
    """Compare config.json with the architecture of `arch`, and with `ours`, FLA's configuration of it."""
    settings = read_object(directory / "config.json", remedy=AGAIN)
    if settings.get("model_type") != arch.kind:
        raise _other_model(f"init_from={source}", str(settings.get("model_type")), arch)
    theirs = type(ours).from_dict(settings)
    for name in sorted(inspect.signature(type(ours)).parameters.keys() - FREE):
        if (given := getattr(theirs, name, None)) != (wanted := getattr(ours, name, None)):
            raise ConfigError(
                f"init_from={source}: it has {name}={given}, and this run has {name}={wanted}",
                f"use model=fla model.config={source}, whose config.json has all fields",
            )


def _classes(directory: Path, settings: dict[str, Any]) -> tuple[Any, Any]:
    """FLA's classes of the model and its configuration that config.json names."""
    if settings.get("model_type") not in fla_models():
        raise ConfigError(f"{directory} holds a {settings.get('model_type')}", f"name one of {', '.join(fla_models())}")
    return fla_classes(settings["model_type"])
