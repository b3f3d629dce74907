"""How long a compiled folder takes to start, in processes of its own: seconds from the process's
start to each mark, and the peak of its memory. ``python -m bench.targets.start FOLDER``.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

_ROUNDS = 5
_CHILD = "--child"


def main(argv: list[str]) -> int:
    """Start the folder some times, and print the medians of the marks."""
    if argv[0] == _CHILD:
        return _run(Path(argv[1]), int(argv[2]))
    folder = str(Path(argv[0]).resolve())
    found = []
    for _ in range(_ROUNDS):
        started = str(time.monotonic_ns())
        command = [sys.executable, "-m", "bench.targets.start", _CHILD, folder, started]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(json.loads(said.stdout))
    for name in found[0]:
        values = [each[name] for each in found]
        print(f"{name:28s} {statistics.median(values):10.3f}   {min(values):.3f} at best")
    return 0


def _run(folder: Path, started: int) -> int:
    """One start, its marks as JSON."""
    marks: dict[str, float] = {}

    def mark(name: str) -> None:
        marks[name] = (time.monotonic_ns() - started) / 1e9

    mark("interpreter (s)")
    from tilewright.llm import LLM

    mark("imports (s)")
    with LLM(folder) as llm:
        mark("ready (s)")
        llm.generate("The", max_tokens=1)
        mark("first token (s)")
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = re.search(r"VmHWM:\s+(\d+)", status)
    assert peak is not None
    marks["processor time (s)"] = sum(os.times()[:2])
    marks["peak memory (MB)"] = int(peak[1]) * 1024 / 1e6
    marks["torch imported"] = float("torch" in sys.modules)
    print(json.dumps(marks))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
