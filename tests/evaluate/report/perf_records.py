"""Records of results that nobody measured, and the rows that they come to in PERF.md."""

from __future__ import annotations

from typing import Any

from tilewright.evaluate.report import perf_md
from tilewright.evaluate.report.perf_tables import render_results
from tilewright.evaluate.results.record import Accuracy, Result

HEADINGS = {
    name: f"precision_cfg = {{ff1_3: {form}}}, fidelity_cfg = {{li_ff1_3: hifi2}}"
    for name, form in {
        "performance": "bfp4",
        "accuracy": "bf16",
        "all-bfp8": "bfp8",
        "mine": "bfp2",
    }.items()
}


def make(precision: str = "performance", *, day: int = 1, **changes: Any) -> Result:
    fields: dict[str, Any] = {
        "case": "performance-ci-1",
        "model": "SmolLM2-135M-Instruct",
        "weights": "checkpoint",
        "model_hash": "h1",
        "device": "CPU",
        "device_detail": "a processor | 2 threads",
        "target": "cpu",
        "batch": 1,
        "prompt_length": 128,
        "num_generated": 200,
        "context": 328,
        "precision_name": precision,
        "precision_id": precision,
        "heading": HEADINGS[precision],
        "effective_id": precision,
        "ttft_ms": 100.0,
        "decode_tsu": 120.04,
        "spread": 0.0123,
        "peak_memory_bytes": 450_400_000,
        "versions": {"torch": "2", "onnxruntime": "1"},
        "timestamp": f"2026-01-{day:02}T00:00:00+00:00",
    }
    return Result(**{**fields, **changes})


def accuracy(num_top1: int = 470, **changes: Any) -> Accuracy:
    return Accuracy.from_counts(
        "ref", num_positions=512, num_top1=num_top1, num_top5=505, **changes
    )


def measured_accuracy(precision: str = "performance", **changes: Any) -> Result:
    lengths = {"case": "performance-token-matching", "prompt_length": 512, "num_generated": 512}
    fields = {**lengths, "ttft_ms": None, "decode_tsu": None, "accuracy": accuracy(), **changes}
    return make(precision, **fields)


def rows(results: list[Result], kind: perf_md.SectionKind, **options: Any) -> tuple:
    section = perf_md.parse(render_results(results)).find(kind, **options)
    return section.rows if section else ()
