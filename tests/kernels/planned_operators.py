"""The most frequent operations of Triton's interpreter, planned once for operands of the same types.

For every operation the interpreter finds anew into which types it converts the operands, and which type the result has.
A plan keeps the answers. It is made from a result of the interpreter's own operation, and is kept only if it gives that
result bit for bit. Where there is no plan, the interpreter's own operation runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

Data = Any  # an array of numpy
Own = Callable[..., Any]  # an operation of the interpreter
COMPARISONS: dict[str, Callable[[Data, Data], Data]] = {
    "gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
BITWISE: dict[str, Callable[[Data, Data], Data]] = {
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
DIVISIONS: dict[str, Callable[[Data, Data], Data]] = {
    "truediv": np.divide, "mod": np.fmod, "floordiv": lambda left, right: (left - np.fmod(left, right)) // right,
}  # fmt: skip
ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, **DIVISIONS}
FUNCTIONS = {**COMPARISONS, **BITWISE, **ARITHMETIC}
OF_NUMPY = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "fp16", "fp32", "fp64"}
MISSING = object()


@dataclass(frozen=True, slots=True)
class Plan:
    function: Callable[..., Data]  # of the operands' data
    dtype: Any  # of the result's handle
    result: dict[str, Any]  # the result's attributes, but for its handle


class Planner:
    """Makes planned operations from the interpreter's own."""

    def __init__(self, tl: Any, interpreter: Any) -> None:
        self.tensor, self.constexpr, self.dtype = tl.core.tensor, tl.core.constexpr, tl.core.dtype
        self.interpreter, self.semantic = interpreter, interpreter.interpreter_semantic
        self.handle = interpreter.TensorHandle

    def of_tensors(self) -> dict[str, Callable[[Own], Own]]:
        """By the name of a method of `tl.tensor`: a function of the interpreter's own."""
        found = {f"__{name}__": self._binary(name, reflected=False) for name in FUNCTIONS}
        found |= {f"__r{name}__": self._binary(name, reflected=True) for name in (*BITWISE, *ARITHMETIC)}
        return found | {"__getitem__": self._indexed, "to": self._converted}

    def of_language(self) -> dict[str, Callable[[Own], Own]]:
        """As `of_tensors`, for functions of `triton.language`."""
        return {"load": self._load}

    # ------------------------------------------------------------------------------------------------ operations
    def _binary(self, name: str, reflected: bool) -> Callable[[Own], Own]:
        plans: dict[Hashable, Plan | None] = {}
        tensor, constexpr, of, run, get = self.tensor, self.constexpr, self._types, self._run, plans.get

        def planned(own: Own) -> Own:
            def call(one: Any, other: Any) -> Any:
                if type(other) is constexpr:
                    other = other.value
                kind = type(other)
                if kind is tensor:
                    key = of(one), of(other)
                elif kind is int or kind is bool or kind is float:
                    key = of(one), kind, other or str(other)  # 0.0 equals -0.0
                else:
                    return own(one, other)
                plan = get(key, MISSING)
                if plan is MISSING:
                    result = own(one, other)
                    plans[key] = self._plan(self._function(name, one, other, reflected), result, one, other)
                    return result
                if plan is None:
                    return own(one, other)
                return run(plan, one.handle.data, other.handle.data if kind is tensor else None)

            return call

        return planned

    def _indexed(self, own: Own) -> Own:
        """x[:, None] and the like."""
        plans: dict[Hashable, Plan | None] = {}

        def call(one: Any, slices: Any) -> Any:
            index = slices if type(slices) is tuple else (slices,)
            if not all(each is None or each == slice(None) for each in index):
                return own(one, slices)
            key = self._types(one), tuple(each is None for each in index)
            plan = plans.get(key, MISSING)
            if plan is MISSING:
                result = own(one, slices)
                plans[key] = self._plan(lambda data: data[index], result, one)
                return result
            return own(one, slices) if plan is None else self._run(plan, one.handle.data)

        return call

    def _converted(self, own: Own) -> Own:
        plans: dict[Hashable, Plan | None] = {}

        def call(one: Any, dtype: Any, *rest: Any, **named: Any) -> Any:
            if rest or named or type(dtype) is not self.dtype:
                return own(one, dtype, *rest, **named)
            key = self._types(one), dtype.name
            plan = plans.get(key, MISSING)
            if plan is MISSING:
                result = own(one, dtype)
                plans[key] = self._plan(self._conversion(one, result), result, one)
                return result
            return own(one, dtype) if plan is None else self._run(plan, one.handle.data)

        return call

    def _load(self, own: Own) -> Own:
        plans: dict[Hashable, Plan | None] = {}

        def call(pointer: Any, mask: Any = None, other: Any = None, **named: Any) -> Any:
            masks, kind = type(mask) is self.tensor, type(other)
            ours = (masks or mask is None) and (kind in (int, float) or other is None)
            if not ours or named.keys() - {"eviction_policy", "cache_modifier"}:
                return own(pointer, mask, other, **named)
            key = self._types(pointer), masks and self._types(mask), kind, other or str(other), *named.items()
            plan = plans.get(key, MISSING)
            if plan is MISSING:
                result = own(pointer, mask, other, **named)
                plans[key] = self._plan(self._loading(pointer, mask, other), result, pointer, mask)
                return result
            if plan is None:
                return own(pointer, mask, other, **named)
            return self._run(plan, pointer.handle.data, mask.handle.data if masks else None)

        return call

    def _types(self, x: Any) -> tuple[str, ...]:
        """All that a plan depends on but for the numbers. The type of a handle may differ from its tensor's."""
        handle = x.handle
        if type(handle) is not self.handle:
            return (x.type.name,)
        return x.type.name, handle.dtype.name, handle.data.dtype.char

    def _run(self, plan: Plan, *data: Data) -> Any:
        handle, result = self.handle.__new__(self.handle), self.tensor.__new__(self.tensor)
        handle.data, handle.dtype, handle.attr = plan.function(*data), plan.dtype, {}
        result.__dict__.update(plan.result)
        result.handle = handle
        return result

    # ----------------------------------------------------------------------------------------------------- plans
    def _plan(self, function: Callable[..., Data] | None, result: Any, *operands: Any) -> Plan | None:
        """None if the interpreter's result is not this function of the operands' data."""
        handles = [x.handle if isinstance(x, self.tensor) else None for x in operands]
        if function is None or any(x is not None and type(x) is not self.handle for x in (result.handle, *handles)):
            return None
        data = [None if handle is None else handle.data for handle in handles]
        want, plain = result.handle.data, function
        if plain(*data).dtype != want.dtype:
            function = lambda *data: plain(*data).astype(want.dtype)  # noqa: E731
        got = function(*data)
        if got.shape != want.shape or got.tobytes() != want.tobytes():
            return None
        attributes = {name: value for name, value in vars(result).items() if name != "handle"}
        return Plan(function, result.handle.dtype, attributes)

    def _function(self, name: str, one: Any, other: Any, reflected: bool) -> Callable[..., Data] | None:
        """Of a binary operator. A number is part of the function."""
        pointers = [isinstance(x, self.tensor) and x.type.scalar.is_ptr() for x in (one, other)]
        if any(pointers):
            if name != "add" or pointers != [True, False] or not isinstance(other, self.tensor):
                return None
            size = max(1, one.handle.get_element_ty().primitive_bitwidth // 8)
            return lambda pointer, offset: pointer + size * offset.astype(np.uint64)
        operands = [self.semantic.to_tensor(x) if name in COMPARISONS else x for x in (one, other)]
        if reflected:
            operands.reverse()
        if name in BITWISE:
            converted = self.semantic.bitwise_op_type_checking_impl(*operands)
        else:
            converted = self.semantic.binary_op_type_checking_impl(*operands, div_or_mod=name in DIVISIONS)
        if name == "truediv" and not all(x.type.scalar.is_floating() for x in converted):
            return None
        mine, its = reversed(converted) if reflected else converted
        function, first = FUNCTIONS[name], self._conversion(one, mine)
        if not isinstance(other, self.tensor):
            number = its.handle.data.ravel()[:1].copy()
            if reflected:
                return first and (lambda x, _: function(number, first(x)))
            return first and (lambda x, _: function(first(x), number))
        second = self._conversion(other, its)
        if first is _same and second is _same:
            return function
        return first and second and (lambda x, y: function(first(x), second(y)))

    def _conversion(self, x: Any, converted: Any) -> Callable[[Data], Data] | None:
        """None if it is not one of numpy's or of cce_kernels.runtime.interpreter."""
        here, there, to = x.type.scalar, converted.type.scalar, converted.handle.data.dtype
        if {here.name, there.name} == {"fp32", "bf16"}:
            return lambda data: self.interpreter._convert_float(data, here, there, None).view(to)
        if here == there or (here.name in {*OF_NUMPY, "int1"} and there.name in OF_NUMPY):
            return _same if x.handle.data.dtype == to else lambda data: data.astype(to)
        return None

    def _loading(self, pointer: Any, mask: Any, other: Any) -> Callable[..., Data] | None:
        element = pointer.type.scalar.element_ty
        if type(pointer.handle) is not self.handle or element.name not in OF_NUMPY | {"bf16"}:
            return None
        to, load = self.interpreter._get_np_dtype(element), self.interpreter._interpreter.load
        shape, number = pointer.handle.data.shape, self.semantic.cast(self.semantic.to_tensor(other or 0), element)
        others, every = np.full(shape, number.handle.data, to), np.ones(shape, bool)
        if mask is None:
            return lambda pointers, _: load(pointers, every, others, to)
        if mask.handle.data.shape == shape:
            return lambda pointers, masks: load(pointers, masks, others, to)
        return lambda pointers, masks: load(pointers, np.broadcast_to(masks, shape), others, to)


def _same(data: Data) -> Data:
    return data
