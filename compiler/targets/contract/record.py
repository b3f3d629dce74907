"""The numeric contract: what a target makes of every format and fidelity a graph asks for.

Imports no torch; `build_contract` makes one of a graph.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright.compiler.precision import effective_id

HONOURED, EMULATED, NOT_HONOURED = "honoured", "emulated", "not honoured"


@dataclass(frozen=True, slots=True)
class Meaning:
    """What one requested value comes to: a status, and the value that is really used."""

    status: str
    effective: str


AS_IT_IS = Meaning(NOT_HONOURED, "not rounded")
"""What a block adds to the residual stream, where a target does nothing to it on its own."""


@dataclass(frozen=True, slots=True)
class ContractEntry:
    """A field (``ff2 weights``, ``li_ff2 decode``), where, what was asked, what is done."""

    field: str
    layers: str
    requested: str
    meaning: Meaning

    def __str__(self) -> str:
        used = self.meaning.effective
        status = self.meaning.status
        shown = status if status == HONOURED and used == self.requested else f"{status} ({used})"
        where = f" [{self.layers}]" if self.layers else ""
        return f"{self.field}{where}: {self.requested}: {shown}"


@dataclass(frozen=True, slots=True)
class NumericContract:
    """What a target promises of every weight's arithmetic in one configuration.

    ``used``: (field, layers, effective value), whatever was asked for.
    """

    entries: tuple[ContractEntry, ...]
    used: tuple[tuple[str, str, str], ...]

    @property
    def effective_id(self) -> str:
        """Equal for configurations that come to the same numbers on this target."""
        return effective_id({"entries": json.dumps(self.used)})


@dataclass(frozen=True, slots=True)
class Meanings:
    """How a target carries out each setting: its answers to the numeric contract.

    ``weight`` is asked with (format, block axis), ``fidelity`` with (format, block axis, fidelity,
    phase), ``attention`` with (fidelity, phase); the phase is ``prefill`` or ``decode``.
    ``together``: what several answers to ``fidelity`` come to where one op makes those products;
    None: each stays as it is.
    """

    weight: Callable[[str, str], Meaning]
    fidelity: Callable[[str, str, str, str], Meaning]
    attention: Callable[[str, str], Meaning]
    kv_cache: Callable[[str], Meaning]
    activation: Callable[[str], Meaning]
    block_output: Callable[[str], Meaning] = lambda name: AS_IT_IS
    together: Callable[[Sequence[Meaning]], Meaning] | None = None
