"""Find the file and line of a mistake in a YAML file, for error messages."""

from pathlib import Path

import yaml

from linrnn.core.errors import ConfigError


def broken_yaml(error: yaml.MarkedYAMLError) -> ConfigError:
    """The error for a file that is not valid YAML. It names the line."""
    mark = error.problem_mark or error.context_mark
    where = f"{shown(Path(mark.name))}, line {mark.line + 1}" if mark else "a YAML file"
    words = (error.context if error.problem_mark is None else None, error.problem)
    return ConfigError(
        f"{where}: {'; '.join(word for word in words if word)}", "correct that line or the one before it"
    )


def place(path: Path, key: str) -> str:
    """`file, line n` of a key in a YAML file; only the file if the key is not found.

    Args:
        key: as OmegaConf names it, from the file's top level: `grids[0].model[1]`.
    """
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return shown(path)
    line = None
    for word in key.replace("]", "").replace("[", ".").split("."):
        found = _child(node, word)
        if found is None:
            break
        line, node = found
    return shown(path) if line is None else f"{shown(path)}, line {line + 1}"


def _child(node: yaml.Node | None, word: str) -> tuple[int, yaml.Node] | None:
    """The line and the value of an entry of a mapping or sequence."""
    if isinstance(node, yaml.MappingNode):
        return next(((k.start_mark.line, v) for k, v in node.value if k.value == word), None)
    if isinstance(node, yaml.SequenceNode) and word.isdigit() and int(word) < len(node.value):
        entry = node.value[int(word)]
        return entry.start_mark.line, entry
    return None


def shown(path: Path) -> str:
    """A path for messages. A path of the repository's own configuration starts at `configs/`."""
    if "configs" in path.parts:
        path = Path(*path.parts[path.parts.index("configs") :])
    return str(path)
