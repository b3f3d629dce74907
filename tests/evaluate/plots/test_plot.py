"""The front's figure: what is drawn where, labels apart from each other, any name, bad input."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tilewright.errors import ConfigError
from tilewright.evaluate.plots import plot
from tilewright.evaluate.results.pareto import ParetoRank, Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

ROWS = {
    "fp32": (60, 99.5, "front"),
    "bf16": (82, 99.1, "front"),
    "all bfp8, HiFi2 everywhere": (121, 97.6, "front"),
    "ff1_3 bfp4": (150, 94.5, "front"),
    "attention bfp8, MLP bfp4": (170, 91.2, "front"),
    "q4_k mixed": (200, 86.4, "front"),
    "all int4 g32": (240, 78.3, "front"),
    "near A": (150.4, 94.2, "tied"),
    "near B": (149.6, 94.3, "tied"),
    "kv cache bfp8": (80, 98.9, "tied"),
    "fp16 accumulate": (100, 93.0, "dominated"),
    "all bfp2": (214, 45.0, "dominated"),
}


def place(name: str, speed: float, top1: float, standing: Any = "front", **more: Any) -> ParetoRank:
    return ParetoRank(Point(name, speed, top1, **more), standing, None, ())


def realistic() -> list[ParetoRank]:
    return [
        place(
            name,
            speed,
            top1,
            standing,
            rounds=(speed * 0.97, speed, speed * 1.02),
            top1_interval=(top1 - 2.5, min(100.0, top1 + 1.5)),
        )
        for name, (speed, top1, standing) in ROWS.items()
    ]


def draw(placed: list[ParetoRank], **more: Any) -> Figure:
    names = {"title": "a title", "speed_label": "speed (t/s/u)", "accuracy_label": "top-1 (%)"}
    return plot.draw_front(placed, **{**names, **more})


def labels(figure: Figure) -> list[Annotation]:
    from matplotlib.text import Annotation

    return [one for one in figure.axes[0].texts if isinstance(one, Annotation) and one.get_text()]


def svg_texts(figure: Figure, folder: Path) -> list[str]:
    path, _ = plot.save(figure, folder / "figure")
    return ["".join(one.itertext()) for one in ElementTree.parse(path).iter() if is_text(one)]


def is_text(one: ElementTree.Element) -> bool:
    return one.tag == "{http://www.w3.org/2000/svg}text"


def assert_apart(figure: Figure) -> None:
    from matplotlib.text import Text

    figure.draw_without_rendering()  # an annotation's place is known from then on
    # without the arrow, which an annotation's own extent has too
    boxes = [Text.get_window_extent(one) for one in labels(figure)]
    for one, other in combinations(boxes, 2):
        assert not one.overlaps(other)
    axes = figure.axes[0]
    spots = {one.xy for one in labels(figure)}
    for spot in spots:
        x, y = axes.transData.transform(spot)
        assert not any(box.contains(x, y) for box in boxes)
    for box in boxes:
        assert axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1
        assert axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1


@pytest.fixture(scope="module")
def figure() -> Figure:
    return draw(realistic(), base="fp32")


def test_every_point_is_labelled_in_the_svg(figure: Figure, tmp_path: Path) -> None:
    texts = svg_texts(figure, tmp_path)
    assert set(ROWS) - {"fp32"} | {"fp32 (base)"} <= set(texts)
    assert {"a title", "speed (t/s/u)", "top-1 (%)"} <= set(texts)
    assert {"front", "not distinguishable from the front", "dominated"} <= set(texts)
    caption = "bars: 95 % Wilson interval of top-1; range of speed over 3 rounds"
    assert caption in texts


def test_labels_are_apart(figure: Figure) -> None:
    assert len(labels(figure)) == len(ROWS)
    assert_apart(figure)


def test_nothing_is_cut_off(figure: Figure) -> None:
    box = figure.get_tightbbox()  # inches
    assert box.x0 >= 0 and box.x1 <= figure.get_figwidth()
    assert box.y0 >= 0 and box.y1 <= figure.get_figheight()


def test_the_same_points_give_the_same_bytes(figure: Figure, tmp_path: Path) -> None:
    first = plot.save(figure, tmp_path / "first")
    again = plot.save(figure, tmp_path / "again")
    fresh = plot.save(draw(realistic(), base="fp32"), tmp_path / "fresh")
    for one, two, three in zip(first, again, fresh, strict=True):
        assert one.read_bytes() == two.read_bytes() == three.read_bytes()


def lines_of(figure: Figure) -> dict[str, list[tuple[float, float]]]:
    found = {}
    for line in figure.axes[0].lines:
        xs, ys = line.get_xdata(), line.get_ydata()
        found[str(line.get_label())] = list(zip(xs, ys, strict=True))
    return found


def test_each_standing_has_its_points(figure: Figure) -> None:
    lines = lines_of(figure)
    names = {
        "front": "front",
        "tied": "not distinguishable from the front",
        "dominated": "dominated",
    }
    for standing, name in names.items():
        wanted = [(speed, top1) for speed, top1, is_at in ROWS.values() if is_at == standing]
        assert lines[name] == wanted


def test_the_step_is_the_best_top1_at_a_speed_or_above() -> None:
    placed = [place("b", 20, 80), place("a", 10, 90), place("c", 30, 70)]
    placed += [place("x", 5, 10, "dominated"), place("y", 40, 95, "tied")]
    figure = draw(placed)
    left, bottom = figure.axes[0].get_xlim()[0], figure.axes[0].get_ylim()[0]
    corners = [(left, 90), (10, 90), (10, 80), (20, 80), (20, 70), (30, 70), (30, bottom)]
    assert lines_of(figure)["_front"] == corners


def test_bars_are_the_interval_and_the_range_of_the_rounds() -> None:
    point = place("a", 100, 90, rounds=(98, 100, 103), top1_interval=(87, 92))
    spans = [
        (tuple(line.get_xdata()), tuple(line.get_ydata()))
        for line in draw([point, place("b", 50, 95)]).axes[0].lines
    ]
    assert ((98, 103), (90, 90)) in spans
    assert ((100, 100), (87, 92)) in spans


def test_the_caption_says_only_what_is_drawn() -> None:
    assert draw([place("a", 100, 90)]).get_supxlabel() == "no bars: single values"
    some = [place("a", 100, 90, rounds=(99, 101)), place("b", 50, 95, rounds=(50, 51, 52, 53, 54))]
    assert draw(some).get_supxlabel() == "bars: range of speed over 2 to 5 rounds"
    assert draw(some, base="gone").get_supxlabel().endswith("the base gone is not among the points")


def test_points_at_one_place_share_a_label() -> None:
    figure = draw([place("a", 10, 50), place("b", 20, 40), place("c", 10, 50)], base="c")
    assert [one.get_text() for one in labels(figure)] == ["a\nc (base)", "b"]


def test_no_tick_is_above_100_percent() -> None:
    figure = draw([place("a", 10, 99.9, top1_interval=(99, 100)), place("b", 20, 98)])
    assert max(figure.axes[0].get_yticks()) <= 100 < figure.axes[0].get_ylim()[1]


def test_any_name_is_drawn_as_it_is(tmp_path: Path) -> None:
    names = ["$x^{", "a_b", "\\$5 $$", "<&>", "\\frac{", "日本", ""]
    placed = [place(name, 10 + 9 * index, 50 + index) for index, name in enumerate(names)]
    figure = draw(placed, title="$x^{", speed_label="$s_", accuracy_label="{$a$}", base="$b")
    texts = svg_texts(figure, tmp_path)
    assert set(names) - {""} | {"$x^{", "$s_", "{$a$}"} <= set(texts)


def test_long_and_unprintable_names_are_cut_and_replaced(tmp_path: Path) -> None:
    figure = draw([place("W" * 80, 10, 50), place("a\n\x00b", 20, 40)])
    texts = svg_texts(figure, tmp_path)
    assert {"W" * 39 + "\u2026", "a\ufffd\ufffdb"} <= set(texts)
    assert_apart(figure)


def test_25_long_names_find_room() -> None:
    placed = [
        place(
            f"configuration {index} with a long name", 60 + 37 * index % 180, 80 + index % 7 * 2.5
        )
        for index in range(25)
    ]
    figure = draw(placed)
    assert len(labels(figure)) == 25
    assert_apart(figure)


def test_more_points_than_have_room_make_the_figure_grow() -> None:
    crowd = [place("W" * 40, 100 + index / 10, 90) for index in range(30)]
    figure = draw(crowd)
    assert figure.get_figheight() > plot._usual_height(crowd)
    assert len(labels(figure)) == 30
    assert_apart(figure)


@pytest.mark.parametrize("speeds", [(100.0, 100.0), (100.0, 100.0 + 1e-12), (1e-6, 1e6)])
def test_any_range_is_drawn(speeds: tuple[float, float]) -> None:
    low, high = draw([place("a", speeds[0], 0), place("b", speeds[1], 0)]).axes[0].get_xlim()
    assert low < speeds[0] and speeds[1] < high


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="nothing to plot"):
        draw([])
    with pytest.raises(ConfigError, match="'a' has no place in a plot; allowed: finite numbers"):
        draw([place("a", 1, 1, top1_interval=(math.nan, 2))])


def test_labels_that_find_no_room_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "MAX_HEIGHT", 5.0)
    with pytest.raises(ConfigError, match="60 points are too many to label; allowed: fewer"):
        draw([place(f"{index}", 10, 50) for index in range(60)])
