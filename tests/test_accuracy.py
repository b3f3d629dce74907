"""PERF.md's accuracy figures, measured again: every row whose device and weights are here.

A row this machine cannot run is skipped with the reason. Tolerance: half a point, both ways.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.bench import perf_md
from compiler.bench.accuracy import score, teacher_force
from compiler.bench.cases import ACCURACY_CONTEXT
from compiler.bench.record import Accuracy
from compiler.bench.reference import load_reference, reference_path
from compiler.errors import CheckpointError
from compiler.precision import PrecisionConfig, load_precision, parse_heading

PERF_MD = Path(__file__).resolve().parent.parent / "PERF.md"
TOLERANCE = 0.5
_TARGET_OF = {"CPU": "cpu"}
_MODEL_OF = {"SmolLM2-135M-Instruct": "smollm2"}


def precision_of(section: perf_md.Section) -> PrecisionConfig:
    """The configuration a section's rows were measured with."""
    if section.kind == "precision":
        return parse_heading(section.title)
    return load_precision(section.kind)


ROWS = [
    pytest.param(section, row, id=f"{section.kind}-{row.model}-{row.device}-line{row.line}")
    for section in perf_md.load(PERF_MD).sections
    if section.kind in ("performance", "accuracy", "precision")
    and section.result_kind == "measured"
    for row in section.rows
    if row.top1 is not None
]


@pytest.fixture(scope="session")
def measured() -> dict[str, Accuracy]:
    """Rows of different sections may be one configuration, which is measured once."""
    return {}


def measure(model_path: str, target: str, precision: PrecisionConfig) -> Accuracy:
    """Top-1 and top-5 against the versioned reference."""
    from compiler.commands.measure import subject_of
    from compiler.commands.source import open_source
    from compiler.driver import compile_model
    from compiler.targets.base import CompileOptions
    from models import find_model

    source = open_source(find_model(model_path))
    reference = load_reference(reference_path(source.name), subject_of(source)[0])
    options = CompileOptions(max_context=ACCURACY_CONTEXT)
    compiled = compile_model(source.checkpoint_model(), precision, target=target, options=options)
    try:
        return score(teacher_force(compiled.executable, reference), reference)
    finally:
        compiled.executable.close()


def test_there_are_rows_to_measure() -> None:
    """A PERF.md that lost its tables must not pass."""
    here = [row.values[1] for row in ROWS if row.values[1].device in _TARGET_OF]  # type: ignore[attr-defined]
    assert len(here) >= 5


@pytest.mark.weights
@pytest.mark.parametrize(("name", "least"), [("bf16", 97.0), ("all-bfp8", 92.0)])
def test_accuracy_does_not_fall_below_its_bar(
    name: str, least: float, measured: dict[str, Accuracy]
) -> None:
    """Also where PERF.md has been rendered anew from worse figures. Measured: 99.4 and 94.5."""
    found = remembered("SmolLM2-135M-Instruct", "CPU", load_precision(name), measured)
    assert 100 * found.num_top1 / found.num_positions >= least


def remembered(
    model: str, device: str, precision: PrecisionConfig, measured: dict[str, Accuracy]
) -> Accuracy:
    """Measure a configuration, once a session; skip where its weights are not installed."""
    key = f"{model} {device} {precision.resolve(1000, model).id}"
    if key not in measured:
        try:
            measured[key] = measure(_MODEL_OF[model], _TARGET_OF[device], precision)
        except CheckpointError as error:
            pytest.skip(str(error))
    return measured[key]


@pytest.mark.weights
@pytest.mark.parametrize(("section", "row"), ROWS)
def test_row_is_measured_again(
    section: perf_md.Section, row: perf_md.PerfRow, measured: dict[str, Accuracy]
) -> None:
    if row.device not in _TARGET_OF:
        pytest.skip(f"no {row.device} here")
    if row.random or row.model not in _MODEL_OF:
        pytest.skip(f"no weights of {row.model} here")
    found = remembered(row.model, row.device, precision_of(section), measured)
    assert row.top1 is not None and row.top5 is not None
    assert 100 * found.num_top1 / found.num_positions == pytest.approx(row.top1, abs=TOLERANCE)
    assert 100 * found.num_top5 / found.num_positions == pytest.approx(row.top5, abs=TOLERANCE)
