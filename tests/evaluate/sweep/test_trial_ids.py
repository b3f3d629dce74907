"""Trial ids of committed journals. A rename of a field must not change them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilewright.evaluate.sweep.trial import Trial

RESULTS = Path(__file__).resolve().parents[3] / "results"
JOURNALS = sorted(path.relative_to(RESULTS).as_posix() for path in RESULTS.glob("smollm2-*/*"))
_PINNED = """
dc6cd68d94e8 c837e0b0e2d3 5725c1208ee9 efa35b25bf03 d4ef5b52fe61
103dec74aa65 8c080d661f8b 67a25bd58fd9 ddc312a77c96 1f8b0873141e
2e197f4e22bf a27a4a1485ed 036f8fd94aba 90c51a93ce6d ec42c70f9976
25f75f4643de 71765a09999f 7eef237c5bdf 0e0f402e865f e4c61ea05867
"""
"""The first finished trials of ``smollm2-cpu/pareto.jsonl``, as the file has them."""


def _events(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def _computed(name: str) -> set[str]:
    added = [event["cell"] for event in _events(name) if event["event"] == "added"]
    return {Trial(**cell).id for cell in added}  # type: ignore[arg-type]


@pytest.mark.parametrize("name", JOURNALS)
def test_cell_of_a_committed_journal_has_the_recorded_id(name: str) -> None:
    finished = {event["cell"] for event in _events(name) if event["event"] == "finished"}
    assert finished and finished <= _computed(name)


def test_cell_has_one_of_twenty_pinned_ids() -> None:
    pinned = set(_PINNED.split())
    assert len(pinned) == 20 and pinned <= _computed("smollm2-cpu/pareto.jsonl")
