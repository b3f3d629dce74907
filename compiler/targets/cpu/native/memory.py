"""Memory limits: the size of caches, and the decision to copy weights to large pages."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tilewright.compiler.targets.cpu.native.library import binding as lib
from tilewright.compiler.targets.cpu.native.program.mapping import LANES, whole
from tilewright.compiler.targets.cpu.native.settings import uses_large_pages
from tilewright.errors import CompileError

if TYPE_CHECKING:
    from tilewright.compiler.targets.interface.base import CompileOptions

_WORTH_COPYING, _SPARE = 16 << 20, 1 << 30
_LARGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"

_POSITIONS = 64
"""Cache chunk size in positions (source/caches.h)."""

REACH_BACK = 1024
"""Retained positions before a layer's window, for truncation (caches.h)."""


def memory_bytes() -> int:
    """Return the machine's memory in bytes, or the control group's limit if lower."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            return min(found, int(file.read()))
    except (OSError, ValueError):  # no control group, or no limit
        return found


def are_large_pages_worth(num_bytes: int) -> bool:
    """Return whether to copy weights from their file to 2 MB pages.

    Reads are up to twice as fast. The system must support large pages and have free memory, and
    small weights do not benefit. ``TILEWRIGHT_LARGE_PAGES=0`` disables copies: processes share file
    pages.
    """
    if not uses_large_pages() or num_bytes < _WORTH_COPYING:
        return False
    try:
        with open(_LARGE_PAGES, encoding="ascii") as file:
            gives = "[never]" not in file.read()
        with open("/proc/meminfo", encoding="ascii") as file:
            kib = next(line for line in file if line.startswith("MemAvailable")).split()[1]
    except (OSError, StopIteration):  # unsupported system
        return False
    return gives and num_bytes + _SPARE < min(int(kib) * 1024, memory_bytes())


def sequence_bytes(
    states: Sequence[lib.TwState], num_positions: int, windows: Sequence[int] = ()
) -> int:
    """Return the state bytes for a sequence with ``num_positions``. See :func:`check_room` for
    ``windows``.
    """
    own = zip(states, windows or [0] * len(states), strict=True)
    return kept_bytes(states) + sum(
        position_bytes([state]) * min(num_positions, retained_positions(window) or num_positions)
        for state, window in own
    )


def batch_that_fits(
    states: Sequence[lib.TwState], options: CompileOptions, memory: int, windows: Sequence[int]
) -> int:
    """Return ``max_batch``, reduced to the memory but not below ``least_batch``."""
    if options.least_batch is None:
        return options.max_batch
    size = sequence_bytes(states, whole(options.max_context, _POSITIONS), windows)
    return max(options.least_batch, min(options.max_batch, memory // max(1, size)))


def check_room(
    states: Sequence[lib.TwState],
    max_num_seqs: int,
    max_context: int,
    memory: int,
    windows: Sequence[int] = (),
) -> None:
    """Check that full caches fit in memory. ``windows`` has the attention window per state, 0 for
    none.

    Raises:
        CompileError: They do not fit. The message has the sequences and positions that fit.
    """

    def slot_of(num_positions: int) -> int:
        return sequence_bytes(states, num_positions, windows)

    slot = slot_of(whole(max_context, _POSITIONS))
    if slot * max_num_seqs <= memory:
        return
    chunks = range(_POSITIONS, max_context + 1, _POSITIONS)
    fitting = bisect_right(chunks, memory // max_num_seqs, key=slot_of)
    positions = chunks[fitting - 1] if fitting else 0
    allowed = []
    if memory // slot:
        allowed.append(f"up to {memory // slot} sequences (--max-num-seqs)")
    if positions:
        allowed.append(f"up to {positions} positions (--max-model-len)")
    raise CompileError(
        f"backend native: {max_num_seqs} sequences of {max_context} positions keep "
        f"{slot * max_num_seqs / 1e9:,.1f} GB, and the machine has {memory / 1e9:,.1f} GB; "
        f"allowed: {', or '.join(allowed) or 'a machine with more memory'}"
    )


class _ProgramStates(Protocol):
    """Instructions with their numbered states."""

    @property
    def instructions(self) -> Sequence[lib.TwInstruction]: ...
    @property
    def states(self) -> Sequence[lib.TwState]: ...


def windows_of(program: _ProgramStates, max_context: int) -> list[int]:
    """Return the attention window per state. 0: the whole context."""
    attends = [each for each in program.instructions if lib.OPS[each.op] == "attend"]
    own = {each.state: each.window for each in attends if 0 < each.window < max_context}
    return [own.get(state, 0) for state in range(len(program.states))]


def reach_back(windows: Sequence[int]) -> tuple[int, int]:
    """Return the retained positions in the smallest window, and the maximum rollback.

    Both are 0 without windows. After an abort, the state may have a few unreported positions.
    """
    retained = [retained_positions(each) for each in windows if each]
    return (min(retained), REACH_BACK - _POSITIONS) if retained else (0, 0)


def retained_positions(window: int) -> int:
    """Return a layer's retained positions per sequence, up to 2 MB more in reality. 0: all."""
    return window + REACH_BACK if window else 0


def position_bytes(states: Sequence[lib.TwState]) -> int:
    """Return the key and value bytes per position over all layers."""
    caches = (each for each in states if lib.STATES[each.kind] == "keys_values")
    return sum(
        2 * each.num_heads * _padded_bytes(whole(each.head_dim, LANES), lib.CACHES[each.cache])
        for each in caches
    )


def _padded_bytes(count: int, kind: str) -> int:
    """Return the bytes for ``count`` cache values, in whole blocks."""
    return {"fp32": 4 * count, "bf16": 2 * count, "bfp8": count + count // 16}[kind]


def kept_bytes(states: Sequence[lib.TwState]) -> int:
    """Return the constant-size state bytes per sequence over all layers."""
    found = 0
    for each in states:
        if lib.STATES[each.kind] == "window":
            found += 4 * each.head_dim * whole(each.num_heads, LANES)
        elif lib.STATES[each.kind] == "matrix":
            found += 4 * each.num_heads * each.head_dim * whole(each.value_dim, LANES)
    return found
