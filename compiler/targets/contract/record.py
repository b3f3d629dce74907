"""The numeric contract: a target's implementation of requested formats and fidelities.

Imports no torch. `build_contract` makes a contract from a graph.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright.compiler.precision import effective_id

HONOURED, EMULATED, NOT_HONOURED = "honoured", "emulated", "not honoured"


@dataclass(frozen=True, slots=True)
class Meaning:
    """A requested value's implementation: a status and the effective value."""

    status: str
    effective: str


AS_IT_IS = Meaning(NOT_HONOURED, "not rounded")
"""Default for block outputs: the target does not round them separately."""


@dataclass(frozen=True, slots=True)
class ContractEntry:
    """A contract line: field (``ff2 weights``, ``li_ff2 decode``), layers, requested value,
    implementation.
    """

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
    """A target's arithmetic for every weight in a configuration.

    Attributes:
        entries: Lines with requested and effective values.
        used: Field, layers and effective value, regardless of the request.
    """

    entries: tuple[ContractEntry, ...]
    used: tuple[tuple[str, str, str], ...]

    @property
    def effective_id(self) -> str:
        """Return a hash, equal for configurations with equal results on this target."""
        return effective_id({"entries": json.dumps(self.used)})


@dataclass(frozen=True, slots=True)
class Meanings:
    """A target's answers for the numeric contract. The phase is ``prefill`` or ``decode``.

    Attributes:
        weight: From format and block axis.
        fidelity: From format, block axis, fidelity and phase.
        attention: From fidelity and phase.
        kv_cache: From format.
        v_cache: From format, for values in another format than keys. None: keys and values have
            the keys' format.
        activation: From format.
        block_output: From format.
        together: Combines fidelity answers if a single op does several matmuls. None: no
            combination.
    """

    weight: Callable[[str, str], Meaning]
    fidelity: Callable[[str, str, str, str], Meaning]
    attention: Callable[[str, str], Meaning]
    kv_cache: Callable[[str], Meaning]
    activation: Callable[[str], Meaning]
    block_output: Callable[[str], Meaning] = lambda name: AS_IT_IS
    together: Callable[[Sequence[Meaning]], Meaning] | None = None
    v_cache: Callable[[str], Meaning] | None = None
