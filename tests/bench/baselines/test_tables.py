"""Tables of ``python -m bench compare``'s records in documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.perf import render_document as rendered
from tilewright.errors import ConfigError
from tilewright.evaluate.report.comparisons import rates_table, write_part

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
            {**other, "engine": "openvino", "rates": {}},
        ],
        "ratios": [{**ratio, "measure": "prefill-512", "repeats": [1.0, 2.125, 3.0]}],
    }
    write_part(tmp_path / "one.json", "formats", record)
    text = "a\n<!-- peers:begin one formats -->\nold\n<!-- peers:end one formats -->\nb\n"
    found = rendered(text, tmp_path)
    assert found.startswith("a\n<!-- peers:begin one formats -->\n\n| engine")
    assert found.endswith(" -->\nb\n")
    cells = table_cells(found)
    assert cells[2] == ["tilewright native", "all-q40", "1,234", "12.3", "50 %", "2.12"]
    assert cells[3] == ["llama.cpp", "Q4_0", "1,234", "", "", ""]
    assert len(cells) == 4, "one that was not measured has no row"
    assert "Memory read rates are `30.0 to 32.5 GB/s`, with a stream per thread." in found
    assert "2 threads of D (2026-11-23, commit abcabcabca)" in found
    assert "with spreads from `94 to 94 %`." in found
    assert "prefill 512" in found and "decode, 8 users" in found and "old" not in found
    assert rendered(found, tmp_path) == found
    with pytest.raises(ConfigError, match="is missing"):
        rendered(text.replace("one", "two"), tmp_path)
    with pytest.raises(ConfigError, match="no part 'large'; allowed: formats"):
        rendered(text.replace("formats", "large"), tmp_path)


def table_cells(text: str) -> list[list[str]]:
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines]


def test_what_is_kept_beside_other_processes_is_said() -> None:
    rates = {"decode-128": [100.0, 200.0, 100.0], "decode-128-busy1": [50.0, 150.0, 60.0]}
    each = {name: {"median": 1.0, "repeats": repeats} for name, repeats in rates.items()}
    record = {
        **{"model": "M", "device": "D", "num_threads": 2, "num_rounds": 3, "commit": "abc"},
        **{"timestamp": "2026-11-23T08:00", "bandwidth": {"readings": [3e10]}, "ratios": []},
        "measures": [{"name": name} for name in rates],
        "contestants": [{"engine": "e", "weights": "w", "bandwidth_share": None, "rates": each}],
    }
    head, _, row = table_cells(rates_table(record).markdown())
    assert head[2:] == ["decode", "decode beside 1 process", "of read rate", "kept beside them"]
    assert row[-1] == "60 %"


def test_the_documents_tables_are_their_records() -> None:
    text = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert all(f"peers:begin compare {part} -->" in text for part in ("formats", "large", "busy"))
    assert rendered(text, ROOT / "results") == text


def test_the_list_of_commands_is_the_help() -> None:
    text = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    assert "  run  " in text and rendered(text, ROOT / "results") == text


def test_the_table_of_baselines_is_its_records(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "<!-- baselines:begin readme -->" in text
    assert rendered(text, ROOT / "results") == text
    assert "`serve --max-num-seqs 256 --max-model-len 4096 --no-enable-prefix-caching`" in text
    with pytest.raises(ConfigError, match="no part 'avx512'"):
        rendered(text, tmp_path)
