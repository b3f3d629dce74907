"""Run an emitted file's own command on a mock board, where the tokens it prints mean nothing.

    python check_main.py FILE BOARD SCRATCH ARGUMENTS...

Runs in the Python that has ttnn.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import mock_cluster

if __name__ == "__main__":
    _, file, board, scratch, *arguments = sys.argv
    mock_cluster.use(board, Path(scratch))
    sys.argv = [file, *arguments]
    runpy.run_path(file, run_name="__main__")
