"""Valid files made wrong: flipped, cut, spliced, their numbers replaced by others that lie."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from hypothesis import strategies as st

Mutation: TypeAlias = Callable[[bytes], bytes]

LYING_NUMBERS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 10**10, 2**62, 2**63, 2**64 - 1)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 2**31, 2**32 - 1, 2**63, 2**64, 10**10, 10**30, 1e308, -0.5),
    *(float("nan"), float("inf"), "", "a", "\0", "\ud800", "\x1b[31m", "a\nb", "x" * 1000),
    *([], {}, [[]], [None], [1], ["a"], {"a": 1}, {"": None}),
)


def mutations(*, head: int | None = None, max_steps: int = 3) -> st.SearchStrategy[Mutation]:
    """Functions from bytes to bytes; most places are in the first ``head`` bytes."""
    place = st.floats(0, 1, exclude_max=True)
    number = st.sampled_from(LYING_NUMBERS)
    step = st.one_of(
        st.tuples(st.just("flip"), place, st.integers(1, 255)),
        st.tuples(st.just("cut"), place, st.just(0)),
        st.tuples(st.just("u32"), place, number),
        st.tuples(st.just("u64"), place, number),
        st.tuples(st.just("drop"), place, st.integers(1, 16)),
        st.tuples(st.just("repeat"), place, st.integers(1, 64)),
        st.tuples(st.just("insert"), place, st.binary(min_size=1, max_size=8)),
    )

    def combine(steps: list[tuple[str, float, Any]]) -> Mutation:
        def mutate(raw: bytes) -> bytes:
            for kind, where, what in steps:
                size = len(raw) if head is None else min(head, len(raw))
                raw = _apply(kind, raw, int(where * size), what)
            return raw

        return mutate

    return st.lists(step, min_size=1, max_size=max_steps).map(combine)


def _apply(kind: str, raw: bytes, at: int, what: Any) -> bytes:
    if kind == "flip" and at < len(raw):
        return raw[:at] + bytes([raw[at] ^ what]) + raw[at + 1 :]
    if kind == "cut":
        return raw[:at]
    if kind in ("u32", "u64"):
        field = struct.pack("<Q", what)[: 4 if kind == "u32" else 8]
        return raw[:at] + field + raw[at + len(field) :]
    if kind == "drop":
        return raw[:at] + raw[at + what :]
    if kind == "repeat":
        return raw[: at + what] + raw[at:]
    return raw[:at] + what + raw[at:] if kind == "insert" else raw


def damaged_trees(tree: Any, values: tuple[Any, ...] = ODD_VALUES) -> st.SearchStrategy[Any]:
    """A JSON-like tree in which up to three values are others, gone, or added."""
    step = st.tuples(
        st.floats(0, 1, exclude_max=True),
        st.sampled_from(("set", "set", "set", "drop", "add")),
        st.sampled_from(values),
    )

    def damage(steps: list[tuple[float, str, Any]]) -> Any:
        damaged = copy.deepcopy(tree)
        for where, kind, value in steps:
            places = list(_places(damaged))
            if not places:
                break
            holder, key = places[int(where * len(places))]
            if kind == "drop":
                del holder[key]
            elif kind == "add" and isinstance(holder, dict):
                holder[f"{key}2"] = copy.deepcopy(value)
            else:
                holder[key] = copy.deepcopy(value)
        return damaged

    return st.lists(step, min_size=1, max_size=3).map(damage)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Holder and key of every value, of long lists and maps the first ones."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(items)[:24]:
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)
