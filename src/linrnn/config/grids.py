"""Turn a sweep's grids and the command line into the overrides of every point."""

import itertools
from collections.abc import Sequence

from linrnn.config.compose import options_of
from linrnn.config.overrides import is_quoted, parse, unreadable, written
from linrnn.config.schema import SweepConfig
from linrnn.core.errors import ConfigError

FROM_COMMAND_LINE = "command_line"  # the sweep without grids of its own
MAX_VALUES = 1000  # for one key


def sweep_points(sweep: SweepConfig, overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of every point, in the order of the grids. A point that two grids share comes once.

    Args:
        overrides: from the command line; they beat the sweep's values. `key=a,b` replaces the values of grids that set
            `key`, and crosses both values with every other grid. `experiment=null` drops the sweep's experiment.

    A grid may set keys below a group (`loss.accumulate`). It then takes only those of the command line's options of
    that group that it has itself. With `loss=standard`, for example, the grid of `loss=cce_kahan loss.accumulate=…` has
    no point.

    Raises:
        ConfigError: an override cannot be read, or no point is left.
    """
    chosen = dict(map(_values, overrides))
    shared = [override for override in sweep.overrides if override.split("=", 1)[0] not in chosen]
    if chosen.get("experiment") == ["experiment=null"]:
        del chosen["experiment"]  # the sweep's own is dropped above
    points: dict[tuple[str, ...], None] = {}
    for grid in sweep.grids:
        own = {key: [written(key, value) for value in values] for key, values in grid.items()}
        groups = {key.split(".")[0] for key in grid if "." in key} & own.keys()
        fitting = {
            key: [one for one in values if key not in groups or one in own[key]] for key, values in chosen.items()
        }
        for point in itertools.product(*(own | fitting).values()):
            points[*shared, *sorted(point, key=lambda override: "." in override.split("=", 1)[0])] = None
    if sweep.name == FROM_COMMAND_LINE and not any(len(values) > 1 for values in chosen.values()):
        names = ", ".join(name for name in options_of("sweep") if name != FROM_COMMAND_LINE)
        raise ConfigError(
            "no sweep is named, and no key has several values",
            f"add sweep=NAME, one of: {names}; or lists, as model=gla,kda seed=0,1",
        )
    if not points:
        raise ConfigError(
            f"sweep={sweep.name} has no point{' with ' * bool(overrides)}{' '.join(overrides)}",
            "choose among the values of its grids" if overrides else "give its grids a value for every key",
        )
    return [list(point) for point in points]


def _values(line: str) -> tuple[str, list[str]]:
    """The key of an override, and one override for each of its values. What Hydra cannot read is one value.

    Raises:
        ConfigError: there is no key, a comma may or may not divide values, or they cannot be listed (`interval(0,1)`).
    """
    from hydra.errors import HydraException

    key, equals, value = line.partition("=")
    if not equals:
        raise unreadable(line)
    try:
        override = parse(line)
    except ConfigError as error:
        if value.startswith(("[", "{")):
            raise
        if "," in value and not is_quoted(value):
            remedy = f"quote each for Hydra, all for the shell: '{key}=\"a, b\",c'"
            raise ConfigError(f"{line}: one value or several?", remedy) from error
        return key, [line]
    if not override.is_sweep_override():
        return key, [line]
    try:
        values = list(itertools.islice(override.sweep_string_iterator(), MAX_VALUES + 1))
    except (HydraException, ValueError):
        values = []
    if not 0 < len(values) <= MAX_VALUES:
        raise ConfigError(f"{line}: no list of 1 to {MAX_VALUES:,} values", f"write {key}=a,b,c")
    return key, [f"{key}={value}" for value in values]
