"""Titles of precision sections: layers' rules give way to a name, and the name is read back."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.evaluate.results.test_results import make
from tilewright.compiler.precision import (
    PrecisionConfig,
    list_precisions,
    load_precision,
    parse_heading,
)
from tilewright.compiler.precision import reading as precision_reading
from tilewright.errors import ConfigError
from tilewright.evaluate.report import perf_md, precision_titles
from tilewright.evaluate.report.precision_titles import (
    count_layer_rules,
    linked_file,
    section_precision,
    titles_of,
)
from tilewright.evaluate.results.record import Result

START = "precision_cfg = {ff1_3: bfp8}, fidelity_cfg = {li_ff1_3: hifi2}"
LAYERED = f"{START}, layer_cfg = {{0-3: {{ff2: bfp4}}, 5: {{ff2: bf16, wo: bfp4}}}}"
NUM_LAYERS = 30


def section(title: str) -> perf_md.Section:
    (found,) = perf_md.parse(f"## {title}\n").sections
    return found


def result(heading: str, name: str, **changes: Any) -> Result:
    return make(heading=heading, precision_name=name, precision_id=name, **changes)


@pytest.fixture
def shipped(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder of configurations with one per-layer configuration more."""
    for name in ("base", "bf16", "accuracy"):
        text = (precision_reading._shipped_folder() / f"{name}.yaml").read_text()
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "found.yaml").write_text(
        "description: found\nlayers:\n  0-3:\n    precision: {ff2: bfp4}\n"
        "  28-29:\n    precision: {wo: bf16}\n"
    )
    monkeypatch.setattr(precision_reading, "_shipped_folder", lambda: tmp_path)
    return tmp_path


def resolved(precision: PrecisionConfig, model: str = "SmolLM2-135M-Instruct") -> str:
    return precision.resolve(NUM_LAYERS, model).heading()


def test_a_heading_without_layers_is_its_own_title() -> None:
    for name in list_precisions():
        heading = resolved(load_precision(name))
        if "layer_cfg" not in heading:
            assert titles_of([result(heading, name)]) == {heading: heading}
            assert resolved(section_precision(section(heading))) == heading
            assert count_layer_rules(heading) == 0


def test_layers_give_way_to_the_name_of_what_ships(shipped: Any) -> None:
    heading = resolved(load_precision("found"))
    assert "layer_cfg = {0-3: {ff2: bfp4}, 28-29: {wo: bf16}}" in heading
    title = titles_of([result(heading, "found")])[heading]
    start = heading[: heading.index(", layer_cfg")]
    assert title == f"{start}, layer_cfg = [found](precision_cfgs/found.yaml)"
    assert linked_file(title) == "precision_cfgs/found.yaml"
    assert section(title).kind == "precision"
    assert section_precision(section(title)) == load_precision("found")
    assert count_layer_rules(heading) == 2


def test_a_shipped_name_is_not_given_to_what_it_does_not_mean(shipped: Any) -> None:
    """As a file that was changed after the measurement, or a user's own of the same name."""
    other = resolved(load_precision("found")).replace("ff2: bfp4", "ff2: bf16")
    for heading in (other, f"{START}, layer_cfg = {{9999-99999: {{ff2: bfp4}}}}"):
        assert titles_of([result(heading, "found")]) == {heading: heading}
    assert resolved(section_precision(section(other))) == other


def test_other_names_stand_bare_and_are_refused_when_read(shipped: Any) -> None:
    title = titles_of([result(LAYERED, "mine")])[LAYERED]
    assert title == f"{START}, layer_cfg = mine"
    assert linked_file(title) is None
    with pytest.raises(ConfigError, match=r"'mine' does not ship; allowed: .*found"):
        section_precision(section(title))


def test_the_block_axis_is_kept(shipped: Any) -> None:
    (shipped / "out.yaml").write_text("block_axis: out\nlayers:\n  1:\n    precision: {wo: bf16}\n")
    heading = resolved(load_precision("out"))
    assert heading.endswith(", block_axis = out")
    title = titles_of([result(heading, "out")])[heading]
    assert title.endswith(", layer_cfg = [out](precision_cfgs/out.yaml), block_axis = out")
    assert section_precision(section(title)).block_axis == "out"
    title = titles_of([result(f"{LAYERED}, block_axis = out", "mine")]).popitem()[1]
    assert title == f"{START}, layer_cfg = mine, block_axis = out"
    with pytest.raises(ConfigError, match="'mine' does not ship"):
        section_precision(section(title))


def test_of_several_names_one_that_ships_is_taken(shipped: Any) -> None:
    heading = resolved(load_precision("found"))
    results = [result(heading, "a"), result(heading, "found"), result(LAYERED, "b")]
    titles = titles_of(results)
    assert "[found]" in titles[heading]
    assert titles[LAYERED].endswith(" = b")


def test_the_two_named_sections_have_their_configurations() -> None:
    for name in ("Performance", "Accuracy"):
        assert section_precision(section(name)) == load_precision(name.lower())


def test_a_link_from_another_folder_is_read() -> None:
    title = f"{START}, layer_cfg = [bf16](../precision_cfgs/bf16.yaml)"
    assert section_precision(section(title)) == load_precision("bf16")
    for wrong in ("[bf16](precision_cfgs/accuracy.yaml)", "[no](precision_cfgs/no.yaml)", "/etc/a"):
        with pytest.raises(ConfigError, match="does not ship"):
            section_precision(section(f"{START}, layer_cfg = {wrong}"))


def test_a_layered_heading_is_read_as_it_stands() -> None:
    assert resolved(section_precision(section(LAYERED))) == resolved(parse_heading(LAYERED))
    with pytest.raises(ConfigError):
        section_precision(section(f"{START}, layer_cfg = {{0: nonsense}}"))


names = st.text(min_size=1, max_size=12).filter(
    lambda text: text == text.strip() and text.isprintable() and "|" not in text
)


@given(names, st.booleans())
def test_any_name_makes_a_title_that_parses(name: str, has_axis: bool) -> None:
    heading = LAYERED + (", block_axis = out" if has_axis else "")
    with mock.patch.object(precision_titles, "list_precisions", dict):
        (title,) = titles_of([result(heading, name)]).values()
    document = perf_md.parse(f"## {title}\n\nText.\n")
    (found,) = document.sections
    assert (found.title, found.kind, found.rows) == (title, "precision", ())


def test_the_search_for_the_number_of_layers_ends(
    shipped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no tried number of layers comes to keeps its whole heading."""
    (shipped / "first.yaml").write_text("layers:\n  0:\n    precision: {wo: bf16}\n")
    heading = resolved(load_precision("first"))
    assert "[first]" in titles_of([result(heading, "first")])[heading]
    monkeypatch.setattr(precision_titles, "_MAX_TRIED", 1)
    assert titles_of([result(heading, "first")]) == {heading: heading}
