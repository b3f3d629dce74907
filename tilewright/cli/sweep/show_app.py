"""The terminal view of a sweep: a table that follows the file, and screens opened from it.

All that it shows and does, `control` and `tables` show and do without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import ScrollableContainer
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Static

from tilewright.cli.sweep import control, tables
from tilewright.cli.sweep.files import write_text
from tilewright.cli.sweep.layout import Listing, ScreenLine, plain_line
from tilewright.errors import ConfigError
from tilewright.evaluate.sweep.journal import SweepJournal
from tilewright.utils.json_lines import TornLineWarning

LOOK_SECONDS = 1.0
_LOG_BYTES = 1 << 16
_BACK = Binding("escape,q", "app.pop_screen", "back", key_display="q")


class LinesTable(DataTable[Text]):
    """The table of lines; its Enter key is named in the footer."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "log", key_display="Enter")
    ]


class SweepScreen(Screen[None]):
    """The table, two lines about the sweep above it, two about the line and the last deed below."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "toggle_cells", "cells"),
        Binding("s", "sort", "sort"),
        Binding("S", "reverse", "reverse", key_display="S"),
        Binding("m", "markdown", "markdown"),
        Binding("p", "front", "front"),
        Binding("x", "ask('cancel')", "cancel"),
        Binding("r", "ask('restart')", "restart"),
        Binding("escape", "back", "back", show=False),
        Binding("q", "app.quit", "quit"),
    ]

    def __init__(self, journal: SweepJournal) -> None:
        super().__init__()
        self.journal = journal
        self.is_held = False
        self.shows_cells = False
        self.sort: str | None = None
        self.is_reversed = False
        self._shown: Listing | None = None
        self._seen: object = None
        self._deed = ""
        self._texts: dict[str, str] = {}

    def compose(self) -> ComposeResult:
        """Lay out the widgets, from top to bottom."""
        yield Static(id="head", markup=False)
        yield LinesTable(cursor_type="row", cell_padding=0, zebra_stripes=True)
        yield Static(id="detail", markup=False)
        yield Static(id="said", markup=False)
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Look now, and again every second."""
        self.set_interval(LOOK_SECONDS, self.look)
        self.query_one(LinesTable).focus()
        self.look()

    def on_resize(self) -> None:
        """The names take what is left of the width."""
        self.draw()

    def look(self) -> None:
        """Take in what has happened; what cannot be read is said, and what was read stays."""
        trouble = ""
        try:
            self.journal.refresh()
            self.is_held = self.journal.is_held()
        except ConfigError as error:
            trouble = plain_line(str(error))
        self._put("said", trouble or self._deed)
        states = self.journal.state.cells.values()
        seen = [(s.status, s.is_cancel_asked, s.started, s.seconds) for s in states]
        if (self.is_held, seen) != self._seen:
            self._seen = (self.is_held, seen)
            self.draw()
        first, second = tables.headline(self.journal, is_held=self.is_held)
        order = f"by {self.sort or 'plan'}{', reversed' if self.is_reversed else ''}"
        self._put("head", f"{first}, {order}\n{second}")  # the table may have given the order up

    def table(self) -> Listing:
        """The table that is to be shown now."""
        make = tables.cells if self.shows_cells else tables.configurations
        table = make(self.journal.state, is_held=self.is_held)
        if self.sort not in [None, *(column.key for column in table.columns)]:
            self.sort = None
        return table.sorted_by(self.sort, is_reversed=self.is_reversed)

    def draw(self) -> None:
        """Fill the table anew; the cursor stays on its line."""
        widget = self.query_one(LinesTable)
        current, self._shown = self.current(), self.table()
        room = self.app.size.width - 2  # a blank before the first column, the scroll bar
        widths = self._shown.widths(room)
        pairs = list(zip(self._shown.columns, widths, strict=True))
        widget.clear(columns=True)
        for column, width in pairs:
            style = "underline" if column.key == self.sort else ""
            title = Text(" " + column.fit(column.title, width), style)
            widget.add_column(title, width=width + 1, key=column.key)
        for line in self._shown.lines:
            cells = (Text(" " + c.fit(c.show(line), width)) for c, width in pairs)
            widget.add_row(*cells, key=line.key)
        keys = [line.key for line in self._shown.lines]
        if current is not None and current.key in keys:
            widget.move_cursor(row=keys.index(current.key), animate=False)
        self._describe()

    def current(self) -> ScreenLine | None:
        """The line that the cursor is on."""
        row = self.query_one(LinesTable).cursor_row
        lines = () if self._shown is None else self._shown.lines
        return lines[row] if 0 <= row < len(lines) else None

    def _describe(self) -> None:
        text = ""
        if (line := self.current()) is not None:
            one = line.states[0] if len(line.states) == 1 else None
            reasons = [plain_line(each.reason) for each in line.states if each.reason]
            name = line.name if one is None else tables.describe(one, line.name)
            text = ": ".join([name, *reasons[:1]])
        self._put("detail", text)

    def _put(self, place: str, text: str) -> None:
        """Laying out anew what is the same would cost more than looking."""
        if self._texts.get(place) != text:
            self._texts[place] = text
            self.query_one(f"#{place}", Static).update(text)

    def on_data_table_row_highlighted(self) -> None:
        """The whole name of the line, below the table."""
        self._describe()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """Sort by this column; by the one it is sorted by: the other way round."""
        self.is_reversed = self.sort == event.column_key.value and not self.is_reversed
        self.sort = event.column_key.value
        self._redo(is_at_top=True)

    def _redo(self, *, is_at_top: bool = False) -> None:
        self._seen = None
        self.look()
        if is_at_top:
            self.query_one(LinesTable).move_cursor(row=0, animate=False)

    def action_toggle_cells(self) -> None:
        """Turn from the table of configurations to that of cells, or back."""
        self.shows_cells = not self.shows_cells
        self._redo()

    def action_back(self) -> None:
        """Go back from cells to configurations; does nothing where they are shown already."""
        if self.shows_cells:
            self.action_toggle_cells()

    def action_sort(self) -> None:
        """Sort by the next column; after the last one, in the order of the plan."""
        keys = [None, *(column.key for column in self.table().columns)]
        self.sort = keys[(keys.index(self.sort) + 1) % len(keys)]
        self._redo(is_at_top=True)

    def action_reverse(self) -> None:
        """Reverse the order of the lines."""
        self.is_reversed = not self.is_reversed
        self._redo(is_at_top=True)

    def action_markdown(self) -> None:
        """Show the table as Markdown, on a screen of its own."""
        path = self.journal.path.with_name(f"{self.journal.path.stem}-table.md")
        self.app.push_screen(MarkdownScreen(lambda: self.table().markdown(), path))

    def action_front(self) -> None:
        """The front and what is not proven about it."""

        def text() -> str:
            table = tables.front_table(self.journal.state, is_held=self.is_held)
            table = table.sorted_by("speed")
            return "\n".join(control.table_lines(table, self.app.size.width - 1))

        self.app.push_screen(TextScreen("The front: speed against top-1", text))

    def on_data_table_row_selected(self) -> None:
        """Open the log of the newest cell of a line."""
        line = self.current()
        if line is None:
            return

        def text() -> str:
            state = control.newest(line.states)
            held = self.is_held
            return control.log_text(self.journal, state, is_held=held, max_bytes=_LOG_BYTES)

        self.app.push_screen(TextScreen(f"The log of {line.name}", text, is_at_end=True))

    def action_ask(self, what: control.What) -> None:
        """Cancel the line's cells, or run them again, once that is confirmed."""
        line = self.current()
        if line is None:
            return
        chosen = control.affected(line.states, what)
        if not chosen:
            self._ask(line, what, is_sure=True)  # which says why there is nothing to ask for
            return
        text = f"{what.capitalize()} {control.cells_text(len(chosen))} of {line.name}?"
        if num_done := sum(state.status == "done" for state in chosen):
            text += f" The figures of {num_done} will be replaced."
        question = Question(text)
        self.app.push_screen(question, lambda sure: self._ask(line, what, is_sure=bool(sure)))

    def _ask(self, line: ScreenLine, what: control.What, *, is_sure: bool) -> None:
        if not is_sure:
            return
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", TornLineWarning)
                said = control.ask(self.journal, line.states, what)[0]
            self._deed = "; ".join([said, *(plain_line(str(each.message)) for each in caught)])
        except ConfigError as error:
            self._deed = plain_line(str(error))
        self._redo()


class TextScreen(Screen[None]):
    """A text that follows its source, scrolled with the usual keys."""

    BINDINGS: ClassVar[list[BindingType]] = [_BACK]

    def __init__(self, title: str, source: Callable[[], str], *, is_at_end: bool = False) -> None:
        super().__init__()
        self._title = title
        self.source = source
        self._is_at_end = is_at_end
        self._text: str | None = None

    def compose(self) -> ComposeResult:
        """Lay out the widgets, from top to bottom."""
        yield Static(plain_line(self._title), id="head", markup=False)
        with ScrollableContainer(id="place"):
            yield Static(id="text", markup=False)
        yield Static(id="said", markup=False)
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Look now, and again every second."""
        self.set_interval(LOOK_SECONDS, self.look)
        self.query_one("#place").focus()
        self.look()

    def look(self) -> None:
        """Show the text as it is now; one that was at its end stays there."""
        place = self.query_one("#place")
        if (text := self.source()) == self._text:
            return
        follows = self._is_at_end and (self._text is None or place.scroll_y >= place.max_scroll_y)
        self._text = text
        self.query_one("#text", Static).update(text)
        if follows:
            place.scroll_end(animate=False)


class MarkdownScreen(TextScreen):
    """The Markdown, too wide for the screen perhaps, and where it can be written."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("w", "write", "write to a file"), _BACK]

    def __init__(self, source: Callable[[], str], path: Path) -> None:
        super().__init__("Markdown (tilewright sweep status FILE --markdown)", source)
        self.path = path
        self.add_class("wide")

    def action_write(self) -> None:
        """Write the Markdown to a file beside the sweep's."""
        try:
            write_text(self.path, self.source())
            said = f"written to {self.path}"
        except ConfigError as error:
            said = str(error)
        self.query_one("#said", Static).update(plain_line(said))


class Question(ModalScreen[bool]):
    """A screen that asks a question; it is left with True for yes, False for no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "yes"),
        Binding("n,q,escape", "dismiss(False)", "no"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """Lay out the question and the keys that answer it."""
        yield Static(f"{self._text}\n\ny: yes   n: no", id="question", markup=False)


class SweepApp(App[None]):
    """The terminal application that shows one sweep while it runs, and after."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", "quit", show=False, priority=True)
    ]
    CSS = """
    #head { height: auto; text-style: bold; }
    #detail, #said { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    LinesTable, #place { height: 1fr; scrollbar-size-vertical: 1; }
    .wide #text { width: auto; }
    Question { align: center middle; }
    #question { width: auto; max-width: 76; height: auto; padding: 1 2; background: $surface; }
    #question { border: solid $foreground; }
    """

    def __init__(self, journal: SweepJournal) -> None:
        super().__init__()
        self.animation_level = "none"  # over ssh every frame is sent
        self.table_screen = SweepScreen(journal)

    def get_default_screen(self) -> Screen[None]:
        """The screen that the application opens with: the table."""
        return self.table_screen
