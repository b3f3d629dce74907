"""The segments of some rows of a recipe."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler.ir.recipe import Segment, WeightRecipe, cut, load_dense

TENSORS = {"a": torch.randn(6, 2), "b": torch.randn(4, 5, 2)}
RECIPE = WeightRecipe(
    (
        Segment("a", 6, offset=1.0),
        Segment("b", 8, rows=(7, 15)),
        Segment("a", 4, rows=(2, 6)),
    ),
    (3, 6, 2),
)


@pytest.mark.parametrize(("first", "last"), [(0, 6), (2, 3), (4, 9), (6, 14), (8, 18), (14, 18)])
def test_they_are_those_rows_of_the_whole(first: int, last: int) -> None:
    rows = load_dense(RECIPE, TENSORS.__getitem__).flatten(0, 1)
    part = WeightRecipe(cut(RECIPE, first, last), (last - first, 2))
    assert sum(segment.num_rows for segment in part.segments) == last - first
    assert torch.equal(load_dense(part, TENSORS.__getitem__), rows[first:last])


def test_whole_segments_stay_as_they_are() -> None:
    assert cut(RECIPE, 6, 14) == RECIPE.segments[1:2]
