"""What all figures share: the library's settings, names made safe, sizes, saving as SVG and PNG.

The library is optional, so it is imported inside functions; its global settings are left as they
were. What a figure shows is not known here.
"""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.errors import ConfigError, one_line
from tilewright.evaluate.report.display import printable
from tilewright.utils.files import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

DPI = 150
WIDTH = 8.0  # inches: 1200 pixels, read at 900
LABEL_SIZE = 8.0  # points
NAME_LENGTH = 40
TITLE_LINES = 3


@contextmanager
def settings() -> Iterator[None]:
    """The library's own defaults, whatever the user's files say; all is put back at the end."""
    try:
        from matplotlib import rc_context, style
    except ImportError:
        message = "plots need matplotlib; allowed: pip install -e '.[plot]' in the clone"
        raise ConfigError(message) from None
    # a fixed salt: the ids inside an SVG would otherwise differ from run to run
    fixed: dict[Any, Any] = {"svg.hashsalt": "tilewright", "svg.fonttype": "none"}
    with rc_context(), style.context("default"), rc_context(fixed), warnings.catch_warnings():
        # a character without a glyph shows as a box, and the SVG has the character itself
        warnings.filterwarnings("ignore", message="Glyph ")
        yield


def shown(name: str, length: int = NAME_LENGTH) -> str:
    """``name`` for a figure: cut, printable, its dollars no formulas (``\\$`` is a dollar)."""
    text = printable(name[: length + 1])
    if len(text) > length:
        text = text[: length - 1] + "\u2026"
    return text.replace("$", "\\$")


def fit(text: Text, raw: str, *, room: float) -> None:
    """Sets ``text`` to as much of ``raw`` as fits into ``room`` pixels, in one line."""
    for length in range(min(len(raw), 160), 0, -1):
        text.set_text(shown(raw, length))
        box = text.get_window_extent()
        if max(box.width, 0 if text.get_rotation() == 0 else box.height) <= room:
            return


def fit_lines(text: Text, raw: str, *, room: float) -> None:
    """Sets ``text`` to ``raw`` in as few lines as fit into ``room`` pixels; only what is left over
    after `TITLE_LINES` is cut.
    """
    for columns in range(min(len(raw), 160), 0, -1):
        lines = textwrap.wrap(raw, columns, max_lines=TITLE_LINES, placeholder="\u2026")
        text.set_text("\n".join(shown(line, columns) for line in lines))
        if text.get_window_extent().width <= room:
            return


def new_figure(height: float, *, title: str, caption: str) -> Figure:
    """An empty figure ``height`` inches high, the title above and the caption below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.07)
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    fit_lines(figure.suptitle("", fontsize=12), title, room=(WIDTH - 0.4) * DPI)
    figure.supxlabel(textwrap.fill(caption, 110), fontsize=8, color="#505050")
    return figure


def settle(figure: Figure) -> None:
    """Lays the figure out, and for the last time: what is measured from now on stays true."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def save(figure: Figure, stem: Path) -> list[Path]:
    """Writes ``stem``.svg and ``stem``.png, each replaced in one step; the folder is made.

    The same figure and library give the same bytes.

    Raises:
        ConfigError: if a file cannot be written.
    """
    if not stem.name:
        raise ConfigError(f"{str(stem)!r} names no file; allowed: a path that ends in a name")
    written = []
    with settings():
        for kind in ("svg", "png"):
            buffer = io.BytesIO()
            about = {"Date": None} if kind == "svg" else {}
            figure.savefig(buffer, format=kind, dpi=DPI, metadata=about, facecolor="white")
            written.append((stem.parent / f"{stem.name}.{kind}", buffer.getvalue()))
    for path, content in written:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
        except (OSError, ValueError) as error:  # ValueError: a null character in the name
            reason = getattr(error, "strerror", None) or one_line(error)
            raise ConfigError(f"{path}: {reason}; allowed: a path that can be written") from None
    return [path for path, _ in written]
