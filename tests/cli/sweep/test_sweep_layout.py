"""Text made fit to print: nothing moves a cursor, both ends of a long name stay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.cli.sweep.layout import shorten
from tilewright.evaluate.report.display import plain_line, plain_text


@given(st.text())
def test_plain_text_holds_nothing_that_moves_a_cursor(text: str) -> None:
    assert plain_text(text).replace("\n", "").isprintable() or not plain_text(text).strip("\n")
    assert plain_line(text).isprintable() or not plain_line(text)


@given(st.text(st.characters(categories=["L", "N", "P", "Zs"])))
def test_plain_text_leaves_plain_text_alone(text: str) -> None:
    printable = "".join(filter(str.isprintable, text))
    assert plain_text(printable) == printable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x07", "link"),
        ("\x1b]0;never closed\nnext", "\nnext"),
        ("10 %\r100 %\r\nend\r", "100 %\nend"),
        ("a\tb", "a       b"),
        ("\x9b31mC1", "31mC1"),
        ("\x1b(Bx\x1bcy", "xy"),
    ],
)
def test_escape_sequences_are_taken_out(text: str, expected: str) -> None:
    assert plain_text(text) == expected


@given(st.text(min_size=1, max_size=60), st.integers(3, 60))
def test_shortened_text_fits_and_keeps_both_ends(text: str, width: int) -> None:
    short = shorten(text, width)
    assert len(short) == min(width, len(text))
    if len(text) > width:
        start, end = short.split("...", 1) if "..." not in text else (short[:1], short[-1:])
        assert text.startswith(start) and text.endswith(end if width > 4 else "")
