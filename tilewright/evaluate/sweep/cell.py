"""One cell of a sweep: a single run of the demo, named by all that its figures depend on.

Knows the demo's options; how a cell is run, kept or judged is not known here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Literal

from tilewright.compiler.devices import target_options
from tilewright.evaluate.results.keys import CELL, to_keys

METHODS = ("none", "rtn", "imatrix", "gptq")
"""Values of the dimension ``calibration:``. ``none`` is the target's own round to nearest."""

CellKind = Literal["speed", "accuracy"]

_ID_DIGITS = 12
_NO_IDENTITY = (
    *("model", "model_name", "heading", "precision", "part"),
    *("weight_bytes", "step_bytes", "is_kept"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A run of ``tilewright bench`` in a process of its own.

    Attributes:
        model: what ``--model`` takes; ``model_name`` and ``model_hash`` say what it was then.
        device: the device's name, which the target decides.
        precision: the configuration's name; ``heading`` is its resolved one-line spelling, which
            is what the run is given, so that a file that changes meanwhile changes nothing.
        kind: ``speed`` cells run alone on the machine, ``accuracy`` cells may run side by side.
        round: speed is taken again in every round, all configurations in turn.
        text: the text that accuracy is measured on.
        weight_bytes: of the weights as the target holds them, estimated before compiling.
        step_bytes: of them, what a decode step reads, by how the target holds it: an embedding's
            rows do not count.
        part: what a configuration of a sensitivity plan lowers: ``ff2``, ``12.ff2``; else empty.
        is_kept: whether its program goes through the cache: not where this is its only cell.
        calibration: the method that calibrates its weights, with the hash of the text if it is not
            the package's. Empty for round to nearest.
    """

    model: str
    model_name: str
    model_hash: str
    target: str
    device: str
    precision: str
    precision_id: str
    heading: str
    case: str
    kind: CellKind
    compute: Literal["fast", "exact"] = "fast"
    round: int = 0
    threads: int | None = None
    text: str | None = None
    weight_bytes: int | None = None
    step_bytes: dict[str, int] = field(default_factory=dict, hash=False)
    part: str = ""
    is_kept: bool = True
    calibration: str = ""

    @property
    def id(self) -> str:
        """The cell's id, twelve hex digits, equal for cells that would measure the same alike."""
        identity = dataclasses.asdict(self)
        # how things are called, and what is expected of them, changes no figure
        for name in _NO_IDENTITY:
            del identity[name]
        if not self.calibration:  # ids of round to nearest have no such key
            del identity["calibration"]
        text = json.dumps(to_keys(identity, CELL), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:_ID_DIGITS]

    @property
    def configuration(self) -> tuple[str, ...]:
        """What is equal for all cells that sum up to one row."""
        return *self.place, self.precision_id, self.calibration

    @property
    def name(self) -> str:
        """The configuration's name, with its calibration."""
        return f"{self.precision} {self.calibration}" if self.calibration else self.precision

    def is_named(self, name: str) -> bool:
        """Whether the configuration has this name, with or without its calibration."""
        return name in (self.precision, self.name)

    @property
    def place(self) -> tuple[str, ...]:
        """What is equal for all configurations of one model on one device."""
        return self.model_hash, self.target, self.device, self.compute

    def title(self, name: str = "") -> str:
        """``bf16 performance-ci-1 round 2``, with ``name`` in place of the configuration's."""
        number = f" round {self.round + 1}" if self.kind == "speed" else ""
        text = f", text {self.text}" if self.text else ""
        return f"{name or self.name} {self.case}{number}{text}"

    def arguments(self, threads: int | None = None, *, folder: str | None = None) -> list[str]:
        """The options of ``tilewright bench``; ``threads`` where the cell itself names none.

        ``folder``: the calibrated weights, instead of the model's.
        """
        weights = ["--model", self.model]
        if folder is not None:
            weights = ["--model", folder, "--reference", self.model]
        found = [*weights, *target_options(self.target), "--precision", self.heading]
        found += ["--case", self.case, "--compute", self.compute, "--json", "--no-results"]
        if self.text is not None:
            found += ["--accuracy-text", self.text]
        if not self.is_kept:
            found.append("--no-cache")
        if (threads := self.threads or threads) is not None:
            found += ["--threads", str(threads)]
        return found
