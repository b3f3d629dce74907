"""Times of instructions in the native library's steps, if ``TILEWRIGHT_NATIVE_TIMES`` is set."""

from __future__ import annotations

import ctypes
import re
from collections import defaultdict

from tilewright.compiler.targets.cpu.native.library import binding as lib
from tilewright.compiler.targets.cpu.native.program.bundle import Packed


class Times:
    """Times of an engine's instructions until it closes. They include waits for other threads."""

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
        """Count a step."""
        self._num_steps += 1

    def text(self) -> str:
        """Return a line per kind of instruction: microseconds per step, and the number."""
        found: dict[str, list[int]] = defaultdict(list)
        for label, spent in zip(self._labels, self._spent, strict=True):
            found[label].append(spent)
        lines = [f"native: {self._num_steps} steps, microseconds a step"]
        for label, spent in sorted(found.items(), key=lambda each: -sum(each[1])):
            each_step = sum(spent) / max(1, self._num_steps) / 1000
            lines.append(f"{each_step:10.1f}  {len(spent):4d} x {label}")
        return "\n".join(lines)


def _common(name: str) -> str:
    """Return a weight's name without its layer number."""
    return re.sub(r"\.\d+\.", ".*.", name)
