"""Where a step's values lie: rows that are put in place of a buffer's own."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler.targets.cuda.steps.buffers import Buffers
from tilewright.compiler.targets.program.instructions import (
    OPERAND,
    Buffer,
    BufferView,
    KernelProgram,
)


def buffers(width: int) -> Buffers:
    """Three rows of one buffer of operands."""
    flat = [torch.zeros(3 * 256, dtype=torch.bfloat16)]
    return Buffers(KernelProgram((), (Buffer(OPERAND, width),)), flat, 3)


def test_values_are_not_copied_until_other_columns_are_asked_for() -> None:
    step, place = buffers(128), BufferView(0, 128)
    values = torch.randn(3, 128).bfloat16()
    step.put(place, values)
    assert step.view(place).data_ptr() == values.data_ptr()
    assert torch.equal(step.part(slice(1, 2)).view(place), values[1:2])
    other = step.view(BufferView(0, 64, 64, 128))
    assert torch.equal(other, values[:, 64:])
    assert step.view(place).data_ptr() != values.data_ptr()
    assert torch.equal(step.view(place), values)


@pytest.mark.parametrize("how", ["padded", "apart", "float32"])
def test_values_that_lie_otherwise_are_copied(how: str) -> None:
    """Rows of whole tiles, rows between other columns, another type"""
    width = 100 if how == "padded" else 128
    step, place = buffers(width), BufferView(0, width)
    values = torch.randn(3, width)
    values = values if how == "float32" else values.bfloat16()
    given = torch.nn.functional.pad(values, (0, 4))[:, :width] if how == "apart" else values
    step.put(place, given)
    assert step.view(place).data_ptr() != given.data_ptr()
    assert torch.equal(step.view(place), values.bfloat16())


def test_views_are_made_once_until_their_values_change() -> None:
    step, whole = buffers(128), BufferView(0, 128)
    first = step.view(whole)
    assert step.view(BufferView(0, 128)) is first
    assert step.part(slice(1, 2)).view(whole).shape == (1, 128)
    values = torch.randn(3, 128).bfloat16()
    step.put(whole, values)
    assert torch.equal(step.view(whole), values)
    left = BufferView(0, 64, 0, 128)
    step.alias(whole, left)
    assert torch.equal(step.view(whole), values[:, :64])
