"""What the tests of all targets get: Triton's interpreter, as close to a GPU as it can be."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def _mend_interpreter() -> None:
    """Three things in which the interpreters of Triton 3.6 to 3.9 are not what a GPU is.

    A loop's bound may be what a kernel computed: it is held as an array of one element, which int()
    refuses from numpy 2.4 on. And float32 is rounded to bfloat16, not truncated. And a condition
    joined with a scalar one is held as integers, which 3.9 refuses as a mask.
    """
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

        def masked(self: Any, *args: Any) -> Any:
            mask = args[position]
            as_bool = interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)
            return access(self, *args[:position], as_bool, *args[position + 1 :])

        setattr(interpreter.InterpreterBuilder, name, masked)

    interpreter._patch_lang_tensor = patch_with_index
    interpreter._convert_float = convert_rounding
    with_bool_mask("create_masked_load", 1)
    with_bool_mask("create_masked_store", 2)


if not torch.cuda.is_available():
    _mend_interpreter()
