"""Finished calibration codes, for a new calibration with the same text and method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from tilewright.errors import ConfigError
from tilewright.models.checkpoints.calibrated.checkpoint import CalibratedCheckpoint
from tilewright.models.checkpoints.calibrated.manifest import CalibrationFacts


class KnownFolders:
    """Calibrated folders. Formats and block axes may differ, everything else is equal.

    Raises:
        CheckpointError: for a damaged folder, or without calibration.
        ConfigError: for a folder with a different model, text or method.
    """

    def __init__(self, folders: Sequence[Path], facts: CalibrationFacts) -> None:
        self._folders = [CalibratedCheckpoint(folder) for folder in folders]
        for checkpoint in self._folders:
            own = checkpoint.facts
            names = ("original", "method", "text_sha256", "num_tokens", "sequence_length")
            differing = [n for n in names if getattr(own, n) != getattr(facts, n)]
            differing += ["settings"] if own.code_settings != facts.code_settings else []
            if differing:
                raise ConfigError(
                    f"--reuse {checkpoint.path}: different {', '.join(differing)}; allowed: "
                    "a folder with the same model, text and method"
                )

    def has(self, name: str, first: int, num_rows: int, format: str, axis: str) -> bool:
        """Return whether a folder has these rows in this format."""
        return self._folder(name, first, num_rows, format, axis) is not None

    def read(self, name: str, first: int, num_rows: int, format: str, axis: str) -> Tensor:
        """Return the rows as bytes in their format."""
        folder = self._folder(name, first, num_rows, format, axis)
        assert folder is not None
        return folder.coded(name, (first, first + num_rows))

    def notes(self, name: str) -> tuple[str, ...]:
        """Return the notes about a tensor."""
        notes = (note for folder in self._folders for note in folder.manifest.notes)
        return tuple(note for note in dict.fromkeys(notes) if note.startswith(f"{name}: "))

    def _folder(
        self, name: str, first: int, num_rows: int, format: str, axis: str
    ) -> CalibratedCheckpoint | None:
        rows = (first, first + num_rows)
        for folder in self._folders:
            tensor = folder.manifest.tensors.get(name)
            if tensor and rows in tensor.parts and (tensor.format, tensor.axis) == (format, axis):
                return folder
        return None
