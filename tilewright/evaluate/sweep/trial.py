"""A trial of a sweep: a single ``tilewright bench`` run with a reproducible id.

Knows the command's options. Other modules run trials and judge results.
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

TrialKind = Literal["speed", "accuracy"]

_ID_DIGITS = 12
_NO_IDENTITY = (
    *("model", "model_name", "heading", "precision", "part"),
    *("weight_bytes", "step_bytes", "is_kept"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A ``tilewright bench`` run in its own process.

    Attributes:
        model: argument for ``--model``.
        model_name, model_hash: the model's name and content at planning.
        device: device name, determined by the target.
        precision: configuration name.
        heading: the resolved configuration on one line. The run uses it, so that a changed
            file has no effect.
        kind: ``speed`` cells run exclusively, ``accuracy`` cells may run concurrently.
        round: round number. Speed is measured in every round, with configurations in turn.
        text: text for accuracy.
        weight_bytes: estimated bytes of the stored weights.
        step_bytes: bytes that a decode step reads, by storage, without the embedding.
        part: lowered part in a sensitivity plan, as ``ff2`` or ``12.ff2``, else empty.
        is_kept: whether the program goes into the cache. False for a configuration with one cell.
        calibration: calibration method, with the hash of a user's text. Empty for round to
            nearest.
        speculative: JSON for ``--speculative-config``, in speed cells. Empty for no drafts.
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
    kind: TrialKind
    compute: Literal["fast", "exact"] = "fast"
    round: int = 0
    threads: int | None = None
    text: str | None = None
    weight_bytes: int | None = None
    step_bytes: dict[str, int] = field(default_factory=dict, hash=False)
    part: str = ""
    is_kept: bool = True
    calibration: str = ""
    speculative: str = ""

    @property
    def id(self) -> str:
        """Return twelve hex digits, equal for cells with the same measurement."""
        identity = dataclasses.asdict(self)
        # Names and estimates have no influence on results.
        for name in _NO_IDENTITY:
            del identity[name]
        for name in ("calibration", "speculative"):  # ids without them lack these keys
            if not identity[name]:
                del identity[name]
        text = json.dumps(to_keys(identity, CELL), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:_ID_DIGITS]

    @property
    def configuration(self) -> tuple[str, ...]:
        """Return the key for all cells in a row."""
        return *self.place, self.precision_id, self.calibration

    @property
    def name(self) -> str:
        """The configuration's name with its calibration."""
        return f"{self.precision} {self.calibration}" if self.calibration else self.precision

    def is_named(self, name: str) -> bool:
        """Return whether the configuration has this name, with or without calibration."""
        return name in (self.precision, self.name)

    @property
    def place(self) -> tuple[str, ...]:
        """Return the key for all configurations of a model on a device."""
        return self.model_hash, self.target, self.device, self.compute

    def title(self, name: str = "") -> str:
        """Return ``bf16 performance-ci-1 round 2``. ``name`` replaces the configuration's name."""
        number = f" round {self.round + 1}" if self.kind == "speed" else ""
        text = f", text {self.text}" if self.text else ""
        return f"{name or self.name} {self.case}{number}{text}"

    def arguments(self, threads: int | None = None, *, folder: str | None = None) -> list[str]:
        """Return the ``tilewright bench`` options.

        Args:
            threads: thread count, if the cell has none.
            folder: directory with calibrated weights, in place of the model's weights.
        """
        weights = ["--model", self.model]
        if folder is not None:
            weights = ["--model", folder, "--reference", self.model]
        drafts = ["--speculative-config", self.speculative] if self.speculative else []
        found = [
            *(*weights, *target_options(self.target), "--precision", self.heading),
            *("--case", self.case, "--compute", self.compute, "--json", "--no-results", *drafts),
        ]
        if self.text is not None:
            found += ["--accuracy-text", self.text]
        if not self.is_kept:
            found.append("--no-cache")
        if (threads := self.threads or threads) is not None:
            found += ["--threads", str(threads)]
        return found
