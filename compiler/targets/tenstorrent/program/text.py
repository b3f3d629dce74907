"""Text of a program: a line per instruction, and per weight or cache at its first use."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from tilewright.compiler.mesh import Split
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    Cache,
    ComputeConfig,
    CreateHeads,
    DeviceProgram,
    Route,
    TtInstruction,
    TtSequenceState,
    TtValue,
    TtWeight,
    UpdateCache,
    class_name,
)

_SKIPPED = ("out", "fqn", "layer")
# Values that a listing omits.
_DEFAULTS = {("factor", 1.0), ("limit", 0.0), ("alpha", 1.0)}
_DECLARED = TtWeight | Cache | TtSequenceState


def program_text(program: DeviceProgram, *, layer: int | None = None) -> str:
    """Return the text of a program, or of a layer's instructions and their inputs.

    Example line: ``%5: bf16[32x960] @ l1:width_sharded/30 = matmul(%4, w3, lofi, ...)``. Shapes are
    in elements per chip. After a shape, ``/r`` means sharded over mesh axis ``r``, and ``+r`` means
    partial sums over this axis.
    """
    chosen = [each for each in program.instructions if layer is None or each.layer == layer]
    lines = [
        f"{program.phase} on {program.device} {program.mesh}: batch {program.batch}, "
        f"length {program.length}, context {program.context}"
    ]
    if layer is None:
        lines += [_declaration(value) for value in program.inputs]
    names = {value: f"%{value.name}" for value in program.inputs}
    declared: set[TtWeight | Cache | TtSequenceState] = set()
    body = []
    for instruction in chosen:
        for _, operand in _operands(instruction):
            if isinstance(operand, _DECLARED) and operand not in declared:
                declared.add(operand)
                lines.append(_declaration(operand))
        body.append(_line(instruction, names))
    return "\n".join(lines + body) + "\n"


def _line(instruction: TtInstruction, names: dict[TtValue, str]) -> str:
    """Return an instruction's line. Number values by first use."""

    def name_of(value: TtValue) -> str:
        return names.setdefault(value, f"%{len(names)}")

    opcode = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", class_name(instruction)).lower()
    made = _made(instruction)
    arguments = [
        _argument(name, operand, name_of)
        for name, operand in _operands(instruction)
        if operand not in made
    ]
    call = f"{opcode}({', '.join(each for each in arguments if each)})"
    if not made:
        return call
    return f"{', '.join(_declaration(value, name_of) for value in made)} = {call}"


def _made(instruction: TtInstruction) -> tuple[TtValue, ...]:
    """Return an instruction's results, none for a cache update."""
    if isinstance(instruction, UpdateCache):
        return ()
    if isinstance(instruction, CreateHeads):
        return instruction.out, instruction.k, instruction.v
    if isinstance(instruction, Route):
        return instruction.out, instruction.experts
    return (instruction.out,)


def _operands(instruction: TtInstruction) -> list[tuple[str, Any]]:
    return [
        (field.name, getattr(instruction, field.name))
        for field in dataclasses.fields(instruction)
        if field.name not in _SKIPPED
    ]


def _argument(name: str, operand: Any, name_of: Callable[[TtValue], str]) -> str:
    if isinstance(operand, TtValue):
        return name_of(operand)
    if isinstance(operand, _DECLARED):
        return operand.name
    if isinstance(operand, ComputeConfig):
        return operand.name
    if operand is None or operand is False or operand == "" or (name, operand) == ("num_heads", 0):
        return ""
    if (name, operand) in _DEFAULTS:
        return ""
    return f"{name}={operand:g}" if isinstance(operand, float) else f"{name}={operand}"


def _declaration(
    operand: TtValue | TtWeight | Cache | TtSequenceState,
    name_of: Callable[[TtValue], str] = lambda value: f"%{value.name}",
) -> str:
    if isinstance(operand, TtValue):
        axis = f"/{operand.over}" if operand.over else ""
        added = f"+{operand.partial}" if operand.partial else ""
        shape = f"{operand.format}[{operand.rows}x{operand.columns}]"
        return f"{name_of(operand)}: {shape}{axis}{added} @ {operand.memory}"
    if isinstance(operand, Cache):
        shape = f"{operand.num_pages}x{operand.num_heads}x{operand.page}x{operand.head_dim}"
        return (
            f"{operand.name}: {operand.format}[{shape}]{_axis_suffix(operand.over, operand.split)}"
        )
    if isinstance(operand, TtSequenceState):
        shape = "x".join(str(size) for size in (operand.num_slots, *operand.shape))
        return f"{operand.name}: fp32[{shape}]{'/' + operand.over if operand.over else ''}"
    rows = _axis_suffix(operand.in_over, operand.in_split)
    columns = _axis_suffix(operand.out_over, operand.out_split)
    experts = f"{operand.num_experts}x" if operand.num_experts else ""
    shape = f"{operand.format}[{experts}{operand.rows}{rows}x{operand.columns}{columns}]"
    return f"{operand.name}: {shape} @ {operand.memory}"


def _axis_suffix(over: str, split: Split | None) -> str:
    """Return ``/r``, and the share of zeros if there are zeros."""
    if not over or split is None:
        return ""
    zeros = sum(run.count for share in split.shares for run in share if run.start is None)
    return f"/{over}({zeros} of {split.size * len(split.shares)} zeros)" if zeros else f"/{over}"
