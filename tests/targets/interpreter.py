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
    """Correct three differences from a GPU.

    A computed loop bound is an array with a single element, which int() refuses from numpy 2.4 on.
    float32 must round to bfloat16 instead of truncating. A condition combined with a scalar is an
    integer, which 3.9 refuses as a mask.
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

    interpreter._patch_lang_tensor = patch_with_index
    interpreter._convert_float = convert_rounding
    with_bool_mask("create_masked_load", 1)
    with_bool_mask("create_masked_store", 2)


def hasten() -> None:
    """Remove repeated work, which is two thirds of the interpreter's time.

    It patches ``triton.language`` at each launch and device function call, creates a type and a
    shape for each value, and repeats integer sums in 64 bits for a disabled assertion.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _lay_over_once(interpreter)
    _keep_types(interpreter)
    _look_types_up(interpreter)
    _leave_spreading_to_numpy(interpreter)
    _convert_by_table(interpreter)


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

    semantic.computation_type_impl, semantic.scalar_constant = computed, constant_once
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
