"""Precision sections of PERF.md: one a heading, one row for equal numbers."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from tests.evaluate.report.perf_records import HEADINGS, make, rows
from tilewright.compiler.precision import list_precisions, load_precision
from tilewright.evaluate.report import perf_md, perf_tables
from tilewright.evaluate.report.perf_tables import render_results
from tilewright.evaluate.results.record import Result


def precision_sections(results: list[Result]) -> list[perf_md.Section]:
    document = perf_md.parse(render_results(results))
    return [section for section in document.sections if section.kind == "precision"]


def test_equal_configurations_are_one_row_that_names_all() -> None:
    results = []
    for name in ("all-bfp8", "accuracy"):
        results.append(make(name, effective_id="same", prompt_length=2048))
        results.append(make(name, effective_id="same"))
    (row,) = rows(results, "long_context", context_k=2)
    assert row.precision == "accuracy, all-bfp8"
    assert len(rows(results, "accuracy")) == 1
    home, other = precision_sections(results)
    assert (home.title, other.title) == (HEADINGS["accuracy"], HEADINGS["all-bfp8"])
    assert (len(home.rows), other.rows) == (1, ())
    assert (home.intro, other.intro) == (
        "Precision `accuracy`.",
        "Precision `all-bfp8`.\n\nOn CPU, SmolLM2-135M-Instruct, `all-bfp8` shares the "
        "numbers and the row of `accuracy`.",
    )
    text = render_results(results)
    assert text.count("- On CPU, SmolLM2-135M-Instruct: `accuracy`, `all-bfp8` have equal") == 2


def test_equal_elsewhere_different_here_is_a_row_in_both() -> None:
    """What one device cannot tell apart, another one may."""
    results = [make(name, effective_id="same") for name in ("all-bfp8", "accuracy", "mine")]
    results += [make(name, device="TG") for name in ("all-bfp8", "accuracy", "mine")]
    found = precision_sections(results)
    assert [[row.device for row in section.rows] for section in found] == [
        ["CPU", "TG"],
        ["TG"],
        ["TG"],
    ]
    note = "- On CPU, SmolLM2-135M-Instruct, `mine` shares the numbers"
    assert f"{note} and the row of `accuracy`.\n" in render_results(results)


def test_the_twelve_published_settings_have_their_headings() -> None:
    names = [name for name in list_precisions() if name.startswith(("mlp-", "wo-"))]
    assert len(names) == 12
    headings = {
        name: load_precision(name).resolve(30, "SmolLM2-135M-Instruct").heading() for name in names
    }
    results = [
        make(
            "mine",
            precision_name=name,
            precision_id=name,
            heading=headings[name],
            # as on a target without formats of activations
            effective_id="wo" if name.startswith("wo-") else name,
        )
        for name in names
    ]
    found = precision_sections(results)
    seed = perf_md.parse((Path(__file__).parents[2] / "goldens" / "seed_perf.md").read_text())
    published = {section.title for section in seed.sections if section.kind == "precision"}
    assert {section.title for section in found} == published and len(found) == 12
    assert [len(section.rows) for section in found] == [1] * 10 + [0] * 2
    same = "On CPU, SmolLM2-135M-Instruct, `{}` shares the numbers and the row of `{}`."
    for section, name in zip(found[10:], names[10:], strict=True):
        assert same.format(name, names[9]) in section.intro


def test_names_of_one_heading_share_its_section() -> None:
    results = [
        make("mine", precision_name=name, precision_id="p", effective_id="e") for name in "ba"
    ]
    results.append(make("all-bfp8", precision_name="0", precision_id="0", effective_id="e"))
    first, second = precision_sections(results)
    assert [len(section.rows) for section in (first, second)] == [1, 0]
    assert second.intro.startswith("Precision `a`, `b`.")
    assert "`a`, `b` share the numbers and the row of `0`." in second.intro


def test_what_a_target_made_of_a_configuration_before_is_gone() -> None:
    """Also where it has another name since."""
    old = make("mine", precision_name="a", precision_id="p", effective_id="old")
    new = make("mine", precision_name="b", precision_id="p", effective_id="new", day=2)
    for results in ([old, new], [new, old]):
        (section,) = precision_sections(results)
        assert (len(section.rows), section.intro) == (1, "Precision `b`.")


def test_a_section_of_layers_counts_their_rules() -> None:
    layered = f"{HEADINGS['mine']}, layer_cfg = {{0-3: {{ff2: bfp4}}, 5: {{ff2: bf16}}}}"
    (section,) = precision_sections([make("mine", heading=layered)])
    assert section.title == f"{HEADINGS['mine']}, layer_cfg = mine"
    assert section.intro == "Precision `mine`. 2 layer rules."
    (row,) = section.rows
    assert row.speed == 120.0
    result = make("mine", heading=layered, precision_name="bf16")
    link = {layered: f"{HEADINGS['mine']}, layer_cfg = [bf16](precision_cfgs/bf16.yaml)"}
    with mock.patch.object(perf_tables, "titles_of", return_value=link):
        (section,) = precision_sections([result])
    path = "precision_cfgs/bf16.yaml"
    assert section.intro == f"Precision `bf16`. 2 layer rules: [{path}]({path})."
