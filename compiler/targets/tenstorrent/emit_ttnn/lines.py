"""Source lines of an emitted ttnn file: variables, memory places, marks and calls.

A value has a variable and a memory place. A mark replaces text that may differ between layers; the
caller fills marks in. Excludes the meaning of instructions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from tilewright.compiler.targets.tenstorrent.program.instructions import (
    DECODE,
    L1,
    WIDTH_SHARDED,
    ComputeConfig,
    DeviceProgram,
    TtInstruction,
    TtValue,
    TtWeight,
    class_name,
)
from tilewright.errors import CompileError

DTYPES = {
    "fp32": "ttnn.float32",
    "bf16": "ttnn.bfloat16",
    "bfp8": "ttnn.bfloat8_b",
    "bfp4": "ttnn.bfloat4_b",
}
HEADS = "heads"
_SLOTS = ("x", "y", "q", "gate", "up", "a", "b", "experts", "weights")
WIDTH = 100


@dataclass(slots=True)
class Marks:
    """Text that may differ between layers, by mark name."""

    found: dict[str, str] = field(default_factory=dict)

    def put(self, name: str, text: str) -> str:
        """Store ``text`` and return its mark. A number is added to a name in use."""
        chosen, number = name, 2
        while chosen in self.found:
            chosen, number = f"{name}.{number}", number + 1
        self.found[chosen] = text
        return mark_of(chosen)


def mark_of(name: str) -> str:
    """Return the mark for a name. Its quotation marks occur in no other source text."""
    return f"\N{LEFT DOUBLE ANGLE BRACKET}{name}\N{RIGHT DOUBLE ANGLE BRACKET}"


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A source line. ``is_needed``: this layer needs the line. The file has the line if any layer
    needs the line.
    """

    text: str
    is_needed: bool = True


def quoted(text: str) -> str:
    """Return ``text`` as a string literal. Any character is allowed."""
    return json.dumps(text)


class SourceSection:
    """Source lines for one section. Subclasses write the instructions; see ``ops.py``."""

    def __init__(self, program: DeviceProgram) -> None:
        self.program = program
        self.is_decode = program.phase == DECODE
        self.lines: list[SourceLine] = []
        self.marks = Marks()
        self._names: dict[TtValue, str] = {}
        self._places: dict[TtValue, str] = {}
        self._last_use = {
            operand: index
            for index, each in enumerate(program.instructions)
            for operand in _operands(each)
        }
        self._index = 0
        self._prefix = ""

    def start(self, prefix: str) -> None:
        """Begin a section. ``prefix`` is its weight names' common prefix in the model."""
        self.lines, self.marks, self._prefix = [], Marks(), prefix

    def end(self) -> TtValue:
        """End a section. Move its live value to the memory place of the program, in variable ``x``.

        Raises:
            CompileError: Later sections read several values.
        """
        alive = [v for v in self._names if self._last_use.get(v, -1) > self._index]
        if len(alive) != 1:
            raise CompileError(
                f"{len(alive)} values pass from one layer to the next; allowed in a ttnn file: "
                "one, the residual stream"
            )
        (value,) = alive
        name = self._at(value, self._home(value))
        if name != "x":
            self._append(f"x = {name}")
        self._names = {value: "x"}
        return value

    def result(self) -> str:
        """Return the variable with the last result."""
        return self._names[self.program.instructions[self._index].out]

    # -- memory places -----------------------------------------------------------------------------

    def _home(self, value: TtValue) -> str:
        """Return the memory place that the program assigns to a value."""
        memory = value.memory
        if memory.layout == WIDTH_SHARDED:
            return f"columns({value.columns}, {memory.cores})"
        return "L1" if memory.buffer == L1 else "DRAM"

    def _open(self) -> str:
        """Return the memory place of interleaved values."""
        return "L1" if self.is_decode else "DRAM"

    def _at(self, value: TtValue, place: str) -> str:
        """Return the variable of ``value``. Move the value to ``place`` if necessary."""
        name = self._names[value]
        if self._places[value] != place:
            self._call(name, "ttnn.to_memory_config", name, place)
            self._places[value] = place
        return name

    def _together(self, first: TtValue, second: TtValue) -> tuple[str, str, str]:
        """Return the variables of two values and their common memory."""
        memory = self._places[first]
        if memory != self._places[second]:
            memory = self._open()
        return self._at(first, memory), self._at(second, memory), memory

    def _bind(self, value: TtValue, name: str, place: str) -> str:
        """Return a variable for ``value``: ``name``, with a number if a live value uses the
        name.
        """
        taken = {
            self._names[v]
            for v in self._names
            if v != value and self._last_use.get(v, -1) > self._index
        }
        chosen, number = name, 2
        while chosen in taken:
            chosen, number = f"{name}_{number}", number + 1
        self._names = {v: n for v, n in self._names.items() if n != chosen}
        self._names[value], self._places[value] = chosen, place
        return chosen

    # -- text ----------------------------------------------------------------------------------

    def _append(self, text: str, *, needed: bool = True) -> None:
        self.lines.append(SourceLine(text, needed))

    def _call(self, target: str, function: str, *args: str, **named: str) -> None:
        """Append one call, with one argument a line if the line is too long."""
        arguments = [*args, *(f"{name}={text}" for name, text in named.items())]
        start = f"{target} = {function}" if target else function
        line = f"{start}({', '.join(arguments)})"
        if len(self._shown(line)) + 4 > WIDTH:
            line = f"{start}(" + "".join(f"\n    {argument}," for argument in arguments) + "\n)"
        self._append(line)

    def _recast(self, name: str, dtype: str, *, needed: bool) -> None:
        """Append a cast of ``name``. The line is omitted if no layer needs it."""
        self._append(f"{name} = cast({name}, {dtype})", needed=needed)

    def _shown(self, line: str) -> str:
        """Return a line with all marks replaced by this layer's text."""
        for name, text in self.marks.found.items():
            line = line.replace(mark_of(name), text)
        return line

    def _tail(self, name: str) -> str:
        if f"{name}." == self._prefix:  # the layer itself
            return ""
        assert name.startswith(self._prefix), f"{name} is no part of {self._prefix}"
        return name[len(self._prefix) :]

    def _weight(self, weight: TtWeight) -> str:
        return f"w[{quoted(self._tail(weight.name))}]"

    def _mark(self, instruction: TtInstruction, what: str, text: str) -> str:
        parts = (self.program.phase, self._tail(instruction.fqn), class_name(instruction), what)
        return self.marks.put(".".join(part for part in parts if part).lower(), text)

    def _dtype(self, instruction: TtInstruction, value: TtValue, what: str = "dtype") -> str:
        return self._mark(instruction, what, DTYPES[value.format])

    def _fidelity(self, instruction: TtInstruction, compute: ComputeConfig) -> str:
        return self._mark(instruction, "fidelity", compute.name.upper())

    def _cast(self, instruction: TtInstruction, name: str, before: str, after: TtValue) -> None:
        """Append a cast of ``name`` to the format of ``after`` if the format ``before`` differs."""
        dtype = self._dtype(instruction, after, "cast")
        self._recast(name, dtype, needed=before != after.format)


def _operands(instruction: TtInstruction) -> list[TtValue]:
    """Return the values that an instruction reads."""
    slots = (getattr(instruction, name, None) for name in _SLOTS)
    return [each for each in slots if isinstance(each, TtValue)]
