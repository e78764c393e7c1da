"""`init_from=`: load a model in FLA's Hugging Face format, from a directory or the hub. Only safetensors are read."""

import inspect
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from linrnn.config.fla.names import fla_models
from linrnn.core.checksums import check_checksums
from linrnn.core.errors import ConfigError, DataError, first_line
from linrnn.models.architecture import Architecture
from linrnn.models.deferred.part import WHOLE, Part, keep
from linrnn.models.facts import matched
from linrnn.models.fla_any import FlaArchitecture
from linrnn.models.fla_import import fla_classes
from linrnn.models.language_model import LanguageModel

# The files to download from the hub.
FILES = ["config.json", "*.safetensors", "*.index.json", "tokenizer.json", "tokenizer_config.json"]
# Settings that change nothing that a model computes here.
FREE = {
    *("attn_mode", "bos_token_id", "eos_token_id", "pad_token_id", "fuse_cross_entropy", "fuse_linear_cross_entropy"),
    *("fuse_norm", "fuse_swiglu", "initializer_range", "use_cache", "use_l2warp"),
}
# FREE, settings that change no matched model, and settings that `_overrides` compares.
NOT_COMPARED = FREE | {
    *("expand_k", "expand_v", "head_dim", "hidden_ratio", "hidden_size", "intermediate_size", "num_heads"),
    *("num_hidden_layers", "tie_word_embeddings", "vocab_size", "max_position_embeddings", "use_gk", "use_gv"),
}


def find_pretrained(source: str) -> Path:
    """The directory of a Hugging Face model: `source` itself, or a local copy of the hub's model of this name.

    Raises:
        DataError: there is neither.
    """
    return Path(source) if Path(source).is_dir() else _download(source)


def pretrained_vocab_size(directory: Path, source: str) -> int:
    """Number of vocabulary entries of the model in `directory`.

    Raises:
        DataError: its config.json cannot be read.
        ConfigError: flash-linear-attention has no such model.
    """
    settings = _settings(directory, source)
    if settings.get("model_type") not in fla_models():
        raise ConfigError(f"{directory} holds a {settings.get('model_type')}", f"name one of {', '.join(fla_models())}")
    return int(fla_classes(settings["model_type"])[1].from_dict(settings).vocab_size)


def load_weights(model: LanguageModel, directory: Path, source: str, part: Part = WHOLE) -> None:
    """Copy the weights of a Hugging Face model into `model`, in the dtype and on the device of `model`.

    Args:
        directory: of the model's files; see :func:`find_pretrained`.
        source: the value of `init_from`, for messages.
        part: the rows of each parameter that `model` holds.

    Raises:
        DataError: `directory` has no safetensors, or a file is damaged.
        ConfigError: the architectures differ. The remedy names the overrides that give this one.
    """
    check_checksums(directory)
    _check_config(directory, source, model.arch, model.hf.config)
    expected = model.hf.state_dict()
    found: set[str] = set()
    for name, tensor in _tensors(directory, source):
        if name not in expected:
            raise ConfigError(f"init_from={source}: this model has no parameter {name}", _same_size(model.arch))
        there, here = tuple(tensor.shape), tuple(expected[name].shape)
        if there != here:
            raise ConfigError(
                f"init_from={source}: {name} is {there} there and {here} here",
                _same_size(model.arch),
            )
        keep(expected[name], tensor, part)
        found.add(name)
    embedding = next(name for name in expected if name.endswith(".embeddings.weight"))
    tied = {"lm_head.weight", embedding} if model.arch.tie_embeddings else set()
    missing = expected.keys() - found - (tied if tied & found else set())
    if missing:
        raise ConfigError(f"init_from={source}: {sorted(missing)[0]} is not there", _same_size(model.arch))


def check_dimensions(source: str, there: Architecture, here: Architecture) -> None:
    """Check that the weights of `there` fit a model of `here`.

    Only names and shapes of the parameters tell whether FLA's other models agree, or models with shared projections.

    Args:
        source: the value of `init_from`, for messages.

    Raises:
        ConfigError: model or dimensions differ. The remedy names the overrides that make them equal.
    """
    if there.kind != here.kind:
        raise _other_model(source, there.kind, here, fla=isinstance(there, FlaArchitecture))
    if isinstance(there, FlaArchitecture) or isinstance(here, FlaArchitecture):
        return
    if there.shared_projection_rank != here.shared_projection_rank:
        return
    if overrides := _overrides(there, here):
        raise ConfigError(
            f"init_from={source}: the dimensions differ from size={here.size}", f"add {' '.join(overrides)}"
        )


def _other_model(source: str, kind: str, arch: Architecture, *, fla: bool = False) -> ConfigError:
    return ConfigError(
        f"init_from={source}: it is a {kind} and this run has model={arch.model}",
        f"use {f'model=fla model.config={kind}' if fla else f'model={kind}'}, or another init_from",
    )


def _same_size(arch: Architecture) -> str:
    return f"use the dimensions that it was trained with instead of size={arch.size}"


def _download(name: str) -> Path:
    """The local copy of the hub's files."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(
            f"init_from={name}: no such directory, and the hub gave nothing ({first_line(error)})",
            "name the directory of a run, a directory with config.json and *.safetensors, or a model of the hub",
        ) from error


def _tensors(directory: Path, source: str) -> Iterator[tuple[str, Tensor]]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise DataError(
            f"init_from={source}: {directory} holds no *.safetensors",
            "save the model with save_pretrained; pickled weights are not read",
        )
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise DataError(f"init_from={source}: {path.name} cannot be read ({error})", "copy it again") from error


def _check_config(directory: Path, source: str, arch: Architecture, ours: Any) -> None:
    """Compare config.json with the architecture of `arch`."""
    settings = _settings(directory, source)
    if settings.get("model_type") != arch.kind:
        raise _other_model(source, str(settings.get("model_type")), arch)
    config_class = fla_classes(arch.kind)[1]
    theirs = config_class.from_dict(settings)
    if isinstance(arch, FlaArchitecture):
        _compare_all(theirs, ours, source)
        return
    if arch.shared_projection_rank is not None:
        raise ConfigError(
            f"init_from={source}: FLA's format has no shared projections, and this run has "
            f"model.shared_projection_rank={arch.shared_projection_rank}",
            "use model.shared_projection_rank=null, or init_from= a run of this rank",
        )
    if getattr(theirs, "attn", None):
        raise ConfigError(
            f"init_from={source}: it is a hybrid with attention layers, and model={arch.model} has none",
            f"use model=fla model.config={source}, whose config.json has all fields",
        )
    check_dimensions(source, _as_architecture(theirs, arch), arch)
    for name in inspect.signature(config_class).parameters.keys() - NOT_COMPARED:
        there, here = (getattr(config, name, None) for config in (theirs, ours))
        if name in ("num_kv_heads", "num_v_heads"):
            there, here = (value or arch.num_heads for value in (there, here))
        if there != here:
            raise ConfigError(
                f"init_from={source}: it has {name}={there}, and models here have {name}={here}",
                f"start from a {arch.model} with {name}={here}",
            )


def _compare_all(theirs: Any, ours: Any, source: str) -> None:
    """For `model=fla`: every field of FLA's configuration must agree, but those that change no result."""
    for name in inspect.signature(type(ours)).parameters.keys() - FREE:
        there, here = getattr(theirs, name, None), getattr(ours, name, None)
        if there != here:
            raise ConfigError(
                f"init_from={source}: it has {name}={there}, and this run has {name}={here}",
                f"use model.config={source}, whose config.json has all fields",
            )


def _settings(directory: Path, source: str) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"init_from={source}: {directory}/config.json cannot be read",
            "save the model with save_pretrained",
        ) from error
    return settings


def _as_architecture(theirs: Any, arch: Architecture) -> Architecture:
    """FLA's configuration `theirs`, which is of the model of `arch`, as an architecture."""
    k_dim, v_dim = matched(arch.model).head_dims(theirs)
    d = theirs.hidden_size
    return replace(
        arch,
        hidden_size=d,
        num_layers=theirs.num_hidden_layers,
        num_heads=theirs.num_heads,
        head_k_dim=k_dim,
        head_v_dim=v_dim,
        intermediate_size=theirs.intermediate_size or 256 * -(-int(d * (theirs.hidden_ratio or 4) * 2 / 3) // 256),
        vocab_size=theirs.vocab_size,
        tie_embeddings=theirs.tie_word_embeddings,
    )


def _overrides(there: Architecture, here: Architecture) -> list[str]:
    """The overrides that turn the dimensions of `here` into those of `there`."""
    mixer = f"size.mixers.{here.model}"
    keys = {
        "size.hidden_size": "hidden_size",
        "size.num_layers": "num_layers",
        f"{mixer}.num_heads": "num_heads",
        f"{mixer}.head_k_dim": "head_k_dim",
        f"{mixer}.head_v_dim": "head_v_dim",
        "size.vocab_size": "vocab_size",
        "size.tie_embeddings": "tie_embeddings",
    }
    pairs = {key: (getattr(there, name), getattr(here, name)) for key, name in keys.items()}
    overrides = [f"{key}={str(wanted).lower()}" for key, (wanted, given) in pairs.items() if wanted != given]
    layer = "hidden_size", "num_heads", "head_k_dim", "head_v_dim", "intermediate_size"
    if any(getattr(there, name) != getattr(here, name) for name in layer):
        share = (there.mixer_parameters + there.mlp_parameters) / there.hidden_size**2
        overrides.append(f"size.layer_parameters_per_d2={share:.6g}")
    return overrides
