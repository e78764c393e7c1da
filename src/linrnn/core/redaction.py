"""Keep secrets of the environment out of everything that is written or printed."""

import os
import re
from typing import Any

NAMES = re.compile(r"(API_?KEY|ACCESS_KEY|PRIVATE_KEY|SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
SHORTEST = 8  # a shorter value could be any word


def secrets() -> dict[str, str]:
    """Values of variables such as WANDB_API_KEY, by name; longest first, so that no secret is replaced only in part."""
    found = {name: value for name, value in os.environ.items() if NAMES.search(name) and len(value) >= SHORTEST}
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def scrub(text: str) -> str:
    """`text` with each secret replaced by the name of its variable."""
    for name, value in secrets().items():
        text = text.replace(value, f"<{name}>")
    return text


def holds_secret(value: Any, found: dict[str, str]) -> str | None:
    """The name of the variable whose secret (one of `found`) appears in a configuration's value, or None."""
    text = str(value)
    return next((name for name, secret in found.items() if secret in text), None)
