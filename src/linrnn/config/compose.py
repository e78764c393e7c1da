"""Turn command-line overrides into a typed, validated :class:`Config`.

The chosen options are put together once for each choice: each is a dataclass, with the values of its YAML file. Single
keys are then set in a copy: those of an experiment, which is a list of overrides, then those of the command line. Hydra
reads the overrides. It and OmegaConf are imported when something is composed: `--help` needs neither.
"""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_origin

import yaml

from linrnn.config.bounds import nearest, validate
from linrnn.config.fla import fla_models, settle_fla_model
from linrnn.config.overrides import check_overrides, check_text, key_of, read_value, written
from linrnn.config.schema import (
    ABOUT,
    COMMANDS,
    SCHEMAS,
    Config,
    DataConfig,
    FlaModelConfig,
    ReadingConfig,
    kind_of,
    leaves,
)
from linrnn.core.errors import ConfigError, first_line

if TYPE_CHECKING:
    from omegaconf import DictConfig

PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel, or at the top of the source tree.
CONFIG_DIR = next(path for path in (PACKAGE / "configs", PACKAGE.parents[1] / "configs") if path.is_dir())


# -------------------------------------------------------------------------------------------------- what there is
def offer(group: str, values: Any, about: str) -> None:
    """Add an option to a group. `group=NAME` then has these values and needs no YAML file.

    Args:
        values: a dataclass. Its `name` is the option's name; every other field is a
            :func:`linrnn.config.schema.option`.
        about: a description of the option, for `--help`.
    """
    SCHEMAS[group][values.name] = type(values)
    ABOUT[group, values.name] = about
    _composed.cache_clear()


def options_of(group: str) -> list[str]:
    """The names that `group=NAME` takes, sorted."""
    return sorted({path.stem for path in (CONFIG_DIR / group).glob("*.yaml")} | SCHEMAS.get(group, {}).keys() - {""})


def defaults_of_option(group: str, option: str) -> Any:
    """An option's dataclass, with the values that a YAML file may replace."""
    schema = SCHEMAS[group].get(option) or SCHEMAS[group][""]
    return schema(option) if dataclasses.fields(schema)[0].name == "name" else schema()


@functools.cache
def menu_of(config_name: str = "train") -> dict[str, str | None]:
    """The groups of a command and the default option of each; None if there is none."""
    path = CONFIG_DIR / f"{config_name}.yaml"
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))["defaults"] if path.exists() else []
    return {group: option for entry in entries for group, option in entry.items()}


def of_experiment(arguments: Sequence[str]) -> list[str]:
    """The overrides of the experiment that arguments choose, if any.

    Raises:
        ConfigError: there is no such experiment, or its file is broken. The error names the file.
    """
    name = dict(argument.partition("=")[::2] for argument in arguments).get("experiment", "null")
    check_option("experiment", name, menu_of())
    if name == "null":
        return []
    loaded = _loaded("experiment", name, CONFIG_DIR)
    try:
        overrides: list[str] = to_config(loaded).overrides
        check_overrides(overrides)
        for group, option in (one.split("=", 1) for one in overrides if key_of(one) in menu_of()):
            if group == "experiment":
                raise ConfigError("an experiment chooses no other one", f"copy the overrides of {option}")
            check_option(group, option, menu_of())
    except ConfigError as error:
        raise ConfigError(f"configs/experiment/{name}.yaml: {error.cause}", error.remedy) from error
    return overrides


def check_option(group: str, option: str, menu: dict[str, str | None]) -> None:
    """Check that a group has an option. `null` leaves out a group that the menu leaves out, too.

    Raises:
        ConfigError: there is no such option. The error names the nearest ones.
    """
    options = options_of(group)
    if option in options or (option == "null" and menu[group] is None):
        return
    of_fla = f"FLA has it: model=fla model.config={option}; " * (group == "model" and option in fla_models())
    raise ConfigError(
        f"{group}={option[:200]}: there is no such {group}",
        f"{of_fla}nearest: {', '.join(nearest(option[:200], options))}; all: {', '.join(options)}",
    )


# --------------------------------------------------------------------------------------------------- composition
def compose_config(overrides: Sequence[str], config_name: str = "train") -> "DictConfig":
    """Compose a command's configuration with overrides: `group=option`, and `key=value`, which a `+` may precede.

    Raises:
        ConfigError: a group option, key or value is unknown. The error offers the nearest valid names.
    """
    check_overrides(overrides)
    menu = menu_of(config_name)
    overrides = [override.lstrip("+") for override in overrides]
    experiment = of_experiment(overrides) if "experiment" in menu else []
    options = dict(override.split("=", 1) for override in [*experiment, *overrides] if key_of(override) in menu)
    for group, option in options.items():
        check_option(group, option, menu)
    name = options.pop("experiment", "null")
    chosen = tuple(sorted(f"{group}={option}" for group, option in options.items() if option != "null"))
    composed = copy.deepcopy(_composed(chosen, config_name, CONFIG_DIR))
    for override in experiment:
        try:
            if key_of(override) not in menu:
                _set(composed, override)
        except ConfigError as error:
            remedy = f"{error.remedy}; or run without experiment={name}"
            raise ConfigError(f"configs/experiment/{name}.yaml: {error.cause}", remedy) from error
    for override in overrides:
        if key_of(override) not in menu:
            _set(composed, override)
    return composed


@functools.lru_cache(maxsize=512)  # a report asks for the same three hundreds of times
def _composed(options: tuple[str, ...], config_name: str, config_dir: Path) -> "DictConfig":
    """The command's configuration with these options of its groups.

    Raises:
        ConfigError: a file is broken.
    """
    from omegaconf import OmegaConf

    config: Any = OmegaConf.structured(COMMANDS[config_name])
    for group, option in {**menu_of(config_name), **dict(one.split("=") for one in options)}.items():
        if option is not None:
            config[group] = _loaded(group, option, config_dir)
    OmegaConf.set_struct(config, True)
    for owner, free in ((config.get("model"), "options"), (config, "resources")):  # FLA or submitit knows their keys
        if free in (owner or {}):
            OmegaConf.set_struct(owner[free], False)
    return config


def _loaded(group: str, option: str, config_dir: Path) -> Any:
    """An option's dataclass with the values of its file, if it has one.

    Raises:
        ConfigError: the file is broken. The error names it, and the line or the key.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    values, path = OmegaConf.structured(defaults_of_option(group, option)), config_dir / group / f"{option}.yaml"
    try:
        values.merge_with(OmegaConf.load(path) if path.exists() else {})
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        key = getattr(error, "full_key", None)
        what = f"{group}.{key}: {first_line(error)}" if key else " ".join(str(error).split())
        raise ConfigError(f"configs/{group}/{path.name}: {what}", "correct that line or the one before") from error
    return values


def _set(composed: "DictConfig", override: str) -> None:
    """Set one key, as `override` says.

    Raises:
        ConfigError: there is no such key, or the value is not of its type.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

    key = key_of(override)
    *above, leaf = key.split(".")
    owner: Any = composed
    for depth, word in enumerate(above):
        if isinstance(owner, DictConfig) and OmegaConf.is_struct(owner):
            owner = owner.get(word)
            if owner is None and ".".join(above[: depth + 1]) in SCHEMAS:
                raise ConfigError(f"{override}: a key of a group that is not chosen", f"first choose {word}=NAME")
    free = isinstance(owner, DictConfig) and not OmegaConf.is_struct(owner)
    if not free and (not isinstance(owner, DictConfig) or leaf not in owner.keys()):  # noqa: SIM118  also a missing one
        raise _unknown_key(key, composed)
    kind = None if free else kind_of(OmegaConf.get_type(owner), leaf)
    value = read_value(override, kind)
    try:
        OmegaConf.update(composed, key, value, merge=True)
    except (ConfigKeyError, ConfigAttributeError) as error:  # in a value such as {mode:offline}
        raise _unknown_key(str(error.full_key or key), composed) from error
    except (OmegaConfBaseException, ValueError, RecursionError) as error:
        words = {int: "a whole number", float: "a number", bool: "true or false"}
        if get_origin(kind) is list and not isinstance(value, list):
            raise ConfigError(
                f"{override}: {key} is a list", f"put it in brackets: {key}=[{override.partition('=')[2]}]"
            ) from error
        if kind in words:
            raise ConfigError(f"{override} is not {words[kind]}", f"give {key} {words[kind]}") from error
        raise ConfigError(f"{override}: {first_line(error)}", "give it what --help describes") from error


def _unknown_key(key: str, composed: "DictConfig") -> ConfigError:
    """The error for a key that a composed configuration does not have, with the nearest keys that it has."""
    from omegaconf import OmegaConf

    valid = [name for name, _ in leaves(cast(dict[str, Any], OmegaConf.to_container(composed)))]
    group, _, leaf = key.rpartition(".")
    owners = [
        f"{group}={option}"
        for option, schema in SCHEMAS.get(group, {}).items()
        if option and leaf in {field.name for field in dataclasses.fields(schema)}
    ]
    groups = [*(SCHEMAS.keys() & composed.keys()), *(["experiment"] if "trainer" in composed else [])]
    options = [] if group else [f"{name}=…" for name in groups]
    likely = f"nearest: {', '.join(nearest(key, [*options, *valid]))}"
    siblings = [name.removeprefix(f"{group}.") for name in valid if group and name.startswith(f"{group}.")]
    remedy = f"it is an option of {', '.join(owners)}" if owners else likely
    return ConfigError(
        f"{key}: there is no such key", remedy + (f"; {group} has: {', '.join(siblings)}" if siblings else "")
    )


# ------------------------------------------------------------------------------------------ typed configurations
def load_config(overrides: Sequence[str] = (), config_name: str = "train") -> Any:
    """The typed configuration for a command line with these overrides.

    Raises:
        ConfigError: the configuration cannot be composed, or a value is out of bounds.
    """
    if not issubclass(COMMANDS[config_name], ReadingConfig):
        return to_config(compose_config(overrides, config_name))
    check_overrides(overrides)
    data = [override for override in overrides if key_of(override).split(".")[0] == "data"]
    config = to_config(compose_config([o for o in overrides if o not in data], config_name))
    return dataclasses.replace(config, data=data)


def to_config(composed: "DictConfig") -> Any:
    """Convert a composed configuration to dataclasses and check every bound.

    Raises:
        ConfigError: a mandatory value is missing, a type is wrong or a bound is violated.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    if (composed.get("data") or {}).get("sources") and OmegaConf.is_missing(composed.data, "path"):
        composed.data.path = None
    try:
        config: Any = OmegaConf.to_object(composed)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} must be given", f"add {error.full_key}=…") from error
    except OmegaConfBaseException as error:
        raise ConfigError(first_line(error), "give the key a value of the type that --help describes") from error
    validate(config)
    if isinstance(config, Config) and isinstance(config.model, FlaModelConfig):
        settle_fla_model(config.model)
    return config


def data_for(run: DataConfig, overrides: Sequence[str], tokenizer: Path | None = None) -> DataConfig:
    """The data for a model from a run that trained on `run`.

    It is the run's own data, changed by `overrides` of the group `data`. Without an override, `cache_dir` is the
    default and not the run's: it belongs to the machine. `data=NAME` chooses other data, with its defaults. Other text
    is tokenised by the run's tokenizer, unless an override names a tokenizer.

    Args:
        tokenizer: the directory with the run's tokenizer; None if it has none.

    Raises:
        ConfigError: an override is unknown or out of bounds.
    """
    named = {key_of(override) for override in overrides}
    if "data" in named:
        data = load_config(overrides).data
        chosen = not named.isdisjoint(("data.tokenizer", "data.tokenizer_vocab_size"))
        if tokenizer is None or chosen or not hasattr(data, "tokenizer"):
            return data
        return dataclasses.replace(data, tokenizer=str(tokenizer))  # type: ignore[call-arg]
    own = {f"data.{key}": value for key, value in dataclasses.asdict(run).items() if key not in ("name", "cache_dir")}
    lines = [f"data={run.name}", *(written(key, value) for key, value in own.items() if key not in named), *overrides]
    return load_config(lines).data


def read_config(path: Path) -> Config:
    """The configuration that a run wrote as config.yaml.

    Raises:
        ConfigError: the file is missing, is not a configuration, or comes from a version with other keys.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        text = path.read_text(encoding="utf-8")
        check_text(text)
        raw: Any = OmegaConf.create(text)
        typed = OmegaConf.structured(Config)
        for group in (field.name for field in dataclasses.fields(Config) if field.name in SCHEMAS):
            schemas = SCHEMAS[group]
            typed[group] = OmegaConf.structured(schemas.get(raw[group].get("name", "default")) or schemas[""])
        config = to_config(cast(DictConfig, OmegaConf.merge(typed, raw)))
        given = dict(leaves(cast(dict[str, Any], OmegaConf.to_container(raw))))
        if lacking := [key for key, _ in leaves(dataclasses.asdict(config)) if key not in given]:
            raise ValueError(f"it lacks {lacking[0]}")  # its default may not be what the run had
        return config
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{path} cannot be read as a configuration ({first_line(error)})",
            "name the directory of a run or of one of its checkpoints, written by this version",
        ) from error


def to_yaml(config: Any) -> str:
    """The configuration as YAML, keys in schema order."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def overrides_of(config: Config) -> list[str]:
    """The shortest list of overrides for which :func:`load_config` returns `config`."""
    menu = menu_of()
    values = dict(leaves(dataclasses.asdict(config)))
    named = {group: getattr(getattr(config, group, None), "name", None) for group in menu}
    chosen = [f"{group}={name}" for group, name in named.items() if name not in (None, menu[group])]
    defaults = values_under(chosen)
    return [*chosen, *(written(k, v) for k, v in values.items() if k not in defaults or v != defaults[k])]


def values_under(options: Sequence[str]) -> dict[str, Any]:
    """Every key with its value under these options of the groups. A key without a default has "???"."""
    from omegaconf import OmegaConf

    return dict(leaves(cast(dict[str, Any], OmegaConf.to_container(compose_config(options)))))
