"""Turn command-line overrides into a typed, validated :class:`Config`.

Hydra composes the chosen options, once for each choice. Single keys are then set in a copy. The names of options and
keys are checked before, against the files and the composed configuration. So Hydra is asked for nothing that is not
there, and fails only at a broken file. Hydra and OmegaConf are imported when something is composed: `--help` needs
neither.
"""

import copy
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from linrnn.config.bounds import expand_home, validate
from linrnn.config.fla.names import find_fla_model, settle_fla_model
from linrnn.config.mistakes import bad_value, broken_file, nearest, unknown_key
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
    forget()


def add_command(name: str, schema: type) -> None:
    """Add a command without groups: `load_config(overrides, name)` then gives a `schema`.

    Args:
        schema: a dataclass whose every field is an :func:`linrnn.config.schema.option`.
    """
    COMMANDS[name] = schema
    forget()


def forget() -> None:
    """Forget what was composed. Needed after a change to the options that there are."""
    _register.cache_clear()
    _composed.cache_clear()


def options_of(group: str) -> list[str]:
    """The names that `group=NAME` takes, sorted."""
    return sorted({path.stem for path in (CONFIG_DIR / group).glob("*.yaml")} | SCHEMAS.get(group, {}).keys() - {""})


def defaults_of_option(group: str, option: str) -> Any:
    """An option's dataclass, with the values that a YAML file may replace; None for an experiment."""
    schema = SCHEMAS.get(group, {}).get(option) or SCHEMAS.get(group, {}).get("")
    if schema is None:
        return None
    return schema(option) if dataclasses.fields(schema)[0].name == "name" else schema()


def menu_of(config_name: str = "train") -> dict[str, str | None]:
    """The groups of a command and the default option of each; None if there is none."""
    return _read_menu(CONFIG_DIR / f"{config_name}.yaml")


@functools.lru_cache(maxsize=32)
def _read_menu(path: Path) -> dict[str, str | None]:
    if not path.exists():
        return {}
    defaults = yaml.safe_load(path.read_text(encoding="utf-8"))["defaults"]
    return {group: option for entry in defaults if isinstance(entry, dict) for group, option in entry.items()}


def check_option(group: str, option: str, menu: dict[str, str | None]) -> None:
    """Check that a group has an option. `null` leaves out a group that the menu leaves out, too.

    Raises:
        ConfigError: there is no such option. The error names the nearest ones.
    """
    options = options_of(group)
    if option in options or (option == "null" and menu[group] is None):
        return
    known = find_fla_model(option) if group == "model" else None
    of_fla = f"FLA has it: model=fla model.config={known}; " if known else ""
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
    options = dict(override.split("=", 1) for override in overrides if key_of(override) in menu)
    for group, option in options.items():
        check_option(group, option, menu)
    if "experiment" not in options:  # nothing else chooses an option, so the defaults need no mention
        options = {group: option for group, option in options.items() if option != menu[group]}
    chosen = tuple(sorted(f"{group}={option}" for group, option in options.items() if option != "null"))
    composed = copy.deepcopy(_composed(chosen, config_name, CONFIG_DIR))
    for override in overrides:
        if key_of(override) not in menu:
            _set(composed, override)
    return composed


@functools.lru_cache(maxsize=512)  # Hydra takes 0.1 s; a report asks for the same three hundreds of times
def _composed(options: tuple[str, ...], config_name: str, config_dir: Path) -> "DictConfig":
    """The command's configuration with these options of its groups.

    Raises:
        ConfigError: a file is broken, or an experiment sets a key that a chosen option does not have.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not (config_dir / f"{config_name}.yaml").exists():
        composed = OmegaConf.structured(COMMANDS[config_name])
        OmegaConf.set_struct(composed, True)
        return composed
    _register(config_dir)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(config_dir)):
            composed = compose(config_name, overrides=[*options])
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        raise broken_file(error, options) from error
    if "options" in (composed.get("model") or {}):
        OmegaConf.set_struct(composed.model.options, False)  # FLA knows which keys there are
    return composed


@functools.cache
def _register(config_dir: Path) -> None:
    """Put every dataclass into Hydra's store: as an option, or as `schema/…` for the YAML file that names it."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    for name, command in COMMANDS.items():
        store.store(group="schema", name=name, node=command, package="_global_")
    for group, options in SCHEMAS.items():
        for option, schema in options.items():
            if option == "":
                store.store(group="schema", name=group, node=schema, package="_group_")
            elif (config_dir / group / f"{option}.yaml").exists():
                store.store(group=f"schema/{group}", name=option, node=schema, package="_group_")
            else:
                store.store(group=group, name=option, node=defaults_of_option(group, option))


def _set(composed: "DictConfig", override: str) -> None:
    """Set one key, as `override` says.

    Raises:
        ConfigError: there is no such key, or the value is not of its type.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

    key = key_of(override)
    words = key.split(".")
    node: Any = composed
    owner: Any = None  # the schema that has the key; None below a free mapping
    for depth, word in enumerate(words):
        above = ".".join(words[:depth])
        if node is None and above in SCHEMAS:
            raise ConfigError(
                f"{override}: a key of a group that is not chosen", f"choose an option of the group first: {above}=NAME"
            )
        if not isinstance(node, DictConfig):
            cause = f"{key}: there is no such key, because {above} is a single value"
            raise ConfigError(cause, f"write {above}={override.partition('=')[2]}")
        if not OmegaConf.is_struct(node):
            owner = None
            break
        if word not in node.keys():  # noqa: SIM118  a mandatory key is no member before it has a value
            raise unknown_key(key, cast(dict[str, Any], OmegaConf.to_container(composed)))
        owner, node = OmegaConf.get_type(node), None if OmegaConf.is_missing(node, word) else node[word]
    value = read_value(override, kind_of(owner, words[-1]))
    try:
        OmegaConf.update(composed, key, value, merge=True)
    except (ConfigKeyError, ConfigAttributeError) as error:  # in a value such as {mode:offline}
        raise unknown_key(error.full_key or key, cast(dict[str, Any], OmegaConf.to_container(composed))) from error
    except (OmegaConfBaseException, ValueError, RecursionError) as error:
        raise bad_value(override, value, owner, error) from error


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
    expand_home(config)
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
    composed = compose_config([f"data={run.name}", *overrides])
    for field in dataclasses.fields(run):
        if field.name != "cache_dir" and f"data.{field.name}" not in named:
            composed.data[field.name] = getattr(run, field.name)
    return to_config(composed).data


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
            schema = schemas.get(raw[group].get("name", "default")) or schemas[""]
            typed[group] = OmegaConf.structured(schema)
        if (lacking := next(_lacking(typed, raw), None)) is not None:
            raise ValueError(f"it lacks {lacking}")
        return to_config(cast(DictConfig, OmegaConf.merge(typed, raw)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{path} cannot be read as a configuration ({first_line(error)})",
            "name the directory of a run or of one of its checkpoints, written by this version",
        ) from error


def _lacking(typed: "DictConfig", raw: "DictConfig", prefix: str = "") -> Iterator[str]:
    """The keys of a structured configuration that a file does not give. Their defaults may not be what the run had."""
    from omegaconf import OmegaConf

    for key in map(str, typed.keys()):  # a mandatory key is no member before it has a value
        if key not in raw:
            yield f"{prefix}{key}"
        elif not OmegaConf.is_missing(typed, key) and dataclasses.is_dataclass(OmegaConf.get_type(typed[key])):
            yield from _lacking(typed[key], raw[key], f"{prefix}{key}.")


def to_yaml(config: Any) -> str:
    """The configuration as YAML, keys in schema order."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def overrides_of(config: Config) -> list[str]:
    """The shortest list of overrides for which :func:`load_config` returns `config`."""
    menu = menu_of()
    values = dict(leaves(dataclasses.asdict(config)))
    named = {field.name: values.get(f"{field.name}.name") for field in dataclasses.fields(Config) if field.name in menu}
    chosen = [f"{group}={name}" for group, name in named.items() if name not in (None, menu[group])]
    defaults = values_under(chosen)
    return [*chosen, *(written(k, v) for k, v in values.items() if k not in defaults or v != defaults[k])]


def values_under(options: Sequence[str]) -> dict[str, Any]:
    """Every key with its value under these options of the groups. A key without a default has "???"."""
    from omegaconf import OmegaConf

    return dict(leaves(cast(dict[str, Any], OmegaConf.to_container(compose_config(options)))))
