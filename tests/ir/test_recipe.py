"""Recipes: what load_dense builds, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from tilewright.compiler.ir.recipe import Segment, WeightRecipe, concatenate, load_dense
from tilewright.compiler.ir.state import PER_SEQUENCE, PER_TOKEN, StateSpec
from tilewright.errors import CheckpointError

A = torch.arange(24.0).view(6, 4)
B = 100 + torch.arange(8.0).view(2, 4)


def source(**tensors: torch.Tensor) -> Callable[[str], torch.Tensor]:
    return ({"a": A, "b": B} | tensors).__getitem__


def test_one_whole_tensor_as_float32() -> None:
    recipe = WeightRecipe((Segment("a", 6),), (6, 4))
    loaded = load_dense(recipe, source(a=A.bfloat16()))
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, A)
    assert recipe.names == ("a",)


def test_rows_and_stacking() -> None:
    recipe = WeightRecipe((Segment("a", 3, rows=(2, 5)), Segment("b", 2)), (5, 4))
    assert torch.equal(load_dense(recipe, source()), torch.cat((A[2:5], B)))


def test_padding_adds_rows_of_zeros() -> None:
    loaded = load_dense(WeightRecipe((Segment("b", 2),), (2, 4), pad_rows=3), source())
    assert torch.equal(loaded, torch.cat((B, torch.zeros(3, 4))))


@pytest.mark.parametrize(
    "tensor", [A.T.contiguous(), A[:5], A[None], A.flatten(), torch.tensor(1.0)]
)
def test_another_shape_names_the_tensor_and_the_expected_shape(tensor: torch.Tensor) -> None:
    recipe = WeightRecipe((Segment("a", 6),), (6, 4))
    expected = f"tensor 'a' has shape {list(tensor.shape)}; allowed: [6, 4]"
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        load_dense(recipe, source(a=tensor))


def test_rows_that_are_not_there_are_refused() -> None:
    recipe = WeightRecipe((Segment("a", 4, rows=(4, 8)),), (4, 4))
    with pytest.raises(CheckpointError, match=re.escape("'a' has shape [2, 4]; allowed: [4, 4]")):
        load_dense(recipe, source())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_name_the_tensor(value: float) -> None:
    bad = A.clone()
    bad[3, 1] = value
    recipe = WeightRecipe((Segment("b", 2), Segment("a", 6)), (8, 4))
    with pytest.raises(CheckpointError, match="tensor 'a' holds NaN or inf"):
        load_dense(recipe, source(a=bad))


def test_concatenation_keeps_segments_in_order() -> None:
    first = WeightRecipe((Segment("a", 6, part="q"),), (6, 4), "bfp8")
    second = WeightRecipe((Segment("b", 2, part="k"),), (2, 4), "bfp8")
    merged = concatenate([first, second])
    assert [segment.part for segment in merged.segments] == ["q", "k"]
    assert (merged.shape, merged.format) == ((8, 4), "bfp8")
    assert torch.equal(load_dense(merged, source()), torch.cat((A, B)))


def test_concatenation_of_unequal_formats_is_a_bug_of_ours() -> None:
    first = WeightRecipe((Segment("a", 6),), (6, 4), "bfp8")
    with pytest.raises(AssertionError):
        concatenate([first, first.with_format("bfp4", "in")])
    with pytest.raises(AssertionError):
        concatenate([first, first.with_format("bfp8", "out")])


@pytest.mark.parametrize(
    ("kind", "window", "num_positions", "expected"),
    [
        (PER_TOKEN, 0, 10, 2 * 3 * 8 * 10),
        (PER_TOKEN, 4, 10, 2 * 3 * 8 * 4),
        (PER_TOKEN, 4, 3, 2 * 3 * 8 * 3),
        (PER_SEQUENCE, 0, 10, 2 * 3 * 8),
    ],
)
def test_state_sizes(kind: str, window: int, num_positions: int, expected: int) -> None:
    spec = StateSpec("s", kind, (2, 3, 8), "fp32", window=window)
    assert spec.num_elements(num_positions) == expected
