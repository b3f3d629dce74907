"""Whether ranks still agree, compared every so many steps where the environment asks for it.

A rank that has gone another way answers wrong, or hangs the others in an exchange much later; this
finds it near its cause. It knows neither steps nor how ranks are reached.
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
    """How many steps lie between two comparisons: 64 for ``TILEWRIGHT_CHECK_RANKS=1``, a larger
    number for itself; 0 where ranks are not compared.

    Raises:
        ConfigError: for anything else.
    """
    text = os.environ.get(VARIABLE, "") or "0"
    if not text.isdecimal() or int(text) > _MOST:
        raise ConfigError(
            f"{VARIABLE} is {text!r}; allowed: 0, 1 (every {_USUAL} steps) to {_MOST}"
        )
    return _USUAL if int(text) == 1 else int(text)


@runtime_checkable
class Agrees(Protocol):
    """An executable that says where it is."""

    def agreed(self) -> bytes:
        """What every rank has alike between two steps: seats, how far each is, and the tokens read
        next where all ranks know them.
        """


class Trace:
    """What a rank was told so far: the number of steps and a checksum of their bytes."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._sum = 0

    def add(self, told: bytes) -> None:
        """Note a step."""
        self.num_steps += 1
        self._sum = zlib.crc32(told, self._sum)

    def summary(self, executable: Executable) -> bytes:
        """What all ranks must say alike between the same two steps."""
        said = executable.agreed() if isinstance(executable, Agrees) else b""
        seats = hashlib.sha256(said).hexdigest()[:12]
        return f"{self.num_steps} steps {self._sum:08x}, seats {seats}".encode()
