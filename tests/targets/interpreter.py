"""Changes to Triton's interpreter for tests: closer to a GPU, and faster.

For versions 3.6 to 3.9. `hasten` does not change results.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np


def mend() -> None:
    """Correct four differences from a GPU.

    A computed loop bound is an array with a single element, which int() refuses from numpy 2.4 on.
    float32 must round to bfloat16 instead of truncating. A condition combined with a scalar is an
    integer, which 3.9 refuses as a mask. A row of a matmul has the same bits at any place in a
    tile. On some CPUs numpy's float32 matmul differs, so float64 sums are rounded once.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def convert_rounding(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if (source.name, target.name) != ("fp32", "bf16"):
            return convert(data, source, target, mode)
        bits = np.ascontiguousarray(data).view(np.uint32)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        return np.where(np.isnan(data), 0x7FC0, rounded >> 16).astype(np.uint16)

    def with_bool_mask(name: str, position: int) -> None:
        access = getattr(interpreter.InterpreterBuilder, name)

        def masked(self: Any, *args: Any, **named: Any) -> Any:
            mask = args[position]
            if isinstance(mask, np.ndarray):  # 3.6, for a descriptor's load
                mask = interpreter.TensorHandle(mask, tl.int1)
            if mask.data.dtype != np.bool_:
                mask = interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)
            return access(self, *args[:position], mask, *args[position + 1 :], **named)

        setattr(interpreter.InterpreterBuilder, name, masked)

    multiply = interpreter.InterpreterBuilder.create_dot

    def multiply_in_float64(self: Any, a: Any, b: Any, d: Any, *args: Any) -> Any:
        if not a.data.dtype == b.data.dtype == d.data.dtype == np.float32:
            return multiply(self, a, b, d, *args)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = multiply_in_float64
    interpreter._patch_lang_tensor = patch_with_index
    interpreter._convert_float = convert_rounding
    with_bool_mask("create_masked_load", 1)
    with_bool_mask("create_masked_store", 2)


def hasten() -> None:
    """Remove repeated work, which is two thirds of the interpreter's time.

    It patches ``triton.language`` at each launch and device function call, and creates a type and a
    shape for each value. Each operator checks its types. Integer sums are repeated in 64 bits for a
    disabled assertion.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _lay_over_once(interpreter)
    _keep_types(interpreter)
    _look_types_up(interpreter)
    _leave_spreading_to_numpy(interpreter)
    _convert_by_table(interpreter)
    _operate_directly(interpreter)
    _make_values_directly(interpreter)


class _Kept:
    """Keep the patched language, because only the interpreter runs here."""

    def restore(self) -> None:
        pass


def _lay_over_once(interpreter: Any) -> None:
    lay_over, kept = interpreter._patch_lang, _Kept()

    @functools.cache
    def once(function: Callable[..., Any]) -> _Kept:
        lay_over(function)
        return kept

    def patch(obj: Any, name: str, member: Any, builder: Any, *scope: Any) -> None:
        # A tensor method calls a free function with the semantic. Its wrapper only checks that the
        # argument exists.
        inner = getattr(member, "__wrapped__", member)
        semantic = interpreter.interpreter_semantic

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        if scope:
            scope[0].set_attr(obj, name, called)
        else:
            setattr(obj, name, called)

    interpreter._patch_lang = once
    interpreter._patch_attr = patch


def _keep_types(interpreter: Any) -> None:
    """Cache an object per shape and block type."""
    core = interpreter.tl.core
    make_block, unwrap = core.block_type.__init__, core._unwrap_if_constexpr
    blocks: dict[tuple[Any, ...], Any] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(unwrap(size) for size in shape))
        held = blocks.get(key)
        if held is None:
            make_block(self, element_ty, shape)
            self.sizes = key[1:]
            blocks[key] = self
        else:
            self.__dict__.update(held.__dict__)

    def with_element(self: Any, element_ty: Any) -> Any:
        return blocks.get((element_ty.name, *self.sizes)) or core.block_type(element_ty, self.shape)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = getattr(type, "sizes", ())
        held = shapes.get(sizes)
        if held is None:
            numel = core.constexpr(int(np.prod(sizes, dtype=np.int64)))
            held = shapes[sizes] = numel, core.tuple([core.constexpr(size) for size in sizes])
        self.numel, self.shape = held

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    core.block_type.__init__, core.block_type.with_element_ty = init_block, with_element
    core.block_type.to_ir = lambda self, builder: self
    core.tensor.__init__ = init_tensor
    core._unwrap_if_constexpr = unwrapped


def _look_types_up(interpreter: Any) -> None:
    """Cache type promotions, and integers as tensors."""
    semantic, kind = interpreter.TritonSemantic, interpreter.tl.core.dtype
    compute, constant, equal = semantic.computation_type_impl, semantic.scalar_constant, kind.__eq__
    cast = semantic.cast
    whole = frozenset(kind.SINT_TYPES + kind.UINT_TYPES)
    types: dict[tuple[Any, ...], Any] = {}
    constants: dict[tuple[str, int], Any] = {}

    def computed(self: Any, lhs: Any, one: bool, rhs: Any, other: bool, divides: bool) -> Any:
        key = (lhs.name, one, rhs.name, other, divides)
        held = types.get(key)
        if held is None:
            held = types[key] = compute(self, lhs, one, rhs, other, divides)
        return held

    def constant_once(self: Any, value: Any, dtype: Any) -> Any:
        if type(value) is not int:
            return constant(self, value, dtype)
        held = constants.get((dtype.name, value))
        if held is None:
            held = constants[dtype.name, value] = constant(self, value, dtype)
        return held

    def cast_once(self: Any, value: Any, dtype: Any, rounding: Any = None) -> Any:
        return value if value.dtype is dtype.scalar else cast(self, value, dtype, rounding)

    semantic.computation_type_impl, semantic.scalar_constant = computed, constant_once
    semantic.cast = cast_once
    kind.__eq__ = lambda self, other: self is other or equal(self, other)
    kind.is_int = lambda self: self.name in whole


def _leave_spreading_to_numpy(interpreter: Any) -> None:
    """Use numpy broadcasting instead of copies."""
    semantic, core = interpreter.TritonSemantic, interpreter.tl.core
    broadcast, check = semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl

    def spread(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    def of_shape(value: Any, held: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
        if held == sizes:
            return value
        return core.tensor(value.handle, core.block_type(value.dtype, [*sizes]))

    def paired(lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        one, other = getattr(lhs.type, "sizes", ()), getattr(rhs.type, "sizes", ())
        sizes = np.broadcast_shapes(one, other) if one and other else one or other
        return of_shape(lhs, one, sizes), of_shape(rhs, other, sizes)

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.broadcast_impl_value = paired
        try:
            return check(self, *args, **kwargs)
        finally:
            del self.broadcast_impl_value

    semantic.broadcast_impl_value = spread
    semantic.binary_op_type_checking_impl = checked


def _convert_by_table(interpreter: Any) -> None:
    """Look up numpy types in a table. Widen bfloat16 by a shift."""
    find, convert, kinds = interpreter._get_np_dtype, interpreter._convert_float, {}

    def find_once(kind: Any) -> np.dtype:
        held = kinds.get(kind.name)
        if held is None:
            held = kinds[kind.name] = find(kind)
        return held

    def widen(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if (source.name, target.name) != ("bf16", "fp32"):
            return convert(data, source, target, mode)
        return data.astype(np.uint32) << 16

    interpreter._get_np_dtype = find_once
    interpreter._convert_float = widen


ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
COMPARISONS = {
    **{"lt": np.less, "le": np.less_equal, "gt": np.greater},
    **{"ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal},
}
BITS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
WHOLE = {
    **{"lshift": np.left_shift, "rshift": np.right_shift, "mod": np.fmod},
    "floordiv": lambda lhs, rhs: (lhs - np.fmod(lhs, rhs)) // rhs,
}
INTEGERS = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"})
WHOLE_OR_FLOAT = INTEGERS | {"fp32"}
NUMBERS = {"int32": (int,), "int64": (int,), "uint32": (int,), "fp32": (int, float)}
"""Types of Python numbers that become the tensor's type."""
ADDRESSES = {"int32", "int64"}


def _operate_directly(interpreter: Any) -> None:
    """Apply an operator of two values of the same type without the checks of types.

    Other operands take Triton's path.
    """
    core = interpreter.tl.core
    tensor, handle_of, constexpr = core.tensor, interpreter.TensorHandle, core.constexpr
    blocks: dict[tuple[Any, ...], Any] = {}
    constants: dict[tuple[str, Any], np.ndarray] = {}

    def value_of(data: np.ndarray, element: Any, kind: Any) -> Any:
        handle = handle_of.__new__(handle_of)
        handle.data, handle.dtype, handle.attr = data, element, {}
        return tensor(handle, kind)

    def block_of(element: Any, *kinds: Any) -> Any:
        """Return the type of the elements in the kinds' common shape."""
        sizes = [getattr(kind, "sizes", ()) for kind in kinds]
        key = (element.name, *sizes)
        if key not in blocks:
            both = np.broadcast_shapes(*filter(None, sizes))
            blocks[key] = core.block_type(element, [*both]) if both else element
        return blocks[key]

    def constant(value: Any, dtype: Any) -> np.ndarray | None:
        name = dtype.name
        if type(value) not in NUMBERS.get(name, ()):
            return None
        if name != "fp32" and not (0 if name == "uint32" else -(2**31)) <= value < 2**31:
            return None
        found = constants.get((name, value)) if value else None
        if found is None:
            found = np.array([value], dtype=interpreter._get_np_dtype(dtype))
            if value:  # negative zero equals zero
                constants[name, value] = found
        return found

    def operands(lhs: Any, rhs: Any) -> tuple[np.ndarray, np.ndarray, Any] | None:
        """Return the data of both and the right type, or None for different types.

        Numpy widens int32 beside int64, as Triton does.
        """
        if type(rhs) is tensor:
            if lhs.dtype is not rhs.dtype and {lhs.dtype.name, rhs.dtype.name} != ADDRESSES:
                return None
            same = lhs.type is rhs.type
            return lhs.handle.data, rhs.handle.data, lhs.type if same else rhs.type
        data = constant(rhs.value if type(rhs) is constexpr else rhs, lhs.dtype)
        return None if data is None else (lhs.handle.data, data, lhs.type)

    def direct(slow: Any, operate: Any, names: frozenset[str], is_swapped: bool) -> Any:
        is_compared = operate in COMPARISONS.values()

        def run(self: Any, other: Any, **named: Any) -> Any:
            element = self.dtype
            pair = operands(self, other) if element.name in names else None
            if pair is None:
                return slow(self, other, **named)
            left, right, kind = pair
            if element.name == "int1" and not left.dtype == right.dtype == np.bool_:
                return slow(self, other, **named)
            data = operate(right, left) if is_swapped else operate(left, right)
            held = self.handle.dtype
            if kind is not self.type and kind.scalar is not element:
                held = element = core.int64
            if is_compared or kind is not self.type:
                kind = block_of(core.int1 if is_compared else element, self.type, kind)
            return value_of(data, held, kind)

        return run

    def moved(slow: Any) -> Any:
        """Addition, also of a pointer and an offset."""

        def run(self: Any, other: Any, **named: Any) -> Any:
            element = self.dtype
            if type(element) is not core.pointer_type:
                return slow(self, other, **named)
            kind = self.type
            if type(other) is not tensor:
                offset = constant(other.value if type(other) is constexpr else other, core.int32)
            else:
                is_signed = other.dtype.name in ("int32", "int64")
                offset, kind = other.handle.data if is_signed else None, other.type
            if offset is None:
                return slow(self, other, **named)
            width = max(1, element.element_ty.primitive_bitwidth // 8)
            data = self.handle.data + width * offset.astype(np.uint64)
            kind = self.type if kind is self.type else block_of(element, self.type, kind)
            return value_of(data, self.handle.dtype, kind)

        return run

    choose = interpreter.TritonSemantic.where

    def where(self: Any, condition: Any, x: Any, y: Any) -> Any:
        value = x if type(x) is tensor else y
        if type(value) is not tensor or condition.handle.data.dtype != np.bool_:
            return choose(self, condition, x, y)
        element, kinds, chosen = value.dtype, [condition.type], []
        for each in (x, y):
            if type(each) is not tensor:
                chosen.append(constant(each, element))
                continue
            kinds.append(each.type)
            chosen.append(each.handle.data if each.dtype is element else None)
        if chosen[0] is None or chosen[1] is None or condition.dtype is not core.int1:
            return choose(self, condition, x, y)
        held = y.handle.dtype if type(y) is tensor else element
        data = np.where(condition.handle.data, *chosen)
        return value_of(data, held.scalar, block_of(element, *kinds))

    interpreter.TritonSemantic.where = where
    patch = interpreter._patch_attr
    tables = (
        (ARITHMETIC, INTEGERS | {"fp16", "fp32"}, ("", "r")),
        (COMPARISONS, INTEGERS | {"fp16", "fp32"}, ("",)),
        (BITS, INTEGERS | {"int1"}, ("",)),
        (WHOLE, INTEGERS, ("",)),
        ({"truediv": np.divide}, frozenset({"fp32"}), ("", "r")),
    )

    def patch_directly(obj: Any, name: str, member: Any, builder: Any, *scope: Any) -> None:
        patch(obj, name, member, builder, *scope)
        if obj is not tensor:
            return
        for table, names, sides in tables:
            for side in sides:
                operate = table.get(name[2 + len(side) : -2])
                if operate is not None and name == f"__{side}{name[2 + len(side) : -2]}__":
                    made = direct(getattr(tensor, name), operate, names, side == "r")
                    setattr(tensor, name, moved(made) if name == "__add__" else made)

    interpreter._patch_attr = patch_directly


CASTS = {("fp32", "bf16"), ("bf16", "fp32"), ("fp32", "fp16"), ("fp16", "fp32")}
"""Casts of floats without a step between. Integers and float32 are cast to each other directly."""


def _make_values_directly(interpreter: Any) -> None:
    """Make ranges once. Add axes, cast and call device functions without the checks of types."""
    core, semantic, handle_of = (
        interpreter.tl.core,
        interpreter.TritonSemantic,
        interpreter.TensorHandle,
    )
    kernel = interpreter.InterpretedFunction
    spread, make_range, cast = semantic.expand_dims, semantic.arange, semantic.cast
    kinds: dict[tuple[Any, ...], Any] = {}
    ranges: dict[tuple[int, ...], Any] = {}
    functions: dict[Callable[..., Any], Callable[..., Any]] = {}

    def init_handle(self: Any, data: np.ndarray, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def range_once(self: Any, *bounds: int, **named: Any) -> Any:
        if any(value is not None for value in named.values()):
            return make_range(self, *bounds, **named)
        if bounds not in ranges:
            ranges[bounds] = make_range(self, *bounds)
        return ranges[bounds]

    def with_axis(self: Any, value: Any, axis: int) -> Any:
        sizes, element = getattr(value.type, "sizes", ()), value.type.scalar
        if not 0 <= axis <= len(sizes) != 0:
            return spread(self, value, axis)
        key = (element.name, axis, *sizes)
        if key not in kinds:
            kinds[key] = core.block_type(element, [*sizes[:axis], 1, *sizes[axis:]])
        data = value.handle.data[(slice(None),) * axis + (None,)]
        return core.tensor(handle_of(data, value.handle.dtype.scalar), kinds[key])

    def cast_directly(self: Any, value: Any, dtype: Any, rounding: Any = None) -> Any:
        source, target = value.dtype, dtype.scalar
        names = source.name, target.name
        if rounding is not None or not (names in CASTS or WHOLE_OR_FLOAT.issuperset(names)):
            return cast(self, value, dtype, rounding)
        if source is target:
            return value
        kind = value.type.with_element_ty(target) if value.type.is_block() else target
        return core.tensor(self.builder.cast_impl(value.handle, target), kind)

    def call(self: Any, *args: Any, **named: Any) -> Any:
        if self.fn not in functions:
            interpreter._patch_lang(self.fn)
            functions[self.fn] = self.rewrite()
        try:
            return functions[self.fn](*args, **named)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    handle_of.__init__, kernel.__call__ = init_handle, call
    semantic.arange, semantic.expand_dims, semantic.cast = range_once, with_axis, cast_directly
