"""Windows by layer, as the three kinds of files say them."""

from __future__ import annotations

from typing import Any

import pytest

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.checkpoints.spelling.windows import (
    checked_types,
    windows_of_all,
    windows_of_upper,
)

FULL, SLIDING = "full_attention", "sliding_attention"


def keys(**values: Any) -> Keys:
    return Keys(values, "tiny/config.json")


@pytest.mark.parametrize(("window", "expected"), [(None, ()), (3, (3, 3)), (64, ()), (100, ())])
def test_of_all_layers(window: int | None, expected: tuple[int, ...]) -> None:
    assert windows_of_all(keys(sliding_window=window), 2, 64) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ()),
        ({"use_sliding_window": False, "sliding_window": 3, "max_window_layers": 0}, ()),
        ({"use_sliding_window": True, "sliding_window": None}, ()),
        ({"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}, (0, 3)),
        ({"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}, ()),
        ({"use_sliding_window": True, "sliding_window": 3, "layer_types": [SLIDING, FULL]}, (3, 0)),
        ({"use_sliding_window": False, "sliding_window": 3, "layer_types": [SLIDING, FULL]}, ()),
        ({"sliding_window": 3, "layer_types": [FULL, FULL]}, ()),
        ({"use_sliding_window": True, "layer_types": [SLIDING, SLIDING]}, ()),
    ],
)
def test_of_upper_layers(values: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert windows_of_upper(keys(**values), 2, 64) == expected


@pytest.mark.parametrize("switch", [{}, {"use_sliding_window": False}, {"sliding_window": None}])
@pytest.mark.parametrize("kinds", [["linear_attention", FULL], [FULL], [], "full", [None, None]])
def test_other_types_are_refused_whatever_the_switch_says(
    switch: dict[str, Any], kinds: object
) -> None:
    values = {"sliding_window": 3, **switch, "layer_types": kinds}
    with pytest.raises(CheckpointError, match=r"layer_types = .*allowed: 2 of full_attention"):
        windows_of_upper(keys(**values), 2, 64)


@pytest.mark.parametrize("kinds", [[FULL], [FULL, "chunked_attention"], "full", [FULL, None], None])
def test_other_types_of_layers_are_refused(kinds: object) -> None:
    with pytest.raises(CheckpointError, match=r"layer_types = .*allowed: 2 of full_attention"):
        checked_types(keys(), kinds, 2)
    assert checked_types(keys(), [FULL, SLIDING], 2) == [FULL, SLIDING]


@pytest.mark.parametrize("window", [0, -4, 2.5, "4096", True])
def test_a_window_is_a_whole_number(window: object) -> None:
    with pytest.raises(CheckpointError, match=r"sliding_window = .*a whole number from 1"):
        windows_of_all(keys(sliding_window=window), 2, 64)
