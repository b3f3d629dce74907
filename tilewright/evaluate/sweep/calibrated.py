"""Paths of a sweep's calibrated folders, and commands for calibration and measurement."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from tilewright.errors import ConfigError
from tilewright.evaluate.sweep.trial import Trial
from tilewright.utils.child_process import PYTHON
from tilewright.utils.files import read_regular

_CELL = "tilewright.cli.sweep.calibrated_cell"


@dataclass(frozen=True, slots=True)
class CalibratedFolders:
    """Root of a sweep's calibrated folders, and the text. None: the package's text."""

    root: Path
    text: Path | None = None

    def folder(self, cell: Trial) -> Path:
        """Return the folder with a cell's weights."""
        return self.root / f"{self._prefix(cell)}{cell.precision_id}"

    def command(self, cell: Trial, threads: int | None) -> list[str]:
        """Return the command that calibrates if necessary, then runs ``tilewright bench``.

        Raises:
            ConfigError: The text differs from the planned text.
        """
        folder = str(self.folder(cell))
        method, _, _ = cell.calibration.partition(" ")
        if calibration_name(method, self.text) != cell.calibration:
            raise ConfigError(
                f"--calibration-text {self.text}: not the text of this sweep; allowed: the same "
                "text, or another --results"
            )
        calibrate = ["calibrate", cell.model, "--precision", cell.heading, "-o", folder]
        calibrate += ["--method", method]
        if self.text is not None and method != "rtn":
            calibrate += ["--text", str(self.text)]
        work = {
            "folder": folder,
            "siblings": f"{self._prefix(cell)}*",
            "calibrate": calibrate,
            "bench": ["bench", *cell.arguments(threads, folder=folder)],
        }
        return [*PYTHON, "-m", _CELL, json.dumps(work)]

    def _prefix(self, cell: Trial) -> str:
        return f"{cell.model_hash[:12]}-{cell.calibration.replace(' ', '-')}-"


def calibration_name(method: str, text: Path | None) -> str:
    """Return a cell's calibration: the method, and the hash of a user's text.

    Raises:
        ConfigError: The text cannot be read.
    """
    if method == "none":
        return ""
    if text is None or method == "rtn":
        return method
    try:
        content = read_regular(text)
    except OSError as error:
        raise ConfigError(
            f"--calibration-text {text}: cannot be read ({error.strerror}); allowed: a UTF-8 text"
        ) from None
    return f"{method} {hashlib.sha256(content).hexdigest()[:8]}"
