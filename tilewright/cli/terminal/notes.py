"""Selection of the notes that a command prints without ``--verbose``."""

from __future__ import annotations

from collections.abc import Sequence

_DETAILS = ("not merged: ", "whole on every rank: ")
"""Notes of compiler passes about single weights."""

_FALLBACKS = ("backend auto: onnxruntime", "ranks exchange through NCCL")

RANDOM_NOTE = "{}: random weights; its text means nothing, its speed does"


def without_details(notes: Sequence[str], *, is_verbose: bool) -> tuple[str, ...]:
    """Return the notes about the whole model, or all notes with ``--verbose``."""
    return tuple(each for each in notes if is_verbose or not each.startswith(_DETAILS))


def only_fallbacks(notes: Sequence[str], *, is_verbose: bool) -> tuple[str, ...]:
    """Return the notes that another backend than the fastest runs, or all notes with
    ``--verbose``.
    """
    return tuple(each for each in notes if is_verbose or each.startswith(_FALLBACKS))
