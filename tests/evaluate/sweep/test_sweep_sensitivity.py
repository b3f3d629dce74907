"""Sensitivity: cost and saving per part, with hand-computed values, tables and plots.

A step takes 2 ms, and a million bytes take 1 ms in float32 or 0.5 ms in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sweep_cells import (
    accuracy_cell,
    accuracy_result,
    cell,
    done,
    failed,
    hits,
    planned,
    renamed,
    speed_result,
)
from tilewright.errors import ConfigError
from tilewright.evaluate.plots import plot
from tilewright.evaluate.report.markdown import Heading, TableBlock, parse_blocks
from tilewright.evaluate.results.record import Result
from tilewright.evaluate.results.stats import mcnemar
from tilewright.evaluate.sweep.journal import Added, SweepState
from tilewright.evaluate.sweep.sensitivity import Lowered, Sensitivity, observations, sensitivities
from tilewright.evaluate.sweep.sensitivity_report import heat_maps, markdown
from tilewright.evaluate.sweep.summary import rows
from tilewright.evaluate.sweep.trial import Trial

Measured = tuple[Trial, Result | None]
NUM_POSITIONS = 400
MEGA = 1_000_000
BASE_BYTES = {"float32": 8 * MEGA}
LOWER = {"float32": 6 * MEGA, "bfp8 blocks": MEGA}
LAYER = {"float32": 7 * MEGA, "bfp8 blocks": MEGA // 2}


def step_ms(step_bytes: Mapping[str, int]) -> float:
    return 2.0 + step_bytes.get("float32", 0) / 1e6 + step_bytes.get("bfp8 blocks", 0) / 2e6


def part(
    name: str,
    step_bytes: Mapping[str, int],
    *,
    kl: float,
    wrong: int | Sequence[bool] = 0,
    ms: Sequence[float] | None = None,
    effective: str = "",
    **changes: Any,
) -> list[Measured]:
    """Return a part's cells. An empty name is the base. ``ms``: step times of the rounds."""
    precision = f"{name}=bfp8:hifi2" if name else "a"
    fields = {"part": name, "step_bytes": dict(step_bytes), **changes}
    fields["weight_bytes"] = sum(step_bytes.values()) + 100  # an embedding
    of = accuracy_cell(precision, **fields)
    found = hits(wrong, NUM_POSITIONS) if isinstance(wrong, int) else wrong
    came_to = {"effective_id": effective or f"of {precision}"}
    measured: list[Measured] = [(of, accuracy_result(of, found, kl, **came_to))]
    if ms is None:
        ms = () if "." in name else (step_ms(step_bytes),) * 3
    for number, each in enumerate(ms):
        of = cell(precision, round=number, **fields)
        measured.append((of, speed_result(of, [1e3 / each], **came_to)))
    return measured


BASE = part("", BASE_BYTES, kl=0.01, wrong=4)
SWEEP = [
    *BASE,
    *part("ff2", LOWER, kl=0.05, wrong=24, ms=(8.5, 9.0, 8.0)),
    *part("wo", LAYER, kl=0.0105, wrong=4),
    *part("kv_cache", BASE_BYTES, kl=0.01, wrong=4, effective="of a"),
    *part("all", {"bfp8 blocks": 4 * MEGA}, kl=0.2, wrong=100),
    *part("0.ff2", LAYER, kl=0.04, wrong=20),
    *part("1.ff2", LAYER, kl=0.0101, wrong=4),
    *part("1.wo", LAYER, kl=0.009, wrong=3),
]


def state_of(measured: Sequence[Measured], base: str | None = "id-a") -> SweepState:
    state = SweepState(planned("sensitivity", base=base))
    for of, found in measured:
        state.apply(Added(of))
        state.apply(failed(of) if found is None else done(of, found))
    return state


def only(measured: Sequence[Measured]) -> Sensitivity:
    (found,) = sensitivities(state_of(measured))
    return found


def lowered(measured: Sequence[Measured], name: str) -> Lowered:
    found = only(measured).find(name)
    assert found is not None
    return found


def test_what_a_group_costs_and_wins() -> None:
    found = lowered(SWEEP, "ff2")
    assert (found.part, found.group, found.layer) == ("ff2", "ff2", None)
    assert found.precision == "ff2=bfp8:hifi2"
    assert found.kl_lost == pytest.approx(0.04)
    assert found.kl_error == pytest.approx(math.hypot(0.001, 0.005))
    assert found.is_clear
    assert found.top1_lost == pytest.approx(100 * 20 / NUM_POSITIONS)
    assert found.bytes_saved == MEGA
    paired = found.paired
    assert paired is not None
    assert (paired.base, paired.b, paired.c, paired.p) == ("a", 20, 0, mcnemar(20, 0))
    assert found.kl_per_mb == pytest.approx(0.04)
    assert not found.is_same


def test_a_group_s_time_is_measured_round_by_round() -> None:
    found = lowered(SWEEP, "ff2")
    assert found.predicted is None and found.measured is not None
    # Savings of the three rounds: mean, and Student's interval with two degrees of freedom.
    assert found.measured.ms == pytest.approx(1.5)
    half = 4.303 * 0.5 / math.sqrt(3)
    assert found.measured.interval == pytest.approx((1.5 - half, 1.5 + half))
    assert found.kl_per_ms == pytest.approx(0.04 / 1.5)


def test_only_rounds_of_both_are_compared() -> None:
    base = part("", BASE_BYTES, kl=0.01, ms=(10.0, 20.0, 30.0))
    del base[2]  # its first round
    other = part("ff2", LOWER, kl=0.02, ms=(9.0, 1.0, 27.0))
    found = lowered([*base, *other], "ff2")
    assert found.measured is not None
    assert found.measured.ms == pytest.approx((1.0 + 3.0) / 2)
    assert found.measured.interval is None  # in two rounds
    del other[1], other[2]
    found = lowered([*base, *other], "ff2")
    assert found.measured is None and found.kl_per_ms is None


def test_a_layer_s_time_is_predicted() -> None:
    sensitivity = only(SWEEP)
    model = sensitivity.cost_model
    assert model is not None
    found = lowered(SWEEP, "0.ff2")
    assert (found.layer, found.group, found.measured) == (0, "ff2", None)
    expected = model.predict(BASE_BYTES) - model.predict(LAYER)
    assert found.predicted == pytest.approx(expected)
    assert found.predicted == pytest.approx(0.75, abs=0.02)
    assert found.bytes_saved == MEGA // 2
    assert found.kl_lost == pytest.approx(0.03)


def test_no_part_has_two_times() -> None:
    timed = part("0.wo", LAYER, kl=0.01, ms=(5.0, 5.0, 5.0))
    found = only([*SWEEP, *timed])
    assert all(each.measured is None or each.predicted is None for each in found.parts)
    assert all(each.predicted is None for each in found.groups)
    assert all(each.measured is None for each in found.layers)
    assert lowered([*SWEEP, *timed], "0.wo").predicted is not None
    assert {each.part for each in found.groups} == {"ff2", "wo", "kv_cache", "all"}
    assert {each.part for each in found.layers} == {"0.ff2", "1.ff2", "1.wo", "0.wo"}
    assert found.find("3.ff2") is None and found.find("") is None
    assert found.base.name == "a"


def test_without_enough_timed_rows_nothing_is_predicted() -> None:
    untimed = [each for each in SWEEP if each[0].kind == "accuracy"]
    found = only(untimed)
    assert found.cost_model is None
    assert all(each.predicted is each.measured is None for each in found.parts)
    assert all(each.kl_per_ms is None and each.kl_per_mb != 0 for each in found.parts)


def test_a_kind_that_was_never_timed_is_not_predicted() -> None:
    strange = {"float32": 7 * MEGA, "q40 blocks": 5}
    assert lowered([*SWEEP, *part("0.wo", strange, kl=0.02)], "0.wo").predicted is None


def test_nothing_is_saved_where_the_target_makes_the_same_of_it() -> None:
    found = lowered(SWEEP, "kv_cache")
    assert found.is_same and found.bytes_saved == 0 and found.kl_lost == 0
    assert found.kl_per_mb is None
    assert not any(each.is_same for each in only(SWEEP).parts if each.part != "kv_cache")


def test_a_loss_within_the_noise_is_not_clear() -> None:
    assert not lowered(SWEEP, "wo").is_clear
    assert not lowered(SWEEP, "1.wo").is_clear and lowered(SWEEP, "1.wo").kl_lost < 0
    assert lowered(SWEEP, "0.ff2").is_clear


def test_more_bytes_than_before_are_saved_negatively() -> None:
    found = lowered([*SWEEP, *part("lm_head", {"float32": 9 * MEGA}, kl=0.02)], "lm_head")
    assert found.bytes_saved == -MEGA and found.kl_per_mb is None
    assert found.measured is not None
    assert found.measured.ms == pytest.approx(-1.0) and found.kl_per_ms is None


def test_a_part_without_accuracy_is_left_out() -> None:
    broken: list[Measured] = [(accuracy_cell("wqkv=bfp8:hifi2", part="wqkv"), None)]
    assert only([*SWEEP, *broken]).find("wqkv") is None


def test_divergences_that_cannot_be_compared_are_left_out() -> None:
    def changed(at: int, **changes: Any) -> list[Measured]:
        measured: list[Measured] = [BASE[0], *part("ff2", LOWER, kl=0.1)[:1]]
        of, found = measured[at]
        assert found is not None and found.accuracy is not None
        measured[at] = of, renamed(found, accuracy=replace(found.accuracy, **changes))
        return measured

    assert only(changed(1, kl_mean=None)).parts == ()
    assert only(changed(1, reference_id="another")).parts == ()
    with pytest.raises(ConfigError, match="base has no accuracy"):
        only(changed(0, kl_mean=None))
    vague = lowered(changed(1, kl_error=None), "ff2")
    assert vague.kl_error == math.inf and not vague.is_clear


def test_a_sweep_whose_base_was_not_measured_is_refused() -> None:
    for measured in ([], SWEEP[len(BASE) :], BASE[1:], [(BASE[0][0], None), *SWEEP[1:]]):
        with pytest.raises(ConfigError, match="base has no accuracy yet; allowed"):
            sensitivities(state_of(measured))
    with pytest.raises(ConfigError, match="base has no accuracy"):
        sensitivities(state_of(SWEEP, base=None))


def test_each_model_and_target_stands_beside_its_own_base() -> None:
    def moved(measured: Sequence[Measured], **place: str) -> list[Measured]:
        return [(replace(of, **place), found) for of, found in measured]

    other = [*part("", BASE_BYTES, kl=0.5), *part("ff2", LOWER, kl=0.6)]
    found = sensitivities(
        state_of(
            [
                *SWEEP,
                *moved(other, model_hash="other", model_name="Other"),
                *moved(SWEEP[len(BASE) :], target="reference"),  # failed base
            ]
        )
    )
    assert [each.base.cell.model_name for each in found] == ["Tiny", "Other"]
    (ff2,) = found[1].parts
    assert ff2.kl_lost == pytest.approx(0.1)


def test_observations_are_the_rows_that_were_timed() -> None:
    found = observations(rows(state_of(SWEEP)))
    assert [each.name for each in found] == [
        *("a", "ff2=bfp8:hifi2", "wo=bfp8:hifi2", "kv_cache=bfp8:hifi2", "all=bfp8:hifi2"),
    ]
    assert found[1].step_bytes == LOWER and found[1].ms == pytest.approx(8.5)
    unknown = part("", {}, kl=0.01, ms=(5.0,))
    assert observations(rows(state_of(unknown))) == []


def tables(text: str) -> list[list[dict[str, str]]]:
    found = [each for each in parse_blocks(text, name="text") if isinstance(each, TableBlock)]
    return [[dict(zip(t.columns, row.cells, strict=True)) for row in t.rows] for t in found]


def test_groups_are_a_table_of_measured_times() -> None:
    groups = tables(markdown(state_of(SWEEP)))[0]
    assert [row["Part"] for row in groups] == ["all", "ff2", "wo"]  # most costly first
    whole, ff2, wo = groups
    assert not any("predicted" in column for column in ff2)
    assert ff2 == {
        "Part": "ff2",
        "KL lost (nats)": "4.00e-02 +- 5.1e-03",
        "Rank": "2",
        "Top-1 lost (points)": "5.0",
        "vs base": f"+0 -20 p={mcnemar(20, 0):.2g}",
        "Saved (MB)": "1.00",
        "KL / MB": "4.00e-02",
        "Saved (ms a step, measured)": "1.50",
        "95 % CI": "0.26 to 2.74",
        "KL / ms (measured)": "2.67e-02",
    }
    assert (whole["Rank"], wo["Rank"]) == ("1", "3")
    assert wo["KL lost (nats)"].startswith("~5.00e-04 +- ")
    assert wo["vs base"] == "+0 -0 p=1"


def test_layers_are_a_table_of_predicted_times() -> None:
    layers = tables(markdown(state_of(SWEEP)))[1]
    assert [row["Part"] for row in layers] == ["0.ff2", "1.ff2", "1.wo"]
    assert not any("measured" in column or "CI" in column for column in layers[0])
    saved = [float(row["Saved (ms a step, predicted)"]) for row in layers]
    assert saved == pytest.approx([0.75] * 3, rel=0.05)
    assert float(layers[0]["KL / ms (predicted)"]) == pytest.approx(0.03 / 0.75, rel=0.05)
    # These positions do not separate the last two parts. Their ranks are a range.
    assert [row["Rank"] for row in layers] == ["1", "2-3", "2-3"]
    assert layers[2]["KL lost (nats)"].startswith("~-1.00e-03")
    assert layers[2]["vs base"] == "+1 -0 p=1" and layers[2]["Top-1 lost (points)"] == "-0.2"


def test_the_document_says_what_it_rests_on() -> None:
    text = markdown(state_of(SWEEP))
    titles = [b.title for b in parse_blocks(text, name="text") if isinstance(b, Heading)]
    assert titles == [
        "Sensitivity: Tiny on CPU, bfp8:hifi2",
        "Groups, measured",
        "Groups of single layers, time predicted",
        "The cost model",
    ]
    assert "Base `a`: KL 0.01, top-1 99.0 % of 400 positions." in text
    assert "Not honoured on this target, so that nothing changes: kv_cache." in text
    assert "marked `~`" in text
    model = tables(text)[2]
    assert [row["Configuration"] for row in model] == [
        each.name for each in observations(rows(state_of(SWEEP)))
    ]
    assert all(abs(float(row["Predicted, off by (%)"])) < 5 for row in model)
    assert "fitted on the configurations below" in text
    assert "10^9 bytes stored as bfp8 blocks, " in text and "stored as float32" in text


def test_a_sweep_of_groups_alone_has_no_layers_and_no_model() -> None:
    text = markdown(state_of([*part("", BASE_BYTES, kl=0.0, ms=()), *part("ff2", LOWER, kl=0.1)]))
    assert "single layers" not in text and "cost model" not in text
    assert "Not honoured" not in text
    (ff2,) = tables(text)[0]
    assert ff2["Saved (ms a step, measured)"] == ff2["95 % CI"] == ""


def test_few_rounds_have_no_interval() -> None:
    short = [each for each in SWEEP if each[0].round < 2]
    assert {row["95 % CI"] for row in tables(markdown(state_of(short)))[0]} == {""}


def test_every_place_has_its_sections() -> None:
    other = [(replace(of, model_hash="x", model_name="Other"), found) for of, found in SWEEP]
    text = markdown(state_of([*SWEEP, *other]))
    assert text.count("## Sensitivity: Tiny on CPU") == 1
    assert text.count("## Sensitivity: Other on CPU") == 1


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """Return the plotted series."""
    found: list[SimpleNamespace] = []

    def draw(values: object, **options: object) -> SimpleNamespace:
        found.append(SimpleNamespace(values=values, **options))
        return found[-1]

    monkeypatch.setattr(plot, "draw_heat_map", draw)
    return found


def test_heat_maps_are_layers_by_groups(drawn: list[SimpleNamespace]) -> None:
    found = heat_maps(state_of(SWEEP))
    assert [stem for stem, _ in found] == ["sensitivity", "sensitivity-per-ms"]
    assert [figure for _, figure in found] == drawn
    lost, per_ms = drawn
    assert lost.rows == ["0", "1"] and lost.columns == ["ff2", "wo"]
    assert lost.values == [[pytest.approx(0.03), None], [pytest.approx(1e-4), pytest.approx(-1e-3)]]
    assert lost.marked == [[False, False], [True, True]]
    assert lost.title == "Tiny on CPU, bfp8:hifi2 beside a"
    assert "predicted" in per_ms.label and "predicted" not in lost.label
    assert per_ms.values[0] == [pytest.approx(0.03 / 0.75, rel=0.05), None]


def test_without_predictions_there_is_one_heat_map(drawn: list[SimpleNamespace]) -> None:
    untimed = [each for each in SWEEP if each[0].kind == "accuracy"]
    assert [stem for stem, _ in heat_maps(state_of(untimed))] == ["sensitivity"]


def test_without_layers_there_is_no_heat_map(drawn: list[SimpleNamespace]) -> None:
    groups = [each for each in SWEEP if "." not in each[0].part]
    assert heat_maps(state_of(groups)) == [] and drawn == []


def test_heat_maps_of_two_places_have_two_names(drawn: list[SimpleNamespace]) -> None:
    other = [(replace(of, model_hash="x", model_name="Other"), found) for of, found in SWEEP]
    stems = [stem for stem, _ in heat_maps(state_of([*SWEEP, *other]))]
    assert stems == [
        *("sensitivity", "sensitivity-per-ms"),
        *("sensitivity-2", "sensitivity-per-ms-2"),
    ]
    assert drawn[3].title.startswith("Other on CPU")


def test_a_heat_map_is_drawn() -> None:
    figures = heat_maps(state_of(SWEEP))
    assert all(figure.axes for _, figure in figures)
