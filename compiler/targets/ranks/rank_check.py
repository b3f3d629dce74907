"""Consistency check between ranks, every N steps if the environment enables it.

Diverged ranks give wrong results or hang later in a collective. The check reports them near the
cause. It depends on neither steps nor the transport.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from typing import Protocol, runtime_checkable

from tilewright.compiler.targets.interface.base import Executable
from tilewright.errors import ConfigError

VARIABLE = "TILEWRIGHT_CHECK_RANKS"
_USUAL, _MOST = 64, 1_000_000


def steps_between() -> int:
    """Return the number of steps between two checks, or 0 without checks.

    ``TILEWRIGHT_CHECK_RANKS=1`` selects 64. A larger number is used unchanged.

    Raises:
        ConfigError: The variable has another value.
    """
    text = os.environ.get(VARIABLE, "") or "0"
    if not text.isdecimal() or int(text) > _MOST:
        raise ConfigError(
            f"{VARIABLE} is {text!r}; allowed: 0, 1 (every {_USUAL} steps) to {_MOST}"
        )
    return _USUAL if int(text) == 1 else int(text)


@runtime_checkable
class Agrees(Protocol):
    """An executable with comparable state."""

    def agreed(self) -> bytes:
        """Return data equal on all ranks between two steps: slots, lengths, and input tokens known
        to all ranks.
        """


class StepChecksum:
    """The steps received by a rank: their number and a checksum."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._sum = 0

    def add(self, data: bytes) -> None:
        """Add a step."""
        self.num_steps += 1
        self._sum = zlib.crc32(data, self._sum)

    def summary(self, executable: Executable) -> bytes:
        """Return a text for comparison. It is equal on all ranks between the same two steps."""
        said = executable.agreed() if isinstance(executable, Agrees) else b""
        slots = hashlib.sha256(said).hexdigest()[:12]
        return f"{self.num_steps} steps {self._sum:08x}, slots {slots}".encode()
