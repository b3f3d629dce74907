"""The terminal view of a sweep: a table that follows the file, with further screens.

`control` and `tables` provide the same contents and commands without a terminal view.
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
from tilewright.cli.sweep.layout import Listing, ScreenLine
from tilewright.errors import ConfigError
from tilewright.evaluate.report.display import plain_line
from tilewright.evaluate.sweep.journal import SweepJournal
from tilewright.utils.files import write_file
from tilewright.utils.json_lines import TornLineWarning

LOOK_SECONDS = 1.0
_LOG_BYTES = 1 << 16
_BACK = Binding("escape,q", "app.pop_screen", "back", key_display="q")


class LinesTable(DataTable[Text]):
    """The table of lines, with its Enter key in the footer."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "log", key_display="Enter")
    ]


class SweepScreen(Screen[None]):
    """The table of a sweep.

    Two lines about the sweep are above it. The current line and the last command are below it.
    """

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
        self.has_runner = False
        self.shows_cells = False
        self.sort: str | None = None
        self.is_reversed = False
        self._shown: Listing | None = None
        self._seen: object = None
        self._deed = ""
        self._texts: dict[str, str] = {}

    def compose(self) -> ComposeResult:
        """Compose the widgets, from top to bottom."""
        yield Static(id="head", markup=False)
        yield LinesTable(cursor_type="row", cell_padding=0, zebra_stripes=True)
        yield Static(id="detail", markup=False)
        yield Static(id="said", markup=False)
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Refresh at once, and then every second."""
        self.set_interval(LOOK_SECONDS, self.look)
        self.query_one(LinesTable).focus()
        self.look()

    def on_resize(self) -> None:
        """Redraw, because the name column fills the rest of the width."""
        self.draw()

    def look(self) -> None:
        """Read new events and redraw. A read error is shown, and earlier contents stay."""
        trouble = ""
        try:
            self.journal.refresh()
            self.has_runner = self.journal.has_runner()
        except ConfigError as error:
            trouble = plain_line(str(error))
        self._put("said", trouble or self._deed)
        states = self.journal.state.cells.values()
        seen = [(s.status, s.is_cancel_requested, s.started, s.seconds) for s in states]
        if (self.has_runner, seen) != self._seen:
            self._seen = (self.has_runner, seen)
            self.draw()
        first, second = tables.headline(self.journal, has_runner=self.has_runner)
        order = f"by {self.sort or 'plan'}{', reversed' if self.is_reversed else ''}"
        self._put("head", f"{first}, {order}\n{second}")  # the table may have reset the order

    def table(self) -> Listing:
        """Return the current table."""
        make = tables.cells if self.shows_cells else tables.configurations
        table = make(self.journal.state, has_runner=self.has_runner)
        if self.sort not in [None, *(column.key for column in table.columns)]:
            self.sort = None
        return table.sorted_by(self.sort, is_reversed=self.is_reversed)

    def draw(self) -> None:
        """Fill the table again. The cursor stays on its line."""
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
        """Return the line of the cursor."""
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
        """Update a text if it has changed. An unchanged layout costs more than the comparison."""
        if self._texts.get(place) != text:
            self._texts[place] = text
            self.query_one(f"#{place}", Static).update(text)

    def on_data_table_row_highlighted(self) -> None:
        """Show the complete name of the line below the table."""
        self._describe()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """Sort by the selected column. Selecting it again reverses the order."""
        self.is_reversed = self.sort == event.column_key.value and not self.is_reversed
        self.sort = event.column_key.value
        self._redo(is_at_top=True)

    def _redo(self, *, is_at_top: bool = False) -> None:
        self._seen = None
        self.look()
        if is_at_top:
            self.query_one(LinesTable).move_cursor(row=0, animate=False)

    def action_toggle_cells(self) -> None:
        """Switch between the tables of configurations and cells."""
        self.shows_cells = not self.shows_cells
        self._redo()

    def action_back(self) -> None:
        """Return from cells to configurations, if cells are shown."""
        if self.shows_cells:
            self.action_toggle_cells()

    def action_sort(self) -> None:
        """Sort by the next column. After the last column, use the plan's order."""
        keys = [None, *(column.key for column in self.table().columns)]
        self.sort = keys[(keys.index(self.sort) + 1) % len(keys)]
        self._redo(is_at_top=True)

    def action_reverse(self) -> None:
        """Reverse the lines' order."""
        self.is_reversed = not self.is_reversed
        self._redo(is_at_top=True)

    def action_markdown(self) -> None:
        """Show the table as Markdown on a new screen."""
        path = self.journal.path.with_name(f"{self.journal.path.stem}-table.md")
        self.app.push_screen(MarkdownScreen(lambda: self.table().markdown(), path))

    def action_front(self) -> None:
        """Show the front and its unproven differences."""

        def text() -> str:
            table = tables.front_table(self.journal.state, has_runner=self.has_runner)
            table = table.sorted_by("speed")
            return "\n".join(control.table_lines(table, self.app.size.width - 1))

        self.app.push_screen(TextScreen("The front: speed against top-1", text))

    def on_data_table_row_selected(self) -> None:
        """Open the log of a line's newest cell."""
        line = self.current()
        if line is None:
            return

        def text() -> str:
            state = control.newest(line.states)
            has_runner = self.has_runner
            return control.log_text(
                self.journal, state, has_runner=has_runner, max_bytes=_LOG_BYTES
            )

        self.app.push_screen(TextScreen(f"The log of {line.name}", text, is_at_end=True))

    def action_ask(self, what: control.What) -> None:
        """Cancel or restart the line's cells after a confirmation."""
        line = self.current()
        if line is None:
            return
        chosen = control.affected(line.states, what)
        if not chosen:
            self._ask(line, what, is_sure=True)  # prints the reason
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
    """A scrollable text that follows its source."""

    BINDINGS: ClassVar[list[BindingType]] = [_BACK]

    def __init__(self, title: str, source: Callable[[], str], *, is_at_end: bool = False) -> None:
        super().__init__()
        self._title = title
        self.source = source
        self._is_at_end = is_at_end
        self._text: str | None = None

    def compose(self) -> ComposeResult:
        """Compose the widgets, from top to bottom."""
        yield Static(plain_line(self._title), id="head", markup=False)
        with ScrollableContainer(id="place"):
            yield Static(id="text", markup=False)
        yield Static(id="said", markup=False)
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Refresh at once, and then every second."""
        self.set_interval(LOOK_SECONDS, self.look)
        self.query_one("#place").focus()
        self.look()

    def look(self) -> None:
        """Show the current text. A view at the end stays at the end."""
        place = self.query_one("#place")
        if (text := self.source()) == self._text:
            return
        follows = self._is_at_end and (self._text is None or place.scroll_y >= place.max_scroll_y)
        self._text = text
        self.query_one("#text", Static).update(text)
        if follows:
            place.scroll_end(animate=False)


class MarkdownScreen(TextScreen):
    """The Markdown of a table, scrollable in both directions, with a file to write it to."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("w", "write", "write to a file"), _BACK]

    def __init__(self, source: Callable[[], str], path: Path) -> None:
        super().__init__("Markdown (tilewright sweep status FILE --markdown)", source)
        self.path = path
        self.add_class("wide")

    def action_write(self) -> None:
        """Write the Markdown to a file in the sweep file's directory."""
        try:
            write_file(self.path, self.source().encode())
            said = f"written to {self.path}"
        except ConfigError as error:
            said = str(error)
        self.query_one("#said", Static).update(plain_line(said))


class Question(ModalScreen[bool]):
    """A question with the result True for yes, False for no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "yes"),
        Binding("n,q,escape", "dismiss(False)", "no"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """Compose the question and its keys."""
        yield Static(f"{self._text}\n\ny: yes   n: no", id="question", markup=False)


class SweepApp(App[None]):
    """The terminal application for a running or finished sweep."""

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
        self.animation_level = "none"  # over ssh, every frame is sent
        self.table_screen = SweepScreen(journal)

    def get_default_screen(self) -> Screen[None]:
        """Return the first screen: the table."""
        return self.table_screen
