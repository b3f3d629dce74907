"""Search on planted losses and times. No cell runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.evaluate.sweep.planted import (
    BASE_KL,
    LEVELS,
    NUM_POSITIONS,
    ROUNDS,
    Planted,
    asked,
    begin,
    is_uniform,
    known_sensitivities,
    planted_accuracy,
    planted_kl,
    planted_model,
    planted_ms,
    read_back,
    run,
    search,
    sizes,
    winner,
)
from tests.sweep_cells import accuracy_cell, accuracy_result, hits, planned, speed_result
from tests.sweep_cells import done as done_event
from tests.sweep_cells import journal as journal_of
from tilewright.compiler.precision import load_precision
from tilewright.errors import ConfigError
from tilewright.evaluate.search.levels import PRODUCT_GROUPS, Level
from tilewright.evaluate.search.plan import GUARD, adopt, searched_place
from tilewright.evaluate.search.report import SearchResult
from tilewright.evaluate.sweep import plans
from tilewright.evaluate.sweep.journal import Added, SweepJournal
from tilewright.evaluate.sweep.model import SweptModel
from tilewright.evaluate.sweep.summary import rows
from tilewright.utils.plain_yaml import parse_yaml


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SweptModel:
    return planted_model(tmp_path_factory.mktemp("three") / "three")


@pytest.fixture(scope="module")
def searched(
    tmp_path_factory: pytest.TempPathFactory, model: SweptModel
) -> tuple[SearchResult, Planted]:
    """Search result for read-only tests."""
    return search(tmp_path_factory.mktemp("searched"), asked(model))


@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param({"max_kl": 0.004}, marks=pytest.mark.slow),
        {"max_kl": 0.02},
        pytest.param({"max_kl": 0.1}, marks=pytest.mark.slow),
        pytest.param({"min_top1": 90.0}, marks=pytest.mark.slow),
        pytest.param({"min_top1": 95.0}, marks=pytest.mark.slow),
        {"min_top1": 95.0, "max_kl": 0.01},
    ],
    ids=str,
)
def test_no_uniform_configuration_within_the_bound_is_faster(
    tmp_path: Path, model: SweptModel, bounds: dict[str, float]
) -> None:
    of = asked(model, **bounds)
    found, runner = search(tmp_path, of)
    best = winner(found)
    kl = planted_kl(model, best.cell.heading)
    assert kl <= bounds.get("max_kl", 1.0)
    accuracy = planted_accuracy(kl)
    assert 100 * accuracy.num_top1 / NUM_POSITIONS >= bounds.get("min_top1", 0.0)
    uniform = [row for row, _, _ in found.shown[:-1]]
    assert [row.name for row in uniform] == ["bf16", *(f"all={Level.parse(x)}" for x in LEVELS)]
    # The winner has a margin to the top-1 bound. Candidates without the margin do not compete.
    within = [
        row
        for row, _, is_within in found.shown[:-1]
        if is_within and row.accuracy and of.bounds.keeps(row.accuracy, 0, guard=GUARD)
    ]
    assert within, "the base at least"
    assert all(planted_ms(best.cell) <= planted_ms(row.cell) * (1 + 1e-9) for row in within)
    assert best.num_bytes is not None
    assert read_back(tmp_path / "found.yaml", found.yaml or "", model) == best.cell.precision_id
    assert len(found.table().rows) == len(LEVELS) + 2
    asked_for = len(runner.measured)
    assert asked_for == len({cell.id for cell in runner.measured}), "a cell was run twice"


def test_the_winner_mixes_levels_and_spends_the_bound(
    searched: tuple[SearchResult, Planted],
) -> None:
    found, runner = searched
    best = winner(found)
    assert not is_uniform(best)
    assert best.accuracy is not None and best.accuracy.kl_mean is not None
    assert 0.025 < best.accuracy.kl_mean <= 0.05, "the bound is far from spent"
    layers = parse_yaml(found.yaml or "", "found")["layers"]  # type: ignore[index]
    assert layers, "the planted losses halve from layer to layer: layers must differ"
    assert any(line.startswith("Beside bf16: ") for line in found.comments)
    bisected = {cell.precision for cell in runner.measured if cell.precision.startswith("step-")}
    assert len(bisected) <= 8, "more than a bisection"


def test_the_file_says_where_it_comes_from(searched: tuple[SearchResult, Planted]) -> None:
    found, runner = searched
    lines = (found.yaml or "").splitlines()
    head = "\n".join(line for line in lines if line.startswith("# "))
    for words in (
        "KL <= 0.05",
        "tilewright sweep search",
        "2026-01-02",
        f"{NUM_POSITIONS} positions",
    ):
        assert words in head
    assert all(line in head for line in found.comments if line.startswith("Beside "))
    assert f"{100 * winner(found).accuracy.num_top1 / NUM_POSITIONS:.1f} %" in head  # type: ignore[union-attr]
    at = next(index for index, line in enumerate(lines) if line == "layers:")
    assert any("costs KL" in line and "saves" in line for line in lines[at:])
    assert found.comments[0].startswith("The search was guided by predicted times")
    assert "inherits: bf16" in lines
    assert runner.journal.state.count("failed") == 0


def test_uniform_configurations_and_the_winner_are_timed_in_common_later_rounds(
    searched: tuple[SearchResult, Planted],
) -> None:
    found, runner = searched
    later = list(range(ROUNDS, 2 * ROUNDS))
    for row, held_out, _ in found.shown:
        assert sorted(row.by_round) == later
        assert held_out is not None
    timed = [cell for cell in runner.measured if cell.kind == "speed" and cell.round >= ROUNDS]
    names = [row.cell.precision_id for row, _, _ in found.shown]
    assert [cell.precision_id for cell in timed] == names * ROUNDS, "not one after the other"
    assert len(set(names)) == len(LEVELS) + 2


def test_a_bound_that_nothing_meets_finds_nothing(tmp_path: Path, model: SweptModel) -> None:
    found, _ = search(tmp_path, asked(model, max_kl=BASE_KL / 2))
    assert found.yaml is None
    assert found.shown[0][0].name == "bf16"
    assert not any(is_within for _, _, is_within in found.shown)
    assert all(line[-1] == "no" for line in found.table().rows)


def test_bytes_alone_give_the_most_accurate_of_the_path(tmp_path: Path, model: SweptModel) -> None:
    base, small = sizes(model)["bf16"], sizes(model)["all=bfp4:lofi"]
    bound = (base + small) // 2
    found, _ = search(tmp_path, asked(model, max_bytes=bound))
    best = winner(found)
    assert (best.num_bytes or 0) <= bound
    kl = planted_kl(model, best.cell.heading)
    within = [row for row, _, is_within in found.shown if is_within]
    assert min(planted_kl(model, row.cell.heading) for row in within) == kl
    tighter, _ = search(tmp_path / "tighter", asked(model, max_bytes=small + 5_000))
    assert (winner(tighter).num_bytes or 0) <= small + 5_000
    assert planted_kl(model, winner(tighter).cell.heading) > kl


def test_bytes_that_nothing_fits_in_find_nothing(tmp_path: Path, model: SweptModel) -> None:
    found, _ = search(tmp_path, asked(model, max_bytes=1000))
    assert found.yaml is None


def test_accuracy_and_bytes_are_bound_together(tmp_path: Path, model: SweptModel) -> None:
    """The most accurate candidate is too large, and the smallest candidate is too inaccurate."""
    held = sizes(model)
    bound = held["all=bfp8:hifi2"] + 2_000
    found, _ = search(tmp_path, asked(model, max_kl=0.1, max_bytes=bound))
    best = winner(found)
    assert (best.num_bytes or 0) <= bound < held["bf16"]
    assert planted_kl(model, best.cell.heading) <= 0.1
    assert planted_kl(model, best.cell.heading) > BASE_KL
    smallest = held["all=bfp4:lofi"]
    none, _ = search(
        tmp_path / "none", asked(model, max_kl=BASE_KL * 1.01, max_bytes=smallest + 2_000)
    )
    assert none.yaml is None


def test_a_resumed_search_measures_nothing_again(
    model: SweptModel, searched: tuple[SearchResult, Planted]
) -> None:
    found, runner = searched
    size = runner.journal.path.stat().st_size
    again = Planted(SweepJournal.open(runner.journal.path), model)
    repeated = run(again, asked(model))
    assert again.measured == []
    assert runner.journal.path.stat().st_size == size
    assert repeated.yaml == found.yaml and repeated.comments == found.comments


def test_a_search_cut_short_anywhere_ends_the_same(
    tmp_path: Path, model: SweptModel, searched: tuple[SearchResult, Planted]
) -> None:
    found, runner = searched
    lines = runner.journal.path.read_bytes().splitlines(keepends=True)
    for share in (0.4, 0.95):
        path = tmp_path / f"{share}.jsonl"
        path.write_bytes(b"".join(lines[: int(share * len(lines))]))
        again = Planted(SweepJournal.open(path), model)
        kept = again.journal.state.count("done")
        assert run(again, asked(model)).yaml == found.yaml
        assert len(again.measured) == runner.journal.state.count("done") - kept


def test_a_base_that_has_failed_is_said(tmp_path: Path, model: SweptModel) -> None:
    with pytest.raises(
        ConfigError, match=r"bf16 has no accuracy \(failed: exit code 1: why\)"
    ) as e:
        search(
            tmp_path,
            asked(model),
            fails=lambda cell: cell.precision == "bf16" and cell.kind == "accuracy",
        )
    assert "\n" not in str(e.value) and "tilewright sweep restart" in str(e.value)


def test_a_group_that_has_failed_is_left_out_and_named(tmp_path: Path, model: SweptModel) -> None:
    found, _ = search(tmp_path, asked(model), fails=lambda cell: cell.precision == "ff2=bfp4:lofi")
    assert "ff2=bfp4:lofi was not measured, and is left out" in found.comments
    resolved = model.resolve(load_precision(winner(found).cell.heading))
    weights = [each for each in model.weights if each.group == "ff2"]
    formats = [str(resolved.format("ff2", layer=w.layer, fqn=w.fqn)) for w in weights]
    assert len(formats) == 3 and not any("bfp4" in each for each in formats)


def test_a_uniform_configuration_that_has_failed_is_not_shown(
    tmp_path: Path, model: SweptModel
) -> None:
    found, _ = search(tmp_path, asked(model), fails=lambda cell: "all=bfp8" in cell.precision)
    names = [row.name for row, _, _ in found.shown[:-1]]
    assert names == ["bf16", "all=q80:hifi2", "all=bfp4:lofi"] and found.yaml is not None


def test_a_step_that_fails_is_said(tmp_path: Path, model: SweptModel) -> None:
    with pytest.raises(ConfigError, match=r"step-\d+ has no accuracy \(failed: exit code 1: why\)"):
        search(
            tmp_path,
            asked(model),
            fails=lambda cell: cell.precision.startswith("step-"),
        )


def test_a_winner_that_cannot_be_timed_is_still_written(tmp_path: Path, model: SweptModel) -> None:
    found, _ = search(
        tmp_path,
        asked(model),
        fails=lambda cell: cell.kind == "speed" and cell.precision.startswith("step-"),
    )
    assert winner(found).speed is None
    assert any("no round in which both were timed" in line for line in found.comments)


def test_a_held_out_text_may_ask_for_a_safer_one(
    tmp_path: Path, model: SweptModel, searched: tuple[SearchResult, Planted]
) -> None:
    easy, _ = searched
    hard, _ = search(tmp_path / "hard", asked(model), held_out=1.3)
    remarks = [line for line in hard.comments if "a safer one was tried" in line]
    assert remarks and not any("safer" in line for line in easy.comments)
    kl = planted_kl(model, winner(hard).cell.heading)
    assert 1.3 * kl <= 0.05 < 1.3 * planted_kl(model, winner(easy).cell.heading)
    refused, held_out, is_within = hard.shown[-1]
    assert is_within and held_out is not None and held_out.kl_mean == pytest.approx(1.3 * kl)
    assert refused.cell.precision not in remarks[0]


def test_a_held_out_text_may_refuse_all(tmp_path: Path, model: SweptModel) -> None:
    found, _ = search(tmp_path, asked(model), held_out=1000.0)
    assert found.yaml is None
    assert sum("a safer one was tried" in line for line in found.comments) >= 2
    assert all(is_uniform(row) for row, _, _ in found.shown)


def test_known_accuracies_are_not_measured_again(
    tmp_path: Path, model: SweptModel, searched: tuple[SearchResult, Planted]
) -> None:
    known = known_sensitivities(tmp_path / "sensitivity.jsonl", model)
    of = replace(asked(model), takes_other_code=True)
    runner = Planted(begin(tmp_path / "search.jsonl", of, known), model)
    found = run(runner, of, known)
    adopted = set(known.state.cells) & set(runner.journal.state.cells)
    kinds = {cell_id: known.state.cells[cell_id].cell.kind for cell_id in adopted}
    measured = {cell.id for cell in runner.measured}
    accuracies = {cell_id for cell_id, kind in kinds.items() if kind == "accuracy"}
    assert accuracies and not accuracies & measured
    # The base, the uniform level and its five groups are timed again.
    groups = [group for group in model.groups() if group in PRODUCT_GROUPS]
    assert len(groups) == 5 and len(accuracies) == 2 + len(groups)
    assert {cell_id for cell_id, kind in kinds.items() if kind == "speed"} <= measured
    assert not any(cell.part.partition(".")[0].isdigit() for cell in runner.measured)
    alone, _ = searched
    assert winner(found).cell.precision_id == winner(alone).cell.precision_id


def test_a_known_accuracy_of_other_code_is_measured_again(
    tmp_path: Path, model: SweptModel
) -> None:
    known = known_sensitivities(tmp_path / "sensitivity.jsonl", model)
    journal = begin(tmp_path / "search.jsonl", asked(model), known)
    cells = [each.cell for each in journal.state.cells.values()]
    adopt(journal, cells, known.state, takes_other_code=False)
    assert journal.state.count("done") == 0
    adopt(journal, cells, known.state, takes_other_code=True)
    assert journal.state.count("done") > 0


def test_a_known_accuracy_beside_the_same_of_another_model_counts_alone(
    tmp_path: Path, model: SweptModel
) -> None:
    """Results of another model do not count."""
    known = known_sensitivities(tmp_path / "sensitivity.jsonl", model)
    mine = [state.cell for state in known.state.cells.values()]
    other = [replace(cell, model_hash="other") for cell in mine]
    known.append(
        *(Added(cell) for cell in other),
        *(done_event(cell, speed_result(cell, [3.0])) for cell in other if cell.kind == "speed"),
    )
    runner = Planted(begin(tmp_path / "search.jsonl", asked(model), known), model)
    found = run(runner, asked(model), known)
    off = float(found.comments[0].rpartition("off by ")[2].split()[0])
    assert off < 20, "the times of another model were fitted too"


def test_sensitivities_of_another_model_are_refused_before_anything_is_measured(
    tmp_path: Path, model: SweptModel
) -> None:
    of = accuracy_cell("a")
    known = journal_of(tmp_path / "other.jsonl", [(of, accuracy_result(of, hits(1)))])
    with pytest.raises(ConfigError, match="another model, target, device") as caught:
        begin(tmp_path / "search.jsonl", asked(model), known)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "search.jsonl").exists()
    runner = Planted(begin(tmp_path / "search.jsonl", asked(model), None), model)
    with pytest.raises(ConfigError, match="another model, target, device"):
        run(runner, asked(model), known)
    assert runner.measured == []


def test_sensitivities_that_have_not_run_are_refused(tmp_path: Path, model: SweptModel) -> None:
    base = load_precision("bf16")
    probes = plans.sensitivity_entries(model, "cpu", "CPU", base=base, level=Level.parse("bfp8"))
    cells = plans.cells(probes, plans.Measures())
    header = planned("sensitivity", base=cells[0].precision_id)
    known = SweepJournal.create(tmp_path / "sensitivity.jsonl", header, cells)
    with pytest.raises(ConfigError, match="no accuracy yet"):
        asked(model).first_cells(known)


def test_the_first_cells_begin_with_the_base_and_say_what_they_lower(model: SweptModel) -> None:
    cells = asked(model).first_cells(None)
    assert cells[0].precision == "bf16" and cells[0].part == ""
    assert len({cell.id for cell in cells}) == len(cells)
    # The sensitivity's probes include the groups at the first level.
    parts = {cell.part for cell in cells}
    assert {"ff2", "0.ff2", "lm_head"} <= parts and "ff2=q80:hifi2" not in parts
    assert "ff2=bfp4:lofi" in parts


def test_an_unknown_device_is_refused(model: SweptModel) -> None:
    with pytest.raises(ConfigError, match=r"'H200'.*allowed: CPU"):
        searched_place(model, "cpu", ["H200"], "bf16")


@pytest.mark.parametrize("base", ["precision_cfg = {ff2: bf16}, fidelity_cfg = {}"])
def test_a_base_that_no_file_can_inherit_is_refused(model: SweptModel, base: str) -> None:
    with pytest.raises(ConfigError, match=r"--base .*inherits.*precision_cfgs"):
        searched_place(model, "cpu", (), base)


def test_a_uniform_configuration_may_be_better(tmp_path: Path, model: SweptModel) -> None:
    bounds = {"min_top1": 100 * (1 - 1 / NUM_POSITIONS)}
    found, _ = search(tmp_path, asked(model, levels=["bfp8"], **bounds))
    within = [row for row, _, is_within in found.shown[:-1] if is_within]
    fastest = min(within, key=lambda row: planted_ms(row.cell))
    best = found.shown[-1][0]
    assert planted_ms(fastest.cell) < planted_ms(best.cell), "else this test shows nothing"
    assert found.yaml is None
    assert any("is better: nothing is gained" in line for line in found.comments)


def test_rows_of_the_search_are_rows_of_its_file(searched: tuple[SearchResult, Planted]) -> None:
    """The file has the printed values."""
    found, runner = searched
    kept = {
        row.cell.precision_id: row for row in rows(SweepJournal.open(runner.journal.path).state)
    }
    for row, held_out, _ in found.shown:
        same = kept[row.cell.precision_id]
        assert same.accuracy == row.accuracy and same.accuracies["held-out"] == held_out
        assert set(row.by_round) < set(same.by_round) or row.cell.precision.startswith("step-")
