"""Visible image rows per prompt token in Llama 3.2 Vision.

A token sees the last image before its position, and preceding images with adjacent tokens.
Generated tokens see the last prompt token's images.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VisibleSpan:
    """Visible images from a position on.

    Attributes:
        start: First position.
        first: First visible image.
        end: Last visible image plus 1.
    """

    start: int
    first: int
    end: int


def visible_images(positions: Iterable[int]) -> tuple[VisibleSpan, ...]:
    """Return the visible images by position, ascending. Earlier positions see no image.

    ``positions`` are those of the images' tokens, ascending.
    """
    spans: list[VisibleSpan] = []
    for index, position in enumerate(positions):
        follows = bool(spans) and spans[-1].start == position - 1
        spans.append(VisibleSpan(position, spans[-1].first if follows else index, index + 1))
    return tuple(spans)
