"""Parts of comparisons: rows are kept and read, commands run as children."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import common
from tilewright.errors import ConfigError, TilewrightError
from tilewright.evaluate.report.comparisons import read_rows
from tilewright.utils.json_lines import TornLineWarning


def test_kept_rows_are_read_as_every_kind_of_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    common.keeper(path)({"users": 1})
    common.keeper(path)({"users": 2})
    with path.open("ab") as file:
        file.write(b'{"users": 3, "da')
    with pytest.warns(TornLineWarning, match=r"rows\.jsonl:3"):
        found = read_rows(path, "compare-serve")
    assert [row["users"] for row in found] == [1, 2] and found[0]["date"] and found[0]["host"]
    path.write_bytes(b'{"users": 1}\n[2]\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: not a row: "):
        read_rows(path, "compare-serve")
    path.write_bytes(b"\n")
    with pytest.raises(ConfigError, match="rows of python -m bench compare-serve --results"):
        read_rows(path, "compare-serve")


def test_a_verb_answers_or_says_in_one_line_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; print('warming up', file=sys.stderr); "
    code += "print('{\"words\": 2}') if sys.argv[1] == 'bench' else sys.exit('no such model')"
    monkeypatch.setattr(common, "TILEWRIGHT", (sys.executable, "-c", code))
    assert common.run_json("bench", "--x") == {"words": 2}
    with pytest.raises(TilewrightError, match=r"^tilewright run: no such model$"):
        common.run_json("run", "--x")
