"""The section of boards: emulated beside predicted beside published, and nowhere else."""

from __future__ import annotations

from typing import Any

from tests.evaluate.report.perf_records import accuracy, make
from tilewright.compiler.precision import load_precision
from tilewright.evaluate.report import perf_md
from tilewright.evaluate.report.board_tables import board_table, published_row, published_tables
from tilewright.evaluate.report.perf_tables import render_results
from tilewright.evaluate.results.record import ContractLine, Result

ONE_B = {"model": "Llama-3.2-1B", "device": "N300", "target": "n300", "mesh": "1x2"}


def predicted(precision: str = "performance", **changes: Any) -> Result:
    fields = {"kind": "predicted", "spread": None, "peak_memory_bytes": None, **ONE_B}
    return make(precision, **{**fields, "decode_error": 0.17, "ttft_error": 0.29, **changes})


def emulated(precision: str = "performance", **changes: Any) -> Result:
    lengths = {"case": "performance-top-1", "prompt_length": 512, "num_generated": 1}
    blank = {"ttft_ms": None, "decode_tsu": None, "spread": None, "peak_memory_bytes": None}
    fields = {"kind": "emulated", "accuracy": accuracy(), **lengths, **blank, **ONE_B}
    return make(precision, **{**fields, **changes})


def sections(results: list[Result]) -> dict[str, perf_md.Section]:
    return {each.title: each for each in perf_md.parse(render_results(results)).sections}


def test_both_kinds_are_one_row_that_reads_back() -> None:
    found = sections([predicted(), emulated(), make()])
    board = found[perf_md.BOARDS_TITLE]
    assert (board.kind, board.result_kind) == ("boards", "predicted")
    (row,) = board.rows
    assert (row.model, row.device, row.mesh) == ("Llama-3.2-1B", "N300", None)
    assert (row.top1, row.speed, row.ttft) == (91.8, 120.0, 100.0)
    assert row.cells["Published speed (t/s/u)"] == "100.5"
    assert (row.cells["Speed error (%)"], row.cells["TTFT error (%)"]) == ("17", "29")
    assert row.cells["Batch x prompt"] == "1 x 128"


def test_no_figure_of_a_board_stands_among_measured_ones() -> None:
    found = sections([predicted(), emulated(), make()])
    (row,) = found["Performance"].rows
    assert (row.model, row.device) == ("SmolLM2-135M-Instruct", "CPU")
    for title, section in found.items():
        if title != perf_md.BOARDS_TITLE:
            assert all(row.device == "CPU" for row in section.rows), title


def test_accuracy_or_speed_alone_leave_the_other_blank() -> None:
    board = sections([emulated()])[perf_md.BOARDS_TITLE]
    assert [(row.top1, row.speed) for row in board.rows] == [(91.8, None)]
    board = sections([predicted(), predicted(batch=32)])[perf_md.BOARDS_TITLE]
    assert [row.cells["Batch x prompt"] for row in board.rows] == ["1 x 128", "32 x 128"]
    assert [row.cells["Published speed (t/s/u)"] for row in board.rows] == ["100.5", "64.2"]


def test_what_boards_make_of_a_configuration_is_printed_once() -> None:
    line = ContractLine(
        field="ff2 weights", requested="bfp8", status="not honoured", effective="along out"
    )
    results = [predicted(contract=(line,)), emulated(), predicted(device="N150", target="n150")]
    text = render_results(results)
    assert text.count("Numeric contract (Tenstorrent boards)") == 1
    assert "along out" in text


def test_calibrated_blocks_along_out_have_the_name_of_their_configuration() -> None:
    """Two headings with the same calibration are two rows."""
    results = []
    for name in ("performance", "all-bfp4"):
        heading = f"{load_precision(name).resolve(16).heading()}, block_axis = out"
        own = {"precision_name": "heading", "precision_id": name, "effective_id": name}
        results.append(emulated(heading=heading, calibration="gptq", **own))
    cells = [row[2] for row in board_table(results).rows]
    assert cells == ["all-bfp4, blocks along out", "performance, blocks along out"]


def test_published_rows_are_found_by_name_heading_batch_and_length() -> None:
    assert len(published_tables().sections) == 5 + 12

    def speed(result: Result) -> float | None:
        row = published_row(result)
        return None if row is None else row.speed

    assert speed(predicted()) == 100.5
    assert speed(predicted("accuracy")) == 98.6
    assert speed(predicted("mine")) is None
    assert speed(predicted(batch=32)) == 64.2
    assert speed(predicted(prompt_length=65536, context=65736)) == 65.2
    assert speed(predicted(device="T3K", dp=4)) == 83.5
    assert speed(predicted(model="SmolLM2-135M-Instruct")) is None
    heading = load_precision("mlp-bfp8-bfp8").resolve(16, "Llama-3.2-1B").heading()
    named = predicted("mine", heading=heading)
    row = published_row(named)
    assert row is not None and (row.speed, row.top1) == (99.0, 91.0)
