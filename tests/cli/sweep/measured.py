"""Results of two configurations, whose journals the tests of reports and figures write."""

from __future__ import annotations

from typing import Any

from tests.sweep_cells import accuracy_cell, accuracy_result, cell, hits, speed_result
from tilewright.evaluate.sweep.trial import Trial


def measured(name: str, speed: float, num_wrong: int, **changes: Any) -> list[tuple[Trial, Any]]:
    heading = f"precision_cfg = {{ff1_3: {name}}}, fidelity_cfg = {{li_ff1_3: hifi2}}"
    fields = {"heading": heading, **changes}
    of = accuracy_cell(name, **fields)
    found = [(of, accuracy_result(of, hits(num_wrong, 64)))]
    for number in range(3):
        of = cell(name, round=number, **fields)
        found.append((of, speed_result(of, [speed + number, speed + number + 1])))
    return found


SWEEP = [*measured("a", 50.0, 1), *measured("b", 90.0, 20)]
