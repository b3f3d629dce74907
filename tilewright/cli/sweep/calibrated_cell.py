"""A cell with calibrated weights: calibrate into its folder, then become ``tilewright bench``.

Several cells may need a folder at the same time. The first cell calibrates, and the others wait.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path

from tilewright.models.checkpoints.calibrated.manifest import MANIFEST
from tilewright.utils.child_process import PYTHON


def main(argument: str) -> int:
    """Run a cell. ``argument``: see `tilewright.evaluate.sweep.calibrated`, as JSON."""
    work = json.loads(argument)
    folder = Path(work["folder"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / MANIFEST).is_file() and (code := _calibrate(work, folder)):
            return code
    sys.stdout.flush()
    os.execv(PYTHON[0], [*PYTHON, "-m", "tilewright.cli.main", *work["bench"]])


def _calibrate(work: dict[str, list[str]], folder: Path) -> int:
    """Calibrate, with the codes of finished folders. Return the exit code."""
    from tilewright.cli.main import main as tilewright

    siblings = sorted(path.parent for path in folder.parent.glob(f"{work['siblings']}/{MANIFEST}"))
    reuse = ["--reuse", *map(str, siblings)] if siblings else []
    return tilewright([*work["calibrate"], *reuse])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
