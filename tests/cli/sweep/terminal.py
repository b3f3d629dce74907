"""The terminal view run without a terminal: what stands on its screen, keys, waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from unittest import mock

from textual.pilot import Pilot
from textual.widgets import Footer

from tilewright.cli.sweep import show_app
from tilewright.cli.sweep.show_app import LinesTable, SweepApp
from tilewright.evaluate.sweep.journal import SweepJournal

SIZE = (80, 24)
Script = Callable[[Pilot[None], SweepApp], Awaitable[None]]


def drive(journal: SweepJournal, script: Script, *, size: tuple[int, int] = SIZE) -> SweepApp:
    """Run the view without a terminal, and a script of keys on it."""
    app = SweepApp(journal)

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: len(app.screen.query_one(Footer).children) > 0)
            await pilot.pause()  # the footer is filled after the first picture
            await script(pilot, app)

    with mock.patch.object(show_app, "LOOK_SECONDS", 0.2):
        asyncio.run(run())
    return app


def screen(app: SweepApp) -> list[str]:
    """What stands on the screen, line by line."""
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip) for strip in strips]


def text(app: SweepApp) -> str:
    return "\n".join(screen(app))


def names(app: SweepApp, column: int = 0) -> list[str]:
    """The first words of the table's lines, from the top of the screen."""
    table = app.screen.query_one(LinesTable)
    first, last = table.region.y + 1, table.region.bottom
    return [line.split()[column] for line in screen(app)[first:last] if line.split()]


def line_of(app: SweepApp, start: str) -> str:
    """The table's first line that begins so."""
    return next(line for line in screen(app) if line.strip().startswith(start))


async def press(pilot: Pilot[None], *keys: str) -> None:
    await pilot.press(*keys)
    await pilot.pause()


async def go_to(pilot: Pilot[None], app: SweepApp, row: int) -> None:
    app.screen.query_one(LinesTable).move_cursor(row=row)
    await pilot.pause()


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Wait for what the view does by itself."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        await pilot.pause(0.02)
