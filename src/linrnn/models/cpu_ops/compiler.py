"""Import FLA without torch's compiler, which takes seconds to import and is used by nothing that runs on a CPU."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch


def without_compiler() -> AbstractContextManager[Any]:
    """Within the context, `torch.compile` as a decorator leaves a function as it is."""
    return patch.object(torch, "compile", _uncompiled)


def _uncompiled(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    return function or functools.partial(_uncompiled, **options)
