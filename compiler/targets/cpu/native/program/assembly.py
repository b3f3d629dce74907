"""The library's instructions under construction, with their tensors and states."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from tilewright.compiler.ir.info import Compute
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.targets.cpu.native.library import binding as lib
from tilewright.compiler.targets.cpu.native.numerics import VECTOR, arithmetic, storage_format
from tilewright.compiler.targets.cpu.native.program.mapping import LANES
from tilewright.compiler.targets.cpu.native.program.panels import num_panels
from tilewright.compiler.targets.cpu.native.program.weights import NativeTensorSpec
from tilewright.compiler.targets.program.instructions import BufferView


@dataclass(slots=True)
class Assembly:
    """Instructions with numbered tensors and states."""

    exact: bool
    wanted: dict[NativeTensorSpec, int] = field(default_factory=dict)
    states: list[lib.TwState] = field(default_factory=list)
    instructions: list[lib.TwInstruction] = field(default_factory=list)
    num_experts: int = 0  # for the current router
    top_k: int = 0

    def tensor(self, wanted: NativeTensorSpec) -> int:
        """Return a tensor's number. A new tensor gets the next number."""
        return self.wanted.setdefault(wanted, len(self.wanted))

    def weight(self, recipe: WeightRecipe, *, paired: bool = False) -> int:
        """Return the number of a weight in panels."""
        return self.tensor(NativeTensorSpec(recipe, storage_format(recipe), paired))

    def vector(self, recipe: WeightRecipe) -> int:
        """Return the number of a norm or constant."""
        return self.tensor(NativeTensorSpec(recipe, VECTOR))

    def state(self, state: lib.TwState) -> int:
        """Add a state and return its number."""
        self.states.append(state)
        return len(self.states) - 1

    def bias(self, recipe: WeightRecipe | None, num_rows: int, *, paired: bool) -> int:
        """Return the number of a matmul's bias, or -1."""
        if recipe is None:
            return -1
        lanes = num_panels(num_rows, paired=paired) * LANES
        return self.tensor(NativeTensorSpec(recipe, VECTOR, paired, lanes))

    def expert_bias(self, recipe: WeightRecipe | None, *, paired: bool) -> int:
        """Return the number of experts' biases ``[E, O, 1]``, or -1."""
        if recipe is None:
            return -1
        num_experts, num_rows, _ = recipe.shape
        lanes = num_experts * num_panels(num_rows, paired=paired) * LANES
        return self.tensor(NativeTensorSpec(recipe, VECTOR, paired, lanes))

    def append(self, op: str, out: BufferView | None, **fields: Any) -> None:
        """Append an instruction. Unnamed fields are unused."""
        unused = dict.fromkeys(("weight", "norm", "bias", "other", "state"), -1)
        places = {name: place_of(None) for name in ("x", "y", "z", "gate")} | {"factor": 1.0}
        each = lib.TwInstruction(
            op=lib.OPS.index(op), out=place_of(out), **{**unused, **places, **fields}
        )
        self.instructions.append(each)


def place_of(place: BufferView | None) -> lib.TwPlace:
    """Convert columns to the library's form. None: no columns."""
    if place is None:
        return lib.TwPlace(-1, 0, 0)
    return lib.TwPlace(place.buffer, place.first, place.width)


def arithmetics_of(kind: str, compute: Compute, *, exact: bool) -> ctypes.Array[ctypes.c_int32]:
    """Return the arithmetic for prefill and decode."""
    found = (arithmetic(kind, each, exact=exact) for each in (compute.prefill, compute.decode))
    return (ctypes.c_int32 * 2)(*map(lib.ARITHMETICS.index, found))
