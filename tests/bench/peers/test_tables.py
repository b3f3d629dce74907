"""Tables of ``tilewright compare``'s records in documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.peers.tables import rendered
from tilewright.compiler.errors import ConfigError

ROOT = Path(__file__).parents[3]


def test_a_block_has_its_record_and_the_rest_of_a_document_stays(tmp_path: Path) -> None:
    rate = {"median": 1234.5, "repeats": [1234.5]}
    own = {"engine": "tilewright native", "weights": "all-q40", "bandwidth_share": 0.5}
    other = {"engine": "llama.cpp", "weights": "Q4_0", "bandwidth_share": None}
    ratio = {"ours": "tilewright native all-q40", "peer": "llama.cpp Q4_0"}
    record = {
        **{"model": "M", "device": "D", "num_threads": 2, "num_rounds": 3, "commit": "abc" * 9},
        **{"timestamp": "2026-11-23T08:00", "bandwidth": {"readings": [3e10, 3.25e10]}},
        "measures": [{"name": "prefill-512"}, {"name": "decode-128-x8"}],
        "contestants": [
            {**own, "rates": {"prefill-512": rate, "decode-128-x8": {**rate, "median": 12.34}}},
            {**other, "rates": {"prefill-512": rate}},
        ],
        "ratios": [{**ratio, "measure": "prefill-512", "repeats": [1.0, 2.125, 3.0]}],
    }
    (tmp_path / "one.json").write_text(json.dumps(record))
    text = "a\n<!-- peers:begin one -->\nold\n<!-- peers:end one -->\nb\n"
    found = rendered(text, tmp_path)
    assert found.startswith("a\n<!-- peers:begin one -->\n\n| engine")
    assert found.endswith(" -->\nb\n")
    cells = [[cell.strip() for cell in line.split("|")] for line in found.splitlines()]
    assert cells[5][1:-1] == ["tilewright native", "all-q40", "1,234", "12.3", "50 %", "2.12"]
    assert cells[6][1:-1] == ["llama.cpp", "Q4_0", "1,234", "", "", ""]
    assert "memory read at 30.0 to 32.5 GB/s (2026-11-23, commit abcabcabca)" in found
    assert "prefill 512" in found and "decode, 8 users" in found and "old" not in found
    assert rendered(found, tmp_path) == found
    with pytest.raises(ConfigError, match="is missing"):
        rendered(text.replace("one", "two"), tmp_path)


def test_the_documents_tables_are_their_records() -> None:
    text = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    assert "peers:begin compare-native -->" in text and rendered(text, ROOT / "results") == text
