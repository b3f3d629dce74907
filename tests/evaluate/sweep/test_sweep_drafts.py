"""A sweep over the formats of a trained draft layer: its record, its table and its CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.draft_layers import attach
from tests.sweep_cells import cell, journal, speed_result
from tests.tiny import compiled, precision_of
from tests.tools import train_tiny_mtp as tiny
from tests.tools.draft_formats import GROUPS
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.errors import ConfigError
from tilewright.evaluate.measure.drafts import count_drafts
from tilewright.evaluate.measure.timing import TimedRequest
from tilewright.evaluate.results.record import Drafts
from tilewright.evaluate.results.result_file import dumps, loads
from tilewright.evaluate.sweep.export import csv_text, markdown
from tilewright.evaluate.sweep.summary import rows
from tilewright.evaluate.sweep.trial import Trial
from tilewright.runtime.speculative.config import read_speculative_config

CONFIG = '{"method": "mtp", "num_speculative_tokens": 3}'
NUM_SLOTS = 4


def measured(name: str) -> Drafts:
    """Return the acceptance of the tiny trained layer in a format."""
    model, layer, text = tiny.load()
    made: Any = compiled(model, "cpu-native", max_batch=NUM_SLOTS, max_context=tiny.LENGTH)
    attach(made, model, layer, "cpu-native", precision=precision_of(**dict.fromkeys(GROUPS, name)))
    params = SamplingParams(max_tokens=24)
    jobs = [TimedRequest(tuple(line[:40].tolist()), params) for line in text[:NUM_SLOTS]]
    found = count_drafts(made, jobs, read_speculative_config(CONFIG))
    made.close()
    return found


def draft_cell(name: str) -> Trial:
    heading = f"precision_cfg = {{ff2: bf16, draft_ff2: {name}}}, fidelity_cfg = {{li_ff2: hifi2}}"
    return cell(f"draft-{name}", heading=heading, speculative=CONFIG)


def lines_of(table: str) -> list[list[str]]:
    return [[text.strip() for text in line.split("|")] for line in table.splitlines()]


def test_sweep_over_draft_formats_shows_their_acceptance(tmp_path: Path) -> None:
    found = {name: measured(name) for name in ("fp32", "bfp2")}
    cells = {name: draft_cell(name) for name in found}
    results = {
        name: replace(speed_result(of, [9.0, 11.0], effective_id="same"), drafts=found[name])
        for name, of in cells.items()
    }
    for result in results.values():
        assert loads(dumps(result)) == result
    pairs = [(cells[name], each) for name, each in results.items()]
    state = journal(tmp_path / "s.jsonl", pairs).state
    assert [row.drafts for row in rows(state)] == [*found.values()]
    table = markdown(state).partition("## Drafts\n\n")[2]
    for name, drafts in found.items():
        shares = " ".join(f"{100 * share:.1f}" for share in drafts.shares)
        shown = [f"draft_ff2: {name}", str(drafts.num_drafts), f"{drafts.length:.2f}", shares]
        assert [text.strip() for text in shown] in [line[4:8] for line in lines_of(table)]
    assert (found["fp32"].length or 0) > (found["bfp2"].length or 0) > 1
    lines = list(csv.DictReader(io.StringIO(csv_text(state))))
    assert [line["draft_precision"] for line in lines] == ["draft_ff2: fp32", "draft_ff2: bfp2"]


def test_cell_with_drafts_passes_them_to_bench() -> None:
    of = draft_cell("bf16")
    words = of.arguments()
    assert words[words.index("--speculative-config") + 1] == CONFIG
    assert of.id != replace(of, speculative="").id


def test_drafts_with_rising_acceptance_are_refused() -> None:
    with pytest.raises(ConfigError, match="allowed: counts that fall by position"):
        Drafts("mtp", "", 9, 27, (3, 4, 1))
