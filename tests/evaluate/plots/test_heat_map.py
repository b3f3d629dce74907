"""The heat map: scale, numbers, cells without a value, marks, sizes, any name, bad input."""

from __future__ import annotations

import math
import random
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tilewright.errors import ConfigError
from tilewright.evaluate.plots import plot
from tilewright.evaluate.plots.heat_map import _short

if TYPE_CHECKING:
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

GROUPS = ["attn_qkv", "attn_out", "ff1_3", "ff2", "kv_cache", "lm_head"]


def draw(values: list[list[float | None]], **more: Any) -> Figure:
    names: dict[str, Any] = {
        "rows": [str(index) for index in range(len(values))],
        "columns": GROUPS[: len(values[0])] if values else GROUPS,
        "title": "a title",
        "label": "KL divergence",
    }
    return plot.draw_heat_map(values, **{**names, **more})


def some(num_rows: int, num_columns: int) -> list[list[float | None]]:
    rng = random.Random(1)
    return [[10 ** rng.uniform(-6, -2.3) for _ in range(num_columns)] for _ in range(num_rows)]


def mesh_of(figure: Figure) -> QuadMesh:
    from matplotlib.collections import QuadMesh

    (mesh,) = (one for one in figure.axes[0].collections if isinstance(one, QuadMesh))
    return mesh


def is_logarithmic(figure: Figure) -> bool:
    from matplotlib.colors import LogNorm

    return isinstance(mesh_of(figure).norm, LogNorm)


def colours(figure: Figure) -> list[tuple[float, ...]]:
    figure.draw_without_rendering()
    return [tuple(colour) for colour in mesh_of(figure).get_facecolor()]


def numbers(figure: Figure) -> list[str]:
    return [one.get_text() for one in figure.axes[0].texts]


def assert_inside(figure: Figure) -> None:
    box = figure.get_tightbbox()  # inches
    assert box.x0 >= 0 and box.x1 <= figure.get_figwidth()
    assert box.y0 >= 0 and box.y1 <= figure.get_figheight()


def test_30_layers_are_drawn_with_numbers_and_saved_alike(tmp_path: Path) -> None:
    values = some(30, 6)
    figure = draw(values)
    assert numbers(figure) == [_short(value) for row in values for value in row if value]
    assert is_logarithmic(figure)
    assert_inside(figure)
    first, again = plot.save(figure, tmp_path / "a"), plot.save(draw(values), tmp_path / "b")
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()
    texts = {"".join(one.itertext()) for one in ElementTree.parse(first[0]).iter()}
    assert {*GROUPS, "a title", "KL divergence", "0", "29"} <= texts


def test_the_first_row_is_at_the_top() -> None:
    bottom, top = draw(some(3, 2)).axes[0].get_ylim()
    assert (bottom, top) == (3, 0)


def test_80_layers_stay_readable() -> None:
    figure = draw(some(80, 4), marked=[[True] * 4] * 80)
    assert numbers(figure) == []
    axes = figure.axes[0]
    boxes = [one.get_window_extent() for one in axes.get_yticklabels()]
    assert len(boxes) == 80
    assert not any(one.overlaps(other) for one, other in pairwise(boxes))
    assert len(axes.lines) == 320
    assert_inside(figure)


def test_the_scale_is_logarithmic_only_over_30_times() -> None:
    assert not is_logarithmic(draw([[1.0, 30.0]]))
    assert is_logarithmic(draw([[1.0, 30.1]]))
    assert not is_logarithmic(draw([[-100.0, 30.0]]))


def test_zero_and_negative_values_have_the_lowest_colour_of_a_logarithmic_scale() -> None:
    figure = draw([[1e-5, 1e-2, 0.0, -3.0]])
    low, high, zero, negative = colours(figure)
    assert low == zero == negative != high
    assert numbers(figure) == ["1e-5", "0.01", "0", "-3"]
    caption = "lowest colour: 1e-5 and less, zero and negative too"
    assert figure.get_supxlabel() == caption


def test_a_tiny_value_does_not_stretch_the_scale() -> None:
    norm = mesh_of(draw([[1e-30, 1e-3, 1.0]])).norm
    assert (norm.vmin, norm.vmax) == (1e-4, 1.0)


def test_a_linear_scale_spans_the_values() -> None:
    norm = mesh_of(draw([[-1.0, 0.5, 2.0]])).norm
    assert (norm.vmin, norm.vmax) == (-1.0, 2.0)


@pytest.mark.parametrize("value", [0.0, 2.0, -3.0])
def test_a_single_value_is_drawn(value: float) -> None:
    norm = mesh_of(draw([[value]])).norm
    assert norm.vmin < value < norm.vmax


def test_a_cell_without_a_value_is_hatched_and_empty() -> None:
    figure = draw([[1.0, None], [None, 2.0]])
    assert numbers(figure) == ["1", "2"]
    assert mesh_of(figure).get_array().mask.tolist() == [[False, True], [True, False]]
    assert figure.axes[0].patch.get_hatch()
    assert figure.get_supxlabel() == "hatched: no value"


def test_marked_cells_have_a_dot_and_the_caption_says_so() -> None:
    figure = draw([[1.0, 2.0], [3.0, 4.0]], marked=[[True, False], [False, True]])
    rows = [line.get_ydata()[0] for line in figure.axes[0].lines]
    assert rows == [0.5, 1.5]
    assert figure.get_supxlabel() == "dot: not distinguishable from zero"
    none = draw([[1.0, 2.0]], marked=[[False, False]])
    assert none.get_supxlabel() == "" and not none.axes[0].lines


def test_numbers_are_dark_on_light_and_light_on_dark() -> None:
    dark, light = draw([[1.0, 2.0]]).axes[0].texts
    assert (dark.get_color(), light.get_color()) == ("white", "black")


def test_numbers_are_left_out_where_they_do_not_fit() -> None:
    assert numbers(draw(some(3, 24), columns=[f"group {index}" for index in range(24)])) == []


def test_numbers_have_two_digits() -> None:
    shown = {
        0: "0",
        1.234e-5: "1.2e-5",
        0.0123: "0.012",
        3.456: "3.5",
        123.4: "120",
        -2e-4: "-2e-4",
    }
    shown |= {9.96: "10", 0.00996: "0.01", 9.96e-5: "1e-4", 123456.0: "1.2e5", 5: "5"}
    assert {value: _short(value) for value in shown} == shown


def test_any_name_is_drawn(tmp_path: Path) -> None:
    names = ["$x^{", "a_b" * 30, "日本\n$"]
    figure = draw(some(3, 3), rows=names, columns=names, title="$x^{", label="$" * 99)
    assert_inside(figure)
    texts = {
        "".join(one.itertext())
        for one in ElementTree.parse(plot.save(figure, tmp_path / "a")[0]).iter()
    }
    assert {"$x^{", "日本\ufffd$"} <= texts


def test_bad_input() -> None:
    for values in ([], [[None, None]], [[]]):
        with pytest.raises(ConfigError, match="nothing to plot"):
            draw(values, columns=GROUPS[: len(values[0])] if values else [])
    for value in (math.nan, math.inf):
        with pytest.raises(ConfigError, match="row '1' has no place in a plot"):
            draw([[1.0], [value]])
    with pytest.raises(AssertionError):
        draw([[1.0], [1.0, 2.0]])
    with pytest.raises(AssertionError):
        draw([[1.0]], marked=[[True, False]])
