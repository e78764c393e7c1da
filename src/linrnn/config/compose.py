"""Turn command-line overrides into a typed, validated :class:`Config`."""

import copy
import dataclasses
import difflib
import errno
import functools
import math
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from linrnn.config.fla.names import find_fla_model, settle_fla_model
from linrnn.config.safety import check_overrides, check_text
from linrnn.config.schema import COMMANDS, SCHEMAS, Config, DataConfig, FlaModelConfig, ReadingConfig
from linrnn.config.strings import list_keys, quoted, string_keys, unreadable
from linrnn.config.yaml_lines import broken_yaml, place
from linrnn.core.errors import ConfigError, first_line
from linrnn.core.redaction import holds_secret, secrets

CONFIG_DIR = Path(__file__).resolve().parents[3] / "configs"
_OFFERED: dict[tuple[str, str], tuple[Any, str]] = {}  # options without a YAML file: values and description
_PARSED: dict[tuple[Path, int, int], ConfigResult | None] = {}  # by file, time of its last change and size


def offer(group: str, values: Any, about: str) -> None:
    """Add an option to a group. `group=NAME` then has these values and needs no YAML file.

    Args:
        values: a dataclass. Its `name` is the option's name; every other field has a default and a meaning
            (:func:`linrnn.config.schema.option`).
        about: a description of the option, for `--help`.
    """
    SCHEMAS[group][values.name] = type(values)
    _OFFERED[group, values.name] = (values, about)
    ConfigStore.instance().store(group=group, name=values.name, node=values)
    string_keys.cache_clear()
    _composed.cache_clear()


def add_command(name: str, schema: type) -> None:
    """Add a command that needs no YAML file: `load_config(overrides, name)` then gives a `schema`.

    Args:
        schema: a dataclass whose every field is an :func:`linrnn.config.schema.option`.
    """
    COMMANDS[name] = schema
    ConfigStore.instance().store(name=name, node=schema)


def options_of(group: str) -> list[str]:
    """The names that `group=NAME` takes, sorted."""
    files = {path.stem for path in (CONFIG_DIR / group).glob("*.yaml")}
    return sorted(files | {name for other, name in _OFFERED if other == group})


def groups_of_options() -> list[str]:
    """Every group that has options, sorted."""
    return sorted({path.name for path in CONFIG_DIR.iterdir() if path.is_dir()} | {group for group, _ in _OFFERED})


def manual_of(group: str, option: str) -> tuple[str, str] | None:
    """The title of an option's manual, and the option's keys with values and comments; None if there is no such option.

    An option without a YAML file gets the lines that such a file would have.
    """
    path = CONFIG_DIR / group / f"{option}.yaml"
    if path.exists():
        return f"configs/{path.relative_to(CONFIG_DIR)}", path.read_text(encoding="utf-8").rstrip()
    if (group, option) not in _OFFERED:
        return None
    values, about = _OFFERED[group, option]
    head = [*textwrap.wrap(about, 120, initial_indent="# ", subsequent_indent="# "), f"name: {option}"]
    return f"{group}={option}", "\n".join([*head, *_keys_of(values, dataclasses.fields(values)[1:])])


def manual_of_command(name: str) -> tuple[str, str]:
    """The title of a command's manual, and its keys with values and comments."""
    path = CONFIG_DIR / f"{name}.yaml"
    if path.exists():
        return f"configs/{path.name}", path.read_text(encoding="utf-8").rstrip()
    schema = COMMANDS[name]
    return "keys of this command", "\n".join(_keys_of(schema(), dataclasses.fields(schema)))


def _keys_of(values: Any, fields: Sequence[dataclasses.Field]) -> Iterator[str]:
    """The lines that a YAML file would have: each key with its value, and its meaning beside it or above it."""
    for field in fields:
        value = OmegaConf.to_yaml({field.name: getattr(values, field.name)}).strip()
        if "\n" in value:
            yield from textwrap.wrap(field.metadata["meaning"], 120, initial_indent="# ", subsequent_indent="# ")
            yield value
        else:
            first, *more = textwrap.wrap(field.metadata["meaning"], 92)
            yield f"{value:<27} # {first}"
            yield from (f"{'':<27} # {line}" for line in more)


@functools.cache
def register_schemas() -> None:
    """Put every dataclass of the YAML files into Hydra's store: `schema/<command>`, `schema/<group>[/<option>]`."""
    store = ConfigStore.instance()
    for name, command in COMMANDS.items():
        store.store(group="schema", name=name, node=command, package="_global_")
    for group, options in SCHEMAS.items():
        for option, schema in options.items():
            if (group, option) in _OFFERED:
                continue
            where = ("schema", group) if option == "" else (f"schema/{group}", option)
            store.store(group=where[0], name=where[1], node=schema, package="_group_")


def compose_config(overrides: Sequence[str], config_name: str = "train") -> DictConfig:
    """Compose `configs/<config_name>.yaml` with Hydra overrides.

    Hydra first puts together the chosen options, then sets single keys. The first step takes a hundred times as long as
    the second, so its result is cached for each choice of options.

    Raises:
        ConfigError: a group option, key or value is unknown. The error offers the nearest valid names.
    """
    check_overrides(overrides)
    lines = quoted(overrides, config_name)
    try:
        parsed = [_parsed(line) for line in lines]
        ConfigLoaderImpl.validate_sweep_overrides_legal(parsed, RunMode.RUN, from_shell=False)
        single = [_sets_a_key(line, config_name) for line in lines]
        options = _told_apart([line for line, sets in zip(lines, single, strict=True) if not sets], config_name)
        composed = copy.deepcopy(_composed(options, config_name, CONFIG_DIR))
        ConfigLoaderImpl._apply_overrides_to_config(
            [o for o, sets in zip(parsed, single, strict=True) if sets], composed
        )
        return composed
    except AssertionError as error:  # OmegaConf raises it for a key below a group that is null
        raise ConfigError(
            f"{' '.join(lines)}: a key of a group that is not chosen",
            "choose an option of the group first, as data=markov",
        ) from error
    except MarkedYAMLError as error:
        raise broken_yaml(error) from error
    except (YAMLError, UnicodeDecodeError) as error:  # a character that YAML or UTF-8 forbids
        files = " or ".join(f"configs/{o.replace('=', '/')}.yaml" for o in lines if _key(o) in SCHEMAS)
        raise ConfigError(f"{files or 'a file of configs/'} is no YAML: {first_line(error)}", "correct it") from error
    except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:  # ValueError: group=null
        raise _explain(error, lines, config_name) from error
    except OSError as error:  # Hydra looks for the option's file (an unknown option is a HydraException, above)
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise ConfigError(
            "an option has a name that no file can have", "run with --help for the options there are"
        ) from error


@functools.lru_cache(maxsize=4096)  # the points of a sweep share most of their overrides
def _parsed(line: str) -> Override:
    [override] = OverridesParser.create().parse_overrides([line])
    return override


class _Files(CachingConfigRepository):
    """Hydra's files, each read once. Hydra would copy all schemas first, because its search path may change."""

    def __init__(self, repository: IConfigRepository, config_dir: Path) -> None:
        self.delegate, self.cache, self._dir = repository, {}, config_dir

    def load_config(self, config_path: str) -> ConfigResult | None:
        """As Hydra's. A file is parsed again only if it has changed; every composition gets a copy, as it alters it."""
        key = f"config_path={config_path}"
        if key not in self.cache:
            file = self._dir / f"{config_path}.yaml"
            try:
                state = file.stat()
            except (OSError, ValueError):  # a schema, or a name that no file can have: Hydra judges it
                return super().load_config(config_path)
            version = file, state.st_mtime_ns, state.st_size
            if version not in _PARSED:
                _PARSED[version] = self.delegate.load_config(config_path)
            self.cache[key] = copy.deepcopy(_PARSED[version])
        return self.cache[key]


@functools.lru_cache(maxsize=256)  # Hydra takes 0.1 s; a report asks for the same three hundreds of times
def _composed(options: tuple[str, ...], config_name: str, config_dir: Path) -> DictConfig:
    """As `hydra.compose`, which would also put together Hydra's own node, in as much time again, and remove it."""
    register_schemas()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(config_dir)):
            loader = GlobalHydra.instance().config_loader()
            assert isinstance(loader, ConfigLoaderImpl)
            loader.ensure_main_config_source_available()
            files = _Files(loader.repository, config_dir)
            overrides = OverridesParser.create().parse_overrides([*options])
            found = create_defaults_list(files, config_name, overrides, prepend_hydra=False, skip_missing=False)
            composed = loader._compose_config_from_defaults_list(found.defaults, files)
            OmegaConf.set_struct(composed, True)
            if "options" in (composed.get("model") or {}):
                OmegaConf.set_struct(composed.model.options, False)  # FLA knows which keys there are
            loader._apply_overrides_to_config(found.config_overrides, composed)
            return composed
    finally:
        GlobalHydra.instance().clear()


def _told_apart(options: list[str], config_name: str) -> tuple[str, ...]:
    """The options that differ from the defaults, sorted, so that equal choices are composed once.

    Hydra must judge an experiment, a group that is named twice, and anything but `group=option`. If there is one of
    them, all options stay as they are.
    """
    menu = options_of_menu(config_name)
    groups = [option.partition("=")[0] for option in options]
    if not menu.keys() >= set(groups) or len(set(groups)) < len(groups):
        return tuple(options)
    return tuple(sorted(o for o, group in zip(options, groups, strict=True) if o != f"{group}={menu[group]}"))


def options_of_menu(config_name: str = "train") -> dict[str, str]:
    """The groups of a command and the default option of each. Empty if the command's file cannot be read."""
    return _read_menu(config_name, CONFIG_DIR)


@functools.lru_cache(maxsize=32)
def _read_menu(config_name: str, config_dir: Path) -> dict[str, str]:
    try:
        text = (config_dir / f"{config_name}.yaml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    groups = re.findall(r"^  - (\w+): ([^\s#]+)", text, re.MULTILINE)
    return {group: option for group, option in groups if option not in ("null", "???")}


def _sets_a_key(override: str, config_name: str) -> bool:
    """Whether an override sets a key. One that chooses an option, or may choose one, does not."""
    key = _key(override)
    keys = {field.name for field in dataclasses.fields(COMMANDS[config_name])} - {*SCHEMAS, "experiment"}
    return "." in key or key in keys


def to_config(composed: DictConfig) -> Any:
    """Convert a composed configuration to dataclasses and check every bound.

    Raises:
        ConfigError: a mandatory value is missing, a type is wrong or a bound is violated.
    """
    try:
        config: Any = OmegaConf.to_object(composed)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} must be given", f"add {error.full_key}=…") from error
    except OmegaConfBaseException as error:
        raise ConfigError(first_line(error), "give the key a value of the type that its YAML file describes") from error
    if added := sorted(_added(config)):
        raise ConfigError(f"{', '.join(added)}: there is no such key", "run with --help for the keys there are")
    _expand_home(config)
    validate(config)
    if isinstance(config, Config) and isinstance(config.model, FlaModelConfig):
        settle_fla_model(config.model)
    return config


def _expand_home(config: Any) -> None:
    """Replace `~` by the home directory in every path. Shells do not do so behind `key=`."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            _expand_home(value)
        elif "path" in field.metadata and value is not None:
            several = isinstance(value, list)
            paths = value if several else [value]
            expanded = [os.path.expanduser(path) if isinstance(path, str) else path for path in paths]
            setattr(config, field.name, expanded if several else expanded[0])


def load_config(overrides: Sequence[str] = (), config_name: str = "train") -> Any:
    """The typed configuration for a command line with these overrides.

    Raises:
        ConfigError: the configuration cannot be composed, or a value is out of bounds.
    """
    if not issubclass(COMMANDS[config_name], ReadingConfig):
        return to_config(compose_config(overrides, config_name))
    check_overrides(overrides)
    data = [override for override in overrides if _key(override) == "data" or _key(override).startswith("data.")]
    config = to_config(compose_config([o for o in overrides if o not in data], config_name))
    return dataclasses.replace(config, data=data)


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
    named = {_key(override) for override in overrides}
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
    try:
        text = path.read_text(encoding="utf-8")
        check_text(text)
        raw: Any = OmegaConf.create(text)
        typed = OmegaConf.structured(Config)
        for group in (field.name for field in dataclasses.fields(Config) if field.name in SCHEMAS):
            options = SCHEMAS[group]
            typed[group] = OmegaConf.structured(options.get(raw[group].get("name")) or options[""])
        return to_config(cast(DictConfig, OmegaConf.merge(typed, raw)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{path} cannot be read as a configuration ({first_line(error)})",
            "name the directory of a run or of one of its checkpoints, written by this version",
        ) from error


def to_yaml(config: Any) -> str:
    """The configuration as YAML, keys in schema order."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def _added(config: Any, prefix: str = "") -> Iterator[str]:
    """Attributes of nested dataclasses that are not fields. OmegaConf lets `+key=value` add them."""
    names = {field.name for field in dataclasses.fields(config)}
    for name, value in vars(config).items():
        if name not in names:
            yield f"{prefix}{name}"
        elif dataclasses.is_dataclass(value):
            yield from _added(value, f"{prefix}{name}.")


def leaves(nested: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested dictionaries as (dotted key, value)."""
    for key, value in nested.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# ---------------------------------------------------------------------------------------------------- validation
def fields_of(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Every leaf of nested dataclasses as (dotted key, field, value)."""
    for field in dataclasses.fields(config):
        key, value = f"{prefix}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{key}.")
        elif isinstance(value, dict) and all(dataclasses.is_dataclass(item) for item in value.values()):
            for name, item in value.items():
                yield from fields_of(item, f"{key}.{name}.")
        else:
            yield key, field, value


def validate(config: Any) -> None:
    """Check the bounds in the metadata of the schema's fields.

    Raises:
        ConfigError: a value is out of bounds. The error names the key, its value and what is allowed.
    """
    found = secrets()
    for key, field, value in fields_of(config):
        if value is None:
            continue
        pattern = field.metadata.get("pattern")
        if pattern and not re.fullmatch(pattern, str(value)):
            raise ConfigError(
                f"{key}={value} is no plain name", "use letters, digits, _, . and -, and no dot at its start"
            )
        if "path" in field.metadata:
            _check_path(key, value)
        for number in value if isinstance(value, list) else [value]:
            _check_number(key, number)
        if field.type in (list[str], "list[str]") and (odd := [item for item in value if not isinstance(item, str)]):
            raise ConfigError(f"{key} holds {odd[0]}, which is no text", "write key=value, in quotes if it has a ':'")
        if name := holds_secret(value, found):
            raise ConfigError(
                f"{key} holds the value of {name}", "configurations are stored in plain text: leave secrets out"
            )
        _check_bounds(key, value, *(field.metadata.get(bound) for bound in ("choices", "minimum", "maximum")))


def _check_path(key: str, value: Any) -> None:
    for path in value if isinstance(value, list) else [value]:
        if path and not isinstance(path, str):
            raise ConfigError(f"{key} holds {path}, which is no path", f"write {key} as a path or a list: [one,'2']")
        if not path:  # Path("") would be the working directory
            raise ConfigError(
                f"{key} is empty, as with an unset variable of the shell", f"name a path, or leave {key} out"
            )
        if not path.isprintable():
            raise ConfigError(
                f"{key}={path!r} holds a character that cannot be printed, a line break perhaps", "rename the file"
            )


def _check_number(key: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value} is not a finite number", f"give {key} a finite number")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ConfigError(f"{key}={value} does not fit in 64 bits", f"give {key} a number below 2**63")


def _check_bounds(key: str, value: Any, choices: Sequence[Any] | None, low: Any, high: Any) -> None:
    if choices and value not in choices:
        names = [str(choice) for choice in choices]
        meant = difflib.get_close_matches(str(value), names, n=1, cutoff=0.7)  # not cpu for gpu, nor none for true
        if meant == ["bf16"] and "bf16_autocast" in names:  # for fp16: bf16 would round the parameters, too
            meant = ["bf16_autocast"]
        raise ConfigError(
            f"{key}={value} is not one of {', '.join(names)}",
            f"use {key}={meant[0]}" if meant else f"give {key} one of these values",
        )
    if low is not None and value < low:
        raise ConfigError(f"{key}={value} is below the minimum of {low}", f"use {key}={low} or more")
    if high is not None and value > high:
        raise ConfigError(f"{key}={value} is above the maximum of {high}", f"use {key}={high} or less")


# ------------------------------------------------------------------------------------------------- error messages
KINDS = {
    "could not be converted to Integer": "a whole number",
    "could not be converted to Float": "a number",
    "is not a valid bool": "true or false",
}  # the end of OmegaConf's message, and what the value should be


def nearest(name: str, valid: Sequence[str], count: int = 3) -> list[str]:
    """The `count` valid names most like `name`; a name that contains it or is contained in it comes first."""
    ranked = sorted(valid, key=lambda v: -difflib.SequenceMatcher(None, name, v).ratio() - (name in v or v in name))
    return ranked[:count]


def _key(override: str) -> str:
    return override.split("=")[0].lstrip("+~")


def _explain(error: Exception, overrides: Sequence[str], config_name: str) -> ConfigError:
    """Turn Hydra's exception into one line of cause and one of remedy."""
    text = " ".join(str(error).split())
    if missing := re.search(r"Could not find '(?:[\w/]*/)?([\w.-]+)/([^'/]*)'", text):
        group, option = missing.groups()
        options = options_of(group)
        known = find_fla_model(option) if group == "model" else None
        of_fla = f"FLA has it: model=fla model.config={known}; " if known else ""
        return ConfigError(
            f"{group}={option}: there is no such {group}",
            f"{of_fla}nearest: {', '.join(nearest(option, options))}; all: {', '.join(options)}",
        )
    if unchosen := re.search(r"You must specify '(\w+)'", text):
        group = unchosen.group(1)
        return ConfigError(f"{group} must be given", f"add {group}=…, one of: {', '.join(options_of(group))}")
    if overlay := re.search(r"In '(\w+)/([\w.-]+)': ConfigKeyError.*? full_key: ([\w.]+)", text):
        return _key_of_option(overrides, *overlay.groups())
    if broken := re.search(r"In '(\w+)/([\w.-]+)': \w+ raised while composing config: (.*?) full_key: (\S+)", text):
        group, option, reason, key = broken.groups()
        where = place(CONFIG_DIR / group / f"{option}.yaml", key.removeprefix(f"{group}."))
        return ConfigError(
            f"{where}: {key}: {reason}", "give the key a value like those in the other files of the group"
        )
    if missing := re.search(
        r"Could not override '([^']+)'|Key '([^']+)' is not in struct|Key '([^']+)' not in '\w+'", text
    ):
        return _unknown_key(next(name for name in missing.groups() if name), overrides, config_name)
    if bad_value := re.search(r"Error merging override (.*)", text):
        return _bad_value(bad_value.group(1), first_line(error.__cause__ or error))
    if ambiguous := re.search(r"Ambiguous value for argument '(.*?)'(?: 1\.|$)", text):
        key, _, value = ambiguous.group(1).partition("=")
        if key in list_keys(config_name):
            return ConfigError(f"{ambiguous.group(1)}: {key} is a list", f"write a list as {key}=[{value}]")
        return ConfigError(f"{ambiguous.group(1)}: {key} takes one value", "scripts/sweep.py runs several")
    if isinstance(error, OverrideParseException):
        return unreadable(error)
    return ConfigError(first_line(error), "write overrides as key=value or group=option; --help shows what there is")


def _key_of_option(overrides: Sequence[str], group: str, option: str, key: str) -> ConfigError:
    """The error for an option's file that sets a key which the configuration does not have."""
    owner = key.split(".")[0]
    if owner == group:
        where = place(CONFIG_DIR / group / f"{option}.yaml", key.removeprefix(f"{group}."))
        return ConfigError(f"{where}: there is no such key as {key}", "write it as the other files of the group do")
    chosen = next((o for o in overrides if o.startswith(f"{owner}=")), owner)
    return ConfigError(
        f"{group}={option} sets {key}, which {chosen} does not have",
        f"choose another {owner}, or run without {group}={option}",
    )


def _bad_value(override: str, reason: str) -> ConfigError:
    """The error for an override whose value does not have the key's type. `reason`: OmegaConf's message."""
    key, _, value = override.partition("=")
    if "is not a ListConfig" in reason:
        return ConfigError(f"{override}: {key} is a list", f"put it in brackets: {key}=[{value}]")
    if "'dict'" in reason and not value.startswith("{"):  # a key below a single value: `seed.x=1`
        owner = key.rpartition(".")[0]
        return ConfigError(f"{key}: there is no such key, because {owner} is a single value", f"write {owner}={value}")
    for kind, words in KINDS.items():
        if kind in reason:
            return ConfigError(f"{override} is not {words}", _as_kind(key, value, words))
    return ConfigError(f"{override}: {reason}", "give it a value of the type that its YAML file describes")


def _as_kind(key: str, value: str, words: str) -> str:
    """The remedy for a value of another kind: the value itself where it is a whole number in another form."""
    with suppress(ValueError, OverflowError):
        if words == "a whole number" and float(value).is_integer():
            return f"write {key}={int(float(value))}"
    return f"give {key} {words}"


def _unknown_key(key: str, overrides: Sequence[str], config_name: str) -> ConfigError:
    """The error for an unknown key, with the nearest keys of the configuration without the failing overrides."""
    names = {o: _key(o) for o in overrides}
    groups = [o for o, name in names.items() if name != key and "." not in name and options_of(name)]
    try:
        composed = OmegaConf.to_container(compose_config(groups, config_name))
    except ConfigError as error:
        return error
    valid = [name for name, _ in leaves(cast(dict[str, Any], composed))]
    full = next((name for o in overrides if (name := _key(o)).endswith(key)), key)
    group, _, leaf = full.rpartition(".")
    owners = [
        o for o, schema in SCHEMAS.get(group, {}).items() if o and leaf in {f.name for f in dataclasses.fields(schema)}
    ]
    likely = nearest(full, valid)
    if not group:  # a misspelt group: `modl=gla`
        chosen = {name.partition(".")[0] for name in valid if "." in name}
        groups_first = difflib.get_close_matches(full, sorted(chosen), n=1)
        likely = [*(f"{name}=…" for name in groups_first), *likely]
    siblings = [name.removeprefix(f"{group}.") for name in valid if group and name.startswith(f"{group}.")]
    hints = [
        f"it is an option of {', '.join(f'{group}={owner}' for owner in owners)}" if owners else "",
        f"nearest: {', '.join(likely)}" if not owners else "",
        f"{group} has: {', '.join(siblings)}" if siblings else "",
    ]
    return ConfigError(f"{full}: there is no such key", "; ".join(hint for hint in hints if hint))
