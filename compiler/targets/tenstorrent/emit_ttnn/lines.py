"""How lines of an emitted ttnn file are made: variables, where values lie, marks, calls.

A value is known by the variable that holds it and by where it lies. What may differ between equal
layers is left as a mark that the caller fills in. Knows no instruction's meaning.
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

DTYPES = {"bf16": "ttnn.bfloat16", "bfp8": "ttnn.bfloat8_b", "bfp4": "ttnn.bfloat4_b"}
HEADS = "heads"
WIDTH = 100


@dataclass(slots=True)
class Marks:
    """Text that may differ between equal layers, by name."""

    found: dict[str, str] = field(default_factory=dict)

    def put(self, name: str, text: str) -> str:
        """What stands for ``text`` in a line; a name taken twice is numbered."""
        chosen, number = name, 2
        while chosen in self.found:
            chosen, number = f"{name}.{number}", number + 1
        self.found[chosen] = text
        return mark_of(chosen)


def mark_of(name: str) -> str:
    """The mark of a name in a line: characters that no line has otherwise."""
    return f"\N{LEFT DOUBLE ANGLE BRACKET}{name}\N{RIGHT DOUBLE ANGLE BRACKET}"


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of source; ``is_needed``: this layer needs it (written if any layer does)."""

    text: str
    is_needed: bool = True


def quoted(text: str) -> str:
    """A string literal, whatever ``text`` holds."""
    return json.dumps(text)


class SourceSection:
    """The lines of one section of a program; see emit_ttnn_ops for who calls these."""

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
        """Begin a section; ``prefix`` is what the names of its weights begin with in the model."""
        self.lines, self.marks, self._prefix = [], Marks(), prefix

    def end(self) -> TtValue:
        """Close a section: the one value that lives on is called ``x`` and lies where it should.

        Raises:
            CompileError: where several values are read later.
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
        """The variable of the last value made."""
        return self._names[self.program.instructions[self._index].out]

    # -- where values lie ----------------------------------------------------------------------

    def _home(self, value: TtValue) -> str:
        """The place that the program gives a value."""
        memory = value.memory
        if memory.layout == WIDTH_SHARDED:
            return f"columns({value.columns}, {memory.cores})"
        return "L1" if memory.buffer == L1 else "DRAM"

    def _open(self) -> str:
        """The places of values that are cut over nothing."""
        return "L1" if self.is_decode else "DRAM"

    def _at(self, value: TtValue, place: str) -> str:
        """The variable that holds ``value``, moved to ``place`` where it lies elsewhere."""
        name = self._names[value]
        if self._places[value] != place:
            self._call(name, "ttnn.to_memory_config", name, place)
            self._places[value] = place
        return name

    def _bind(self, value: TtValue, name: str, place: str) -> str:
        """A variable for ``value``: ``name``, or another if what holds it is still read."""
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
        """One call; an argument a line where it is longer than a line."""
        arguments = [*args, *(f"{name}={text}" for name, text in named.items())]
        start = f"{target} = {function}" if target else function
        line = f"{start}({', '.join(arguments)})"
        if len(self._shown(line)) + 4 > WIDTH:
            line = f"{start}(" + "".join(f"\n    {argument}," for argument in arguments) + "\n)"
        self._append(line)

    def _recast(self, name: str, dtype: str, *, needed: bool) -> None:
        """``name`` gets another format; the line is dropped where no layer needs it."""
        self._append(f"{name} = cast({name}, {dtype})", needed=needed)

    def _shown(self, line: str) -> str:
        """A line as it will be where layers are equal."""
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
        """``name`` gets the format of ``after``, where it has another."""
        dtype = self._dtype(instruction, after, "cast")
        self._recast(name, dtype, needed=before != after.format)


def _operands(instruction: TtInstruction) -> list[TtValue]:
    """The values it reads."""
    slots = (getattr(instruction, name, None) for name in ("x", "y", "q", "gate", "up"))
    return [each for each in slots if isinstance(each, TtValue)]
