"""Where a step's time goes: each instruction's nanoseconds, where ``TILEWRIGHT_NATIVE_TIMES`` asks
for them; knows the library's counters and the weight names.
"""

from __future__ import annotations

import ctypes
import re
from collections import defaultdict

from tilewright.compiler.targets.cpu.native.library import binding as lib
from tilewright.compiler.targets.cpu.native.program.bundle import Packed


class Times:
    """Counts an engine's instructions while it lives; a thread's wait for others is in them."""

    def __init__(self, engine: int, packed: Packed) -> None:
        names = [each.name for each in packed.tensors]
        self._labels = [
            lib.OPS[each.op] + (f" {_common(names[each.weight])}" if each.weight >= 0 else "")
            for each in packed.instructions
        ]
        self._spent = (ctypes.c_int64 * len(self._labels))()
        self._num_steps = 0
        lib.library().tw_times(engine, self._spent)

    def count_step(self) -> None:
        """Count one more step."""
        self._num_steps += 1

    def text(self) -> str:
        """A line for each kind of instruction: microseconds a step, and how many there are."""
        found: dict[str, list[int]] = defaultdict(list)
        for label, spent in zip(self._labels, self._spent, strict=True):
            found[label].append(spent)
        lines = [f"native: {self._num_steps} steps, microseconds a step"]
        for label, spent in sorted(found.items(), key=lambda each: -sum(each[1])):
            each_step = sum(spent) / max(1, self._num_steps) / 1000
            lines.append(f"{each_step:10.1f}  {len(spent):4d} x {label}")
        return "\n".join(lines)


def _common(name: str) -> str:
    """A weight's name, whatever its layer."""
    return re.sub(r"\.\d+\.", ".*.", name)
