"""Stop strings, think blocks and characters: what comes out does not depend on the pieces."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.models.tokenizer.byte_tokenizer import byte_tokenizer
from tilewright.serve.output.reasoning import ReasoningSplitter, begins_in_reasoning
from tilewright.serve.output.stops import StopMatcher

TEXT = st.text(alphabet="ab<>/thinkQ: \n", max_size=40)
STOPS = st.lists(st.text(alphabet="abQ:", min_size=1, max_size=4), max_size=4)


def cut(text: str, places: Sequence[int]) -> list[str]:
    marks = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(marks)]


def matched(pieces: Sequence[str], stops: Sequence[str], *, includes: bool = False) -> object:
    matcher = StopMatcher(stops, includes=includes)
    text = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    return text, matcher.found


@pytest.mark.parametrize(
    ("text", "stops", "kept", "found"),
    [
        ("one Q: two", ["Q:"], "one ", "Q:"),
        ("aab", ["ab"], "a", "ab"),  # the first a is no beginning
        ("abc", ["abc", "b"], "a", "b"),  # the one that is complete first
        ("xab", ["b", "ab"], "x", "ab"),  # both at once: the longer
        ("Q", ["Q:"], "Q", None),
        ("", ["a"], "", None),
    ],
)
def test_the_first_complete_stop_string_ends_the_text(
    text: str, stops: list[str], kept: str, found: str | None
) -> None:
    assert matched(list(text), stops) == (kept, found)
    assert matched([text], stops, includes=True) == (kept + (found or ""), found)


@given(TEXT, STOPS, st.lists(st.integers(0, 50)), st.booleans())
def test_any_cut_gives_the_same_text(
    text: str, stops: list[str], places: list[int], includes: bool
) -> None:
    whole = matched([text], stops, includes=includes)
    assert matched(cut(text, places), stops, includes=includes) == whole
    kept, found = whole  # type: ignore[misc]
    assert text.startswith(kept)
    assert found is not None or (kept == text and not any(stop in text for stop in stops))


def split(pieces: Sequence[str], *, is_open: bool, may_open: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(is_open=is_open, may_open=may_open)
    found = [*(splitter.push(piece) for piece in pieces), splitter.flush()]
    return "".join(p.reasoning for p in found), "".join(p.content for p in found)


@pytest.mark.parametrize(
    ("text", "is_open", "may_open", "parts"),
    [
        ("2 and 2\n</think>\n\nIs 4.", True, True, ("2 and 2", "Is 4.")),
        ("\n<think>so</think> yes", False, True, ("so", "yes")),
        ("<think>so</think> yes", False, False, ("", "<think>so</think> yes")),
        (" <thin", False, True, ("", " <thin")),
        ("cut short", True, False, ("cut short", "")),
        ("  plain <think>", False, True, ("", "  plain <think>")),
    ],
)
def test_a_think_block_is_told_from_the_answer(
    text: str, is_open: bool, may_open: bool, parts: tuple[str, str]
) -> None:
    assert split([text], is_open=is_open, may_open=may_open) == parts
    assert split(list(text), is_open=is_open, may_open=may_open) == parts


@given(TEXT, st.lists(st.integers(0, 50)), st.booleans(), st.booleans())
def test_any_cut_gives_the_same_parts(
    text: str, places: list[int], is_open: bool, may_open: bool
) -> None:
    whole = split([text], is_open=is_open, may_open=may_open)
    assert split(cut(text, places), is_open=is_open, may_open=may_open) == whole


def test_reasoning_begins_where_the_prompt_has_opened_it() -> None:
    assert begins_in_reasoning("<|im_start|>assistant\n<think>\n")
    assert not begins_in_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not begins_in_reasoning("hello")


@given(st.text(max_size=30), st.lists(st.integers(0, 300)))
def test_streamed_characters_are_the_decoded_text(text: str, places: list[int]) -> None:
    """Token by token, with stop strings that never come: the text itself."""
    coder = byte_tokenizer(300, "bytes")
    tokens = coder.encode(text)
    decoder, matcher = coder.stream(), StopMatcher(["\x00\x01"])
    said = "".join(matcher.push(decoder.push(token)) for token in tokens)
    said += matcher.push(decoder.flush()) + matcher.flush()
    assert said == text == coder.decode(tokens)


def test_stop_strings_made_to_be_slow_are_not() -> None:
    """16 strings of 1,000 characters that a text nearly matches everywhere."""
    stops = ["a" * (999 - at) + "b" for at in range(16)]
    matcher = StopMatcher(stops)
    began = time.process_time()
    text = "".join(matcher.push("aaaa") for _ in range(2500)) + matcher.flush()
    assert text == "a" * 10_000 and matcher.found is None
    assert time.process_time() - began < 2.0
