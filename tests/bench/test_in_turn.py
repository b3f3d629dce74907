"""What comparisons in turn share: rows that are kept and read, and verbs run as children."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import in_turn
from tilewright.errors import ConfigError, TilewrightError
from tilewright.utils.json_lines import TornLineWarning


def test_kept_rows_are_read_as_every_kind_of_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    in_turn.keeper(path)({"users": 1})
    in_turn.keeper(path)({"users": 2})
    with path.open("ab") as file:
        file.write(b'{"users": 3, "da')
    with pytest.warns(TornLineWarning, match=r"rows\.jsonl:3"):
        found = in_turn.kept_rows(path, "compare-serve")
    assert [row["users"] for row in found] == [1, 2] and found[0]["date"] and found[0]["host"]
    path.write_bytes(b'{"users": 1}\n[2]\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: not a row: "):
        in_turn.kept_rows(path, "compare-serve")
    path.write_bytes(b"\n")
    with pytest.raises(ConfigError, match="rows of python -m bench compare-serve --results"):
        in_turn.kept_rows(path, "compare-serve")


def test_a_verb_answers_or_says_in_one_line_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; print('warming up', file=sys.stderr); "
    code += "print('{\"words\": 2}') if sys.argv[1] == 'bench' else sys.exit('no such model')"
    monkeypatch.setattr(in_turn, "TILEWRIGHT", (sys.executable, "-c", code))
    assert in_turn.answer_of("bench", "--x") == {"words": 2}
    with pytest.raises(TilewrightError, match=r"^tilewright run: no such model$"):
        in_turn.answer_of("run", "--x")
