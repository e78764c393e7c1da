"""Read JSON files that earlier processes wrote. The error for a broken file names the file."""

import json
from pathlib import Path
from typing import Any

from linrnn.core.errors import DataError


def read_json(path: Path, remedy: str = "move the file away, or fetch it again") -> Any:
    """The content of a JSON file.

    Raises:
        DataError: the file is missing, cut short, not JSON, or nested too deeply.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({_reason(error)})", remedy) from error


def read_object(path: Path, keys: tuple[str, ...] = (), remedy: str = "move the file away, or fetch it again") -> Any:
    """The JSON object of a file; it must have all `keys`.

    Raises:
        DataError: as :func:`read_json`, or the content is not an object, or one of `keys` is missing.
    """
    content = read_json(path, remedy)
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no JSON object", remedy)
    if missing := [key for key in keys if key not in content]:
        raise DataError(f"{path} lacks {', '.join(missing)}", remedy)
    return content


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return (error.strerror if isinstance(error, OSError) else None) or str(error).splitlines()[0]
