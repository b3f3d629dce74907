"""A batch's journal: nothing lost wherever it is cut, nothing twice, and a full disk."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batch.rows import record
from tilewright.batch.journal import BatchJournal
from tilewright.errors import ConfigError

FACTS = {"data set": "abc", "model": "tiny"}


def written(path: Path, rows: range) -> bytes:
    journal = BatchJournal.create(path, FACTS)
    journal.add([record(row, "é" * row) for row in rows])
    journal.close()
    return path.read_bytes()


@given(data=st.data())
def test_cut_at_any_byte_it_keeps_every_whole_line_and_goes_on(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("journal") / "out.journal"
    whole = written(path, range(6))
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    if cut <= whole.index(b"\n"):
        with pytest.raises(ConfigError, match=r"out\.journal:1: "):
            BatchJournal.open(path)
        assert path.read_bytes() == whole[:cut]
        return
    journal = BatchJournal.open(path)
    assert list(journal.rows) == list(range(whole[:cut].count(b"\n") - 1))
    journal.add([record(row, "é" * row) for row in range(6)])  # what is there already is left
    assert path.read_bytes() == whole
    assert [each.row for each in journal.records([5, 0, 3])] == [5, 0, 3]
    journal.close()


def test_a_line_that_no_batch_wrote_is_named(tmp_path: Path) -> None:
    path = tmp_path / "out.journal"
    first, *rest = written(path, range(3)).splitlines(keepends=True)
    path.write_bytes(b"".join([first, rest[0], b"not JSON\n", rest[1]]))
    with pytest.raises(ConfigError, match=r"out\.journal:3: no record"):
        BatchJournal.open(path)
    path.write_bytes(b'{"row": 1}\n')
    with pytest.raises(ConfigError, match=r"out\.journal:1: .*allowed: what `tilewright batch`"):
        BatchJournal.open(path)


def test_one_process_writes_it_and_only_the_batch_that_began_it(tmp_path: Path) -> None:
    path = tmp_path / "out.journal"
    journal = BatchJournal.create(path, FACTS)
    with pytest.raises(ConfigError, match="another process"):
        BatchJournal.open(path)
    with pytest.raises(ConfigError, match="a run was stopped there; allowed: --resume"):
        BatchJournal.create(path, FACTS)
    journal.check(FACTS)
    with pytest.raises(ConfigError, match="begun with model tiny, not other"):
        journal.check({**FACTS, "model": "other"})
    journal.close()


def test_a_full_disk_leaves_whole_lines_and_it_goes_on_when_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "out.journal"
    journal = BatchJournal.create(path, FACTS)
    journal.add([record(0)])
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 30, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"out\.journal: File too large; --resume continues"):
            journal.add([record(1)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    journal.add([record(1), record(2, "no", status=400)])
    journal.close()
    again = BatchJournal.open(path)
    assert list(again.rows) == [0, 1, 2] and again.num_failed == 1
    again.close()
