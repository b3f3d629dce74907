"""Sweeps' files that were damaged or edited: refused in one line, or a state that can be shown."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz.limits import guarded
from tests.fuzz.mutations import Mutation, damaged_trees, mutations
from tests.sweep_cells import (
    accuracy_cell,
    accuracy_result,
    cell,
    done,
    failed,
    hits,
    planned,
    speed_result,
)
from tilewright.errors import ConfigError
from tilewright.evaluate.sweep import sensitivity_report, summary
from tilewright.evaluate.sweep.estimate import remaining_seconds
from tilewright.evaluate.sweep.journal import Added, Event, SweepJournal, TrialCommand, TrialStarted
from tilewright.utils.json_lines import TornLineWarning

STATUSES = {"queued", "running", "done", "failed", "timed out", "out of memory", "cancelled"}


def events() -> Iterator[Event]:
    """A base and a part, measured; one that failed, one that runs, one that was cancelled."""
    fields: dict[str, Any] = {"part": "ff2", "step_bytes": {"float32": 5, "bfp8 blocks": 3}}
    accuracies = [accuracy_cell("a", step_bytes={"float32": 8}), accuracy_cell("b", **fields)]
    speeds = [cell("a", step_bytes={"float32": 8}), cell("b", **fields)]
    others = [cell(name) for name in "cde"]
    yield planned("sensitivity")
    yield from map(Added, [*accuracies, *speeds, *others])
    for number, of in enumerate(accuracies):
        yield done(of, accuracy_result(of, hits(number + 1)))
    for number, of in enumerate(speeds):
        yield TrialStarted(of.id, "2026-01-02T03:04:05+00:00")
        yield done(of, speed_result(of, [10.0 + number, 12.0]))
    yield failed(others[0])
    yield TrialStarted(others[1].id, "2026-01-02T03:04:05+00:00")
    yield TrialCommand(others[1].id, "cancel")
    yield TrialCommand(others[2].id, "cancel")


LINES = [msgspec.json.encode(event) for event in events()]
SOUND = b"\n".join(LINES) + b"\n"


def check(raw: bytes, folder: Path, **limits: float) -> str:
    """What a file is refused with; the state of one that is not must be sound and be shown."""
    path = folder / "sweep.jsonl"
    path.write_bytes(raw)

    def read() -> None:
        state = SweepJournal.open(path).state
        for key, each in state.cells.items():
            assert each.status in STATUSES and key == each.cell.id
            assert (each.status == "done") is (each.result is not None)
            assert each.is_open is (each.status in ("queued", "running"))
        found = summary.rows(state)
        assert sum(len(row.states) for row in found) == len(state.cells)
        merged = summary.merge_equal(found)
        assert sum(len(row.names) for row in merged) == len(found)
        with suppress(ConfigError):  # an unknown case
            remaining_seconds(state)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TornLineWarning)
        return guarded(read, file_size=len(raw), **limits)


def test_the_sound_file_is_read(scratch: Path) -> None:
    assert check(SOUND, scratch) == ""
    statuses = [
        each.status for each in SweepJournal.open(scratch / "sweep.jsonl").state.cells.values()
    ]
    assert statuses == ["done"] * 4 + ["failed", "running", "cancelled"]


@given(mutation=mutations(max_steps=6))
@example(mutation=lambda raw: raw.replace(b'"reason":"exit', b'"reason":"\\u0000'))
@example(mutation=lambda raw: raw + raw)
def test_damaged_files(mutation: Mutation, scratch: Path) -> None:
    check(mutation(SOUND), scratch)


@given(at=st.floats(0, 1, exclude_max=True), size=st.integers(0, len(SOUND)))
def test_files_cut_anywhere(at: float, size: int, scratch: Path) -> None:
    """And with a piece from elsewhere after the cut: lines out of order, or twice."""
    start = int(at * len(SOUND))
    check(SOUND[:size] + SOUND[start:], scratch)


@given(lines=st.lists(st.sampled_from(LINES), max_size=20), has_header=st.booleans())
def test_lines_in_any_order(lines: list[bytes], has_header: bool, scratch: Path) -> None:
    said = check(b"\n".join([*LINES[:has_header], *lines]) + b"\n", scratch)
    assert not said or "sweep.jsonl" in said, "which file it is"


ODD_LINES = st.integers(0, len(LINES) - 1).flatmap(
    lambda number: st.tuples(st.just(number), damaged_trees(json.loads(LINES[number])))
)


@given(odd=ODD_LINES)
def test_events_of_odd_values(odd: tuple[int, Any], scratch: Path) -> None:
    number, tree = odd
    line = json.dumps(tree).encode()
    check(b"\n".join([*LINES[:number], line, *LINES[number + 1 :]]) + b"\n", scratch)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\r\n", b"NaN", b"{}", b"[" * 100_000),
        *(b'{"a":' * 100_000, b'{"event": ' + b"9" * 100_000 + b"}", b" " * 100_000),
        *(b'{"event": ' + b"[" * depth + b"]" * depth + b"}" for depth in (400, 900, 990)),
        *(b'{"event": "added", "cell": {"' + b"y" * 100_000 + b'": 1}}',),
        *(b'{"event": "started", "cell": "' + b"x" * 100_000 + b'", "timestamp": ""}',),
    ],
    ids=lambda raw: f"{raw[:12]!r}-{len(raw)}"[2:],
)
def test_lines_of_odd_forms(raw: bytes, is_first: bool, scratch: Path) -> None:
    check(raw + b"\n" if is_first else SOUND + raw + b"\n", scratch, factor=100)


def test_a_file_without_lines_is_read_in_one_pass(scratch: Path) -> None:
    assert "no sweep" in check(b"x" * (8 << 20), scratch)
    assert check(SOUND + b"x" * (8 << 20), scratch) == ""  # a line that was never finished


def test_many_events_take_a_time_that_grows_with_them(scratch: Path) -> None:
    asked = msgspec.json.encode(TrialCommand(cell("e").id, "restart")) + b"\n"
    assert check(SOUND + asked * 20_000, scratch) == ""


@pytest.mark.parametrize(
    "changes",
    [{"part": "v1.ff2"}, {"step_bytes": {f"kind {number}": 1 for number in range(9)}}],
    ids=["a part of no layer", "many kinds of holding"],
)
def test_odd_sensitivities_are_shown_or_refused(changes: dict[str, Any], scratch: Path) -> None:
    """What a sweep's file may say of its cells, where somebody edited it."""
    found: list[Event] = [planned("sensitivity")]
    for name, part in (("a", ""), *((f"b{number}", f"{number}.ff2") for number in range(9))):
        fields = {"part": part, "step_bytes": {"float32": 8}, **(changes if part else {})}
        of, timed = accuracy_cell(name, **fields), cell(name, **fields)
        found += [Added(of), Added(timed), done(of, accuracy_result(of, hits(1)))]
        found.append(done(timed, speed_result(timed, [10.0])))
    raw = b"\n".join(msgspec.json.encode(event) for event in found) + b"\n"
    assert check(raw, scratch) == ""
    state = SweepJournal.open(scratch / "sweep.jsonl").state
    guarded(lambda: sensitivity_report.markdown(state), file_size=len(raw))
