"""``python -m bench perf``: results become tables, hand-written text stays, errors are one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench.__main__ import main
from tests.cli.conftest import Refused
from tests.evaluate.results.test_results import make
from tilewright.evaluate.results.record import Repeat, medians
from tilewright.evaluate.results.result_file import append

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("PERF.md", "README.md", "docs/benchmarks.md", "docs/speculative.md")
README_BLOCK = (
    "<!-- tilewright:begin configurations -->\n{}\n<!-- tilewright:end configurations -->\n"
)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "results.jsonl"
    for rate in (100.0, 120.0):
        repeats = (Repeat(ttft_ms=50.0, prefill_tps=2560.0, decode_tsu=rate, tps=rate),)
        append(path, make(repeats=repeats, **medians(repeats)))
    return path


def test_results_become_a_table(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "PERF.md"
    output.write_text("# Mine\n\nText above.\n\n<!-- begin results -->\n<!-- end results -->\n")
    assert main(["perf", "--results", str(recorded), "--output", str(output)]) == 0
    assert "of 2 results have a table" in capsys.readouterr().out
    text = output.read_text()
    assert "# Mine" in text and "Text above." in text
    assert "SmolLM2-135M-Instruct" in text and "120" in text
    assert main(["perf", "--results", str(recorded), "--output", str(output)]) == 0
    assert output.read_text() == text, "rendering again changes nothing"


def test_the_documents_are_what_is_rendered_of_the_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """None of their figures is written by hand; `make perf-tables` mends what fails here."""
    copies = [Path(shutil.copy(ROOT / name, tmp_path)) for name in DOCUMENTS]
    perf, *others = map(str, copies)
    argv = ["--results", str(ROOT / "results" / "cpu.jsonl"), "--output", perf, "--also", *others]
    assert main(["perf", *argv]) == 0
    for name, copy in zip(DOCUMENTS, copies, strict=True):
        assert copy.read_bytes() == (ROOT / name).read_bytes(), name


def test_other_documents_get_their_tables(
    recorded: Path, tmp_path: Path, refused: Refused, capfd: pytest.CaptureFixture[str]
) -> None:
    repeats = (Repeat(ttft_ms=50.0, prefill_tps=2560.0, decode_tsu=120.0, tps=120.0),)
    append(recorded, make(device="CPU native", repeats=repeats, **medians(repeats)))
    (page := tmp_path / "page.md").write_text(f"Mine.\n\n{README_BLOCK.format('old')}")
    (other := tmp_path / "other.md").write_text("Nothing to render.\n")
    argv = ["--results", str(recorded), "--output", str(tmp_path / "PERF.md"), "--also"]
    assert main(["perf", *argv, str(page)]) == 0
    capfd.readouterr()
    text = page.read_text()
    assert text.startswith("Mine.") and "old" not in text and "| 120 " in text
    assert str(other) in refused(*argv, str(other), verb="perf")
    other.write_text(f"{text}\n<!-- tilewright:begin results -->\n")
    assert "'results' begins and does not end" in refused(*argv, str(other), verb="perf")


def test_readme_has_rows_of_one_user_only(tmp_path: Path, recorded: Path) -> None:
    (page := tmp_path / "page.md").write_text(README_BLOCK.format(""))
    names = {"precision_name": "bf16", "precision_id": "b", "effective_id": "b"}
    append(recorded, make(device="CPU native", decode_tsu=9.0))
    append(recorded, make(device="CPU native", **names, batch=64, decode_tsu=7.0, tps=448.0))
    argv = ["--results", str(recorded), "--output", str(tmp_path / "PERF.md"), "--also", str(page)]
    assert main(["perf", *argv]) == 0
    assert "| performance " in page.read_text() and "| bf16 " not in page.read_text()
    assert "64 x 128" in (tmp_path / "PERF.md").read_text()


def test_what_other_machines_recorded_beside_it_is_rendered_too(tmp_path: Path) -> None:
    repeats = (Repeat(ttft_ms=5.0, prefill_tps=2560.0, decode_tsu=777.0, tps=777.0),)
    append(tmp_path / "cpu.jsonl", make(decode_tsu=5.0))
    append(tmp_path / "h200.jsonl", make(device="H200", repeats=repeats, **medians(repeats)))
    output = tmp_path / "PERF.md"
    for name in ("cpu.jsonl", "h200.jsonl"):
        assert main(["perf", "--results", str(tmp_path / name), "--output", str(output)]) == 0
        assert "777.0" in output.read_text() and "CPU" in output.read_text()


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b"{}\n", b"nonsense\n{}\n", b"\xff\n"])
def test_results_that_are_none_are_refused(
    refused: Refused, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "some.jsonl"
    if content is not None:
        path.write_bytes(content)
    argv = ("--results", str(path), "--output", str(tmp_path / "PERF.md"))
    assert str(path) in refused(*argv, verb="perf")


def test_an_output_that_cannot_be_written_is_refused(
    refused: Refused, recorded: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    target = tmp_path / "file" / "PERF.md"
    said = refused("--results", str(recorded), "--output", str(target), verb="perf")
    assert str(target) in said
