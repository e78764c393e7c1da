"""Import one module of FLA without its other layers and models: a second instead of six."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from pkgutil import extend_path
from types import FunctionType, ModuleType
from typing import Any

import torch

from linrnn.config.fla import fla_models
from linrnn.models import tuning

PACKAGES = ("fla", "fla.layers", "fla.models", "fla.ops")  # their `__init__` imports everything below them

# What transformers imports for losses of object detection, its quantizer, assisted generation and images.
UNUSED = ("scipy", "torchao", "sklearn", "torchvision")


def import_fla(module: str) -> Any:
    """Import a module of FLA without FLA's warnings on a machine without a GPU. Its kernels get the stored choices."""
    if module in sys.modules:
        return importlib.import_module(module)  # after another thread that imports it
    if "fla" not in sys.modules:
        _add_packages()
    from linrnn.models.cpu_ops.compiler import without_compiler  # its package imports this module

    compiler = contextlib.nullcontext if torch.cuda.is_available() else without_compiler
    with warnings.catch_warnings(), _without_unused_packages(), compiler():
        warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
        warnings.filterwarnings("ignore", message="Flash Attention is not installed")
        found = importlib.import_module(module)
    tuning.adopt()
    return found


def fla_classes(model: str) -> tuple[Any, Any]:
    """The class of the causal language model with this `model_type` of FLA's, and the class of its configuration."""
    module = import_fla(f"fla.models.{fla_models().get(model, model)}")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of from_pretrained and save_pretrained
    causal_lm = getattr(module, next(name for name in module.__all__ if name.endswith("ForCausalLM")))
    return causal_lm, causal_lm.config_class


def calling(function: Callable[..., Any], others: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """A copy of a function of FLA's that calls `others` where FLA's calls what has their names in its module.

    FLA's function stays as it is. The copy's names belong to no module, so that torch.compile looks them up in it.
    """
    assert isinstance(function, FunctionType)
    names = {name: value for name, value in function.__globals__.items() if name != "__name__"}
    copy = FunctionType(
        function.__code__, names | others, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


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
    """Within the context, `UNUSED` cannot be imported, as if they were not installed. All together take three seconds.

    FLA's models use none of them. What transformers asks meanwhile, it takes as not installed from then on.
    """
    asked = "transformers" in sys.modules  # then it has found them, and imports them
    hidden = [name for name in UNUSED if name not in sys.modules and not asked]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # Python's way to refuse an import
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
