"""The budget of GPU memory that the workers of a test run share."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from tests.gpu_memory import gpu_memory, num_slots


def test_num_slots_leaves_memory_for_the_contexts_of_all_workers() -> None:
    assert num_slots(80_000_000_000, 15) == 32 and num_slots(1_000_000_000, 4) == 1


def test_gpu_memory_waits_while_other_tests_hold_the_budget(tmp_path: Path) -> None:
    began, ended = threading.Event(), threading.Event()

    def large() -> None:
        began.set()
        with gpu_memory(tmp_path, 4, 1000.0) as count:
            assert count == 4
        ended.set()

    with gpu_memory(tmp_path, 4, 5.0) as count:
        assert count == 3
        thread = threading.Thread(target=large)
        thread.start()
        assert began.wait(10) and not ended.wait(0.2)
    thread.join(10)
    assert ended.is_set()


def test_gpu_memory_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = (
        "import os, pathlib; from tests.gpu_memory import gpu_memory\n"
        f"with gpu_memory(pathlib.Path({str(tmp_path)!r}), 2, 4.0): os._exit(1)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode
    with gpu_memory(tmp_path, 2, 4.0) as count:
        assert count == 2
