"""Triton's interpreter (3.6.0, 3.7.1), several times as fast, with the same results to the bit.

The interpreter spends most of its time on types and shapes. There are few of them, but it makes them again for every
operation. Here each is made once. Two steps are left out: one computes whether an integer sum overflows, and uses the
answer only if `debug` is set; the other asks whether numpy's numbers are as wide as Triton's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any


def patch_once() -> None:
    """Make the interpreter quick from now on. Without Triton there is nothing to do."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    _keep_the_language_in_place(tl, interpreter)
    _make_types_once(tl.core, interpreter)
    _convert_types_once(tl, interpreter)
    # Rows of a program where kernels take row by row, and entries of a list that are read together: fewer steps.
    for module, rows in (("schemes.stored_rows", 128), ("triton.targets.order", 64), ("triton.logits", 64)):
        import_module(f"cce_kernels.{module}").ROWS = rows
    import_module("cce_kernels.filter.gather").ENTRIES = 16
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _keep_the_language_in_place(tl: Any, interpreter: Any) -> None:
    """A jitted function that calls another keeps the current names of `triton.language`."""
    patch: Callable[[Any], Any] = interpreter._patch_lang
    languages: dict[Callable[..., Any], list[Any]] = {}

    def patch_what_is_not(function: Any) -> Any:
        if function not in languages:
            named = function.__globals__.values()
            languages[function] = [value for value in named if value is tl or value is tl.core]
        if languages[function] and all(not tl.core.is_builtin(language.load) for language in languages[function]):
            return interpreter._LangPatchScope()  # nothing to restore
        return patch(function)

    interpreter._patch_lang = patch_what_is_not


class Shape(tuple[int, ...]):
    """A block's shape: a tuple with the additions of `tl.tuple` that Triton's broadcast needs."""

    @property
    def values(self) -> list[int]:
        return list(self)


def _make_types_once(core: Any, interpreter: Any) -> None:
    """Make the shape of a tensor and the members of a block's type once for each shape and element type."""
    unwrap, validate = core._unwrap_if_constexpr, core.validate_block_shape

    @cache
    def members(element: str, shape: tuple[int, ...]) -> tuple[int, str]:
        return validate(shape), f"<{shape}, {element}>"

    @cache
    def shaped(shape: tuple[int, ...]) -> Shape:
        return Shape(shape)

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        if type(shape) is Shape or (type(shape) is tuple and all(type(size) is int for size in shape)):
            self.shape = shaped(shape)
        else:
            self.shape = shaped(tuple(core._unwrap_shape(shape)))
        if not self.shape:
            raise TypeError("0d block_type is forbidden")
        self.numel, self.name = members(element_ty.name, self.shape)

    @cache
    def sizes(shape: tuple[int, ...]) -> tuple[Any, Any]:
        numel = 1
        for size in shape:
            numel *= size
        return core.constexpr(numel), core.tuple([core.constexpr(size) for size in shape])

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sizes(type.shape if type.is_block() else ())

    def same(self: Any, other: Any) -> bool:
        if self is other:
            return True
        other = unwrap(other)
        return isinstance(other, core.dtype) and self.name == other.name

    core.block_type.__init__, core.tensor.__init__ = make_block, make_tensor
    interpreter.TensorHandle.__post_init__ = lambda self: None
    core.dtype.__eq__, core.dtype.__hash__ = same, lambda self: hash(self.name)
    core.block_type.to_ir = lambda self, builder: self  # the interpreter has no others


def _convert_types_once(tl: Any, interpreter: Any) -> None:
    """Leave values alone that already have the requested type and shape; find numpy's types by name."""
    core, semantic = tl.core, type(interpreter.interpreter_semantic)
    numpy_type, cast, broadcast = interpreter._get_np_dtype, semantic.cast, semantic.broadcast_impl_value
    check, unwrap = semantic.binary_op_type_checking_impl, core._unwrap_if_constexpr
    numpy_types: dict[str, Any] = {}

    def named(dtype: Any) -> Any:
        if dtype.name not in numpy_types:
            numpy_types[dtype.name] = numpy_type(dtype)
        return numpy_types[dtype.name]

    def cast_what_differs(self: Any, value: Any, to: Any, *rest: Any) -> Any:
        return value if value.type.scalar is to.scalar else cast(self, value, to, *rest)

    def broadcast_what_differs(self: Any, left: Any, right: Any) -> Any:
        blocks = left.type.is_block(), right.type.is_block()
        if blocks == (False, False) or (blocks == (True, True) and left.type.shape == right.type.shape):
            return left, right
        return broadcast(self, left, right)

    def check_what_differs(self: Any, left: Any, right: Any, *pointers: bool, **how: bool) -> Any:
        if type(left) is type(right) is core.tensor and len(pointers) < 3 and not how:
            scalar = left.type.scalar
            if scalar is right.type.scalar and type(scalar) is core.dtype:
                return self.broadcast_impl_value(left, right)
        return check(self, left, right, *pointers, **how)  # a scalar, another type, or a quotient

    def unwrap_what_is_wrapped(x: Any) -> Any:
        kind = type(x)
        return x if kind is core.tensor or kind is int or x is None else unwrap(x)

    core._unwrap_if_constexpr = unwrap_what_is_wrapped
    interpreter._get_np_dtype = named
    semantic.binary_op_type_checking_impl = check_what_differs
    semantic.cast, semantic.broadcast_impl_value = cast_what_differs, broadcast_what_differs
