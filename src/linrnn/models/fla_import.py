"""Import one module of FLA without its other layers and models: a second instead of six."""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from pkgutil import extend_path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from linrnn.config.fla.names import fla_models
from linrnn.models import tuning

PACKAGES = ("fla", "fla.layers", "fla.models", "fla.ops")  # their `__init__` imports everything below them

# What transformers imports for losses of object detection, its quantizer, assisted generation and images.
UNUSED = ("scipy", "torchao", "sklearn", "torchvision")


def import_fla(module: str) -> Any:
    """Import a module of FLA without FLA's warnings on a machine without a GPU."""
    if "fla" not in sys.modules:
        _add_packages()
        if importlib.util.find_spec("triton") is not None:
            tuning.install()  # before FLA makes its autotuners
    with warnings.catch_warnings(), _without_unused_packages(), _compiling_later():
        warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
        warnings.filterwarnings("ignore", message="Flash Attention is not installed")
        return importlib.import_module(module)


def fla_classes(model: str) -> tuple[Any, Any]:
    """The class of the causal language model with this `model_type` of FLA's, and the class of its configuration."""
    module = import_fla(f"fla.models.{fla_models().get(model, model)}")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of from_pretrained and save_pretrained
    causal_lm = getattr(module, next(name for name in module.__all__ if name.endswith("ForCausalLM")))
    return causal_lm, causal_lm.config_class


class _Package(ModuleType):
    """A package whose `__init__` runs when a name is used that only `__init__` defines."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def _add_packages() -> None:
    """Add FLA's packages to `sys.modules` without running their `__init__`. Without FLA, nothing is added."""
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            return
        module = importlib.util.module_from_spec(spec)
        module.__class__ = _Package  # type: ignore[assignment]
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
        else:  # as fla/__init__.py does
            module.__path__ = extend_path(module.__path__, name)
            module.__dict__["__version__"] = importlib.metadata.version("flash-linear-attention")


@contextlib.contextmanager
def _without_unused_packages() -> Iterator[None]:
    """Within the context, transformers imports as if `UNUSED` were not installed. All together take three seconds.

    FLA's models use none of them. Modules of transformers that are imported here refuse them as not installed from
    then on.
    """
    import transformers.utils

    with contextlib.ExitStack() as patches:
        for name in UNUSED:
            patches.enter_context(patch.object(transformers.utils, f"is_{name}_available", lambda: False))
        yield


@contextlib.contextmanager
def _compiling_later() -> Iterator[None]:
    """Within the context, functions decorated with `torch.compile` are compiled when they are first called.

    The decorator itself imports torch's compiler, which takes two seconds.
    """
    original = torch.compile

    def compile_later(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(compile_later, **options)
        compiled = functools.cache(lambda: original(function, **options))

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            return (function if torch.compiler.is_compiling() else compiled())(*arguments, **named)

        return call

    torch.compile = compile_later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original
