"""Triton's interpreter in a third less time: it puts its own versions of the language in place once per launch.

As it is (3.6.0, 3.7.1), every call of one jitted function by another goes through all names of `triton.language` again,
although the kernel that calls has put them in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def patch_once() -> None:
    """From now on, names that are in place are left there. Without Triton there is nothing to do."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    patch: Callable[[Any], Any] = interpreter._patch_lang

    def patch_what_is_not(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if languages and all(not tl.core.is_builtin(language.load) for language in languages):
            return interpreter._LangPatchScope()  # nothing to restore
        return patch(function)

    interpreter._patch_lang = patch_what_is_not
