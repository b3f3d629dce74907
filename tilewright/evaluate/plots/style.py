"""Common parts of all figures: matplotlib settings, safe names, sizes, and SVG and PNG output.

matplotlib is optional and imported inside functions. Its global settings remain unchanged.
"""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.errors import ConfigError
from tilewright.evaluate.report.display import printable
from tilewright.utils.files import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

DPI = 150
WIDTH = 8.0  # inches: 1200 pixels, shown at 900
LABEL_SIZE = 8.0  # points
NAME_LENGTH = 40
TITLE_LINES = 3


@contextmanager
def settings() -> Iterator[None]:
    """Use matplotlib's defaults instead of the user's files. Restore all settings at the end."""
    try:
        from matplotlib import rc_context, style
    except ImportError:
        message = "plots need matplotlib; allowed: pip install -e '.[plot]' in the clone"
        raise ConfigError(message) from None
    # A fixed salt gives the same SVG ids in every run.
    fixed: dict[Any, Any] = {"svg.hashsalt": "tilewright", "svg.fonttype": "none"}
    with rc_context(), style.context("default"), rc_context(fixed), warnings.catch_warnings():
        # A character without a glyph appears as a box, and the SVG contains the character.
        warnings.filterwarnings("ignore", message="Glyph ")
        yield


def shown(name: str, length: int = NAME_LENGTH) -> str:
    r"""Return ``name`` for a figure: truncated, printable, with dollars escaped (``\\$``)."""
    text = printable(name[: length + 1])
    if len(text) > length:
        text = text[: length - 1] + "\u2026"
    return text.replace("$", "\\$")


def fit(text: Text, raw: str, *, room: float) -> None:
    """Set ``text`` to the longest prefix of ``raw`` within ``room`` pixels, in a single line."""
    for length in range(min(len(raw), 160), 0, -1):
        text.set_text(shown(raw, length))
        box = text.get_window_extent()
        if max(box.width, 0 if text.get_rotation() == 0 else box.height) <= room:
            return


def fit_lines(text: Text, raw: str, *, room: float) -> None:
    """Set ``text`` to ``raw`` in the fewest lines within ``room`` pixels.

    Text after `TITLE_LINES` lines is truncated.
    """
    for columns in range(min(len(raw), 160), 0, -1):
        lines = textwrap.wrap(raw, columns, max_lines=TITLE_LINES, placeholder="\u2026")
        text.set_text("\n".join(shown(line, columns) for line in lines))
        if text.get_window_extent().width <= room:
            return


def new_figure(height: float, *, title: str, caption: str) -> Figure:
    """Return an empty figure ``height`` inches high, with the title above and the caption below."""
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
    """Lay out the figure a last time. Later measurements remain valid."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write ``stem``.svg and ``stem``.png atomically, and create the directory.

    Equal figures and library versions give equal bytes.

    Raises:
        ConfigError: A file cannot be written.
    """
    if not stem.name:
        raise ConfigError(f"{str(stem)!r} names no file; allowed: a path that ends in a name")
    written = []
    with settings():
        for suffix in ("svg", "png"):
            buffer = io.BytesIO()
            about = {"Date": None} if suffix == "svg" else {}
            figure.savefig(buffer, format=suffix, dpi=DPI, metadata=about, facecolor="white")
            written.append((stem.parent / f"{stem.name}.{suffix}", buffer.getvalue()))
    for path, content in written:
        write_file(path, content)
    return [path for path, _ in written]
