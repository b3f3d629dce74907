"""Host time of a scheduler step, without a device."""

from __future__ import annotations

import pytest

from bench.host_time import main


def test_bench_loop_prints_lines_by_number_of_slots(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--slots", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["2 slots: unchanged", "2 slots: changing"]
