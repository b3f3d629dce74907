"""``tilewright sweep plot``: which figures there are, what they show, and their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.cli.sweep.conftest import Sweep
from tests.cli.sweep.measured import SWEEP, measured
from tests.sweep_cells import accuracy_cell, accuracy_result, hits, renamed
from tilewright.cli.main import main
from tilewright.evaluate.sweep import sensitivity_report


def texts(path: Path) -> list[str]:
    root = ElementTree.parse(path).getroot()
    return ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]


def plot(folder: Path, *argv: object) -> list[str]:
    pytest.importorskip("matplotlib")
    assert main(["sweep", "plot", *map(str, argv), "-o", str(folder)]) == 0
    return sorted(path.name for path in folder.iterdir())


def test_the_front_is_drawn(
    sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "docs"
    assert plot(folder, sweep()) == ["front.png", "front.svg"]
    shown = texts(folder / "front.svg")
    assert "a (base)" in shown and "b" in shown
    assert any("Tiny on CPU (cpu)" in text for text in shown)
    assert any("performance-ci-1" in text for text in shown)
    assert any("of 64 positions" in text for text in shown)
    said = capsys.readouterr().err
    assert str(folder / "front.svg") in said and str(folder / "front.png") in said
    assert plot(folder, sweep("again"), "--name", "mine")[2:] == ["mine.png", "mine.svg"]


def test_models_and_targets_are_figures_of_their_own(sweep: Sweep, tmp_path: Path) -> None:
    other = measured("a", 9.0, 0, model_name="O/ther", model_hash="o")
    exact = measured("a", 5.0, 0, compute="exact")
    same = measured("a", 7.0, 0, model_hash="later")
    path = sweep(results=[*SWEEP, *other, *exact, *same])
    assert [name for name in plot(tmp_path / "docs", path) if name.endswith(".svg")] == [
        "front-o-ther-cpu-cpu.svg",
        "front-tiny-cpu-cpu-exact.svg",
        "front-tiny-cpu-cpu.2.svg",
        "front-tiny-cpu-cpu.svg",
    ]


def test_several_sweeps_are_one_front_and_it_is_said(
    sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "docs"
    paths = sweep("one"), sweep("two", measured("c", 70.0, 5))
    assert plot(folder, *paths) == ["front.png", "front.svg"]
    assert {"a (base)", "b", "c"} <= set(texts(folder / "front.svg"))
    assert "not taken in turn" in capsys.readouterr().err


def test_many_equal_names_make_a_short_label(sweep: Sweep, tmp_path: Path) -> None:
    results = []
    for name in ("wo-bfp4-activation-bf16", "wo-bfp4-activation-bfp8", "wo-bfp4-activation-mixed"):
        results += [
            (of, renamed(found, effective_id="same")) for of, found in measured(name, 50.0, 3)
        ]
    plot(tmp_path / "docs", sweep(results=results))
    assert "wo-bfp4-activation-bf16 and 2 equal" in texts(tmp_path / "docs" / "front.svg")


def test_a_sensitivity_is_drawn_and_written_by_its_own_module(
    sweep: Sweep,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    from tilewright.evaluate.plots.plot import draw_heat_map

    def drawn(state: object) -> list[tuple[str, Any]]:
        return [("loss", draw_heat_map([[1.0]], rows=["0"], columns=["ff2"], title="", label=""))]

    monkeypatch.setattr(sensitivity_report, "heat_maps", drawn)
    monkeypatch.setattr(sensitivity_report, "markdown", lambda state: "## By layer\n\nSomething.\n")
    of = accuracy_cell("p", part="0.ff2")
    results = [*SWEEP, (of, accuracy_result(of, hits(2, 64)))]
    path = sweep("sensitivity", results, plan="sensitivity")
    folder = tmp_path / "docs"
    assert plot(folder, path) == ["loss.png", "loss.svg"]
    assert plot(folder, path, "--name", "x")[2:] == ["x-loss.png", "x-loss.svg"]
    assert plot(folder, path, sweep("pareto"))[:2] == ["front.png", "front.svg"]
    capsys.readouterr()
    assert main(["sweep", "export", str(path)]) == 0
    text = capsys.readouterr().out
    assert "## By layer\n\nSomething.\n" in text
    assert "| p " not in text
    again = sweep("again", results, plan="sensitivity")
    assert main(["sweep", "plot", str(path), str(again), "-o", str(folder)]) == 2
    assert "two figures 'loss'" in capsys.readouterr().err
