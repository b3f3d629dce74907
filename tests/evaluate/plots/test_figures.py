"""Saving figures: both files in one step each, the same bytes again, errors in one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tilewright.errors import ConfigError
from tilewright.evaluate.plots.style import NAME_LENGTH, new_figure, save, settings, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(title: str = "a title") -> Figure:
    with settings():
        figure = new_figure(2.0, title=title, caption="a caption")
        figure.add_subplot().plot([1, 2], [3, 4])
    return figure


def test_both_files_are_written_and_nothing_else(tmp_path: Path) -> None:
    paths = save(draw(), tmp_path / "new" / "v1.2-front")
    assert paths == [tmp_path / "new" / "v1.2-front.svg", tmp_path / "new" / "v1.2-front.png"]
    assert sorted(paths[0].parent.iterdir()) == sorted(paths)
    assert paths[0].read_text().startswith("<?xml") and "a caption" in paths[0].read_text()
    assert "dc:date" not in paths[0].read_text()
    header = paths[1].read_bytes()[:24]
    assert header[1:4] == b"PNG"
    assert int.from_bytes(header[16:20], "big") == 1200
    assert int.from_bytes(header[20:24], "big") == 300


def test_the_users_settings_do_not_matter_and_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib import rcParams

    first = save(draw(), tmp_path / "first")
    changes = {"font.size": 20.0, "text.usetex": True, "savefig.bbox": "tight", "svg.hashsalt": "x"}
    for key, value in changes.items():
        monkeypatch.setitem(rcParams, key, value)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # an import of it fails
    second = save(draw(), tmp_path / "second")
    assert {key: rcParams[key] for key in changes} == changes
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_an_old_file_is_replaced_or_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.svg").write_text("old")
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr("os.replace", fail)
        with pytest.raises(ConfigError, match=r"a\.svg: No space left on device; allowed: "):
            save(draw(), tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]
    assert (tmp_path / "a.svg").read_text() == "old"
    save(draw(), tmp_path / "a")
    assert (tmp_path / "a.svg").read_text() != "old"


@pytest.mark.parametrize("name", ["file/stem", "null\0", "x" * 300, "folder"])
def test_a_path_that_cannot_be_written_is_said(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(ConfigError, match="allowed: a path") as caught:
        save(draw(), tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_stem_without_a_name_is_said() -> None:
    with pytest.raises(ConfigError, match="names no file"):
        save(draw(), Path())


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError) as caught, settings():
        pass
    message = "plots need matplotlib; allowed: pip install -e '.[plot]' in the clone"
    assert str(caught.value) == message


def test_names_are_made_safe() -> None:
    assert shown("a_b") == "a_b"
    assert shown("$x^{") == "\\$x^{"
    assert shown("a\nb\x00\ud800") == "a\ufffdb\ufffd\ufffd"
    assert shown("x" * NAME_LENGTH) == "x" * NAME_LENGTH
    assert shown("x" * (NAME_LENGTH + 1)) == "x" * (NAME_LENGTH - 1) + "\u2026"


@pytest.mark.parametrize("title", ["$x^{", "\\$ $$ $", "W" * 10_000, "", "日本 <&>"])
def test_any_title_is_drawn_within_the_figure(tmp_path: Path, title: str) -> None:
    figure = draw(title)
    save(figure, tmp_path / "a")
    box = figure.suptitle(figure.get_suptitle(), fontsize=12).get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1


def test_a_title_is_whole_in_lines_above_the_plot() -> None:
    title = (
        "SmolLM2-135M-Instruct on N300 (n300), exact arithmetic, emulated: predicted speed against "
        "emulated top-1, with a name of a configuration that is longer than any that ships"
    )
    figure = draw(title)
    figure.draw_without_rendering()
    said = figure.get_suptitle()
    assert said.split() == title.split() and 1 < len(said.splitlines()) <= 3
    box = next(each for each in figure.texts if each.get_text() == said).get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
    assert box.y0 >= figure.axes[0].get_window_extent().y1, "the plot makes room for it"
    assert "\n" not in draw("SmolLM2-135M-Instruct on CPU (cpu): KL").get_suptitle()
