"""Attention windows by layer from config.json. 0: full attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.config import MAX_POSITIONS, ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def hf_windows_of_all(keys: Keys, config: ModelConfig) -> ModelConfig:
    """Add config.json's window for all layers. This is an `Architecture.read_hf`.

    Raises:
        CheckpointError: The window is not a positive whole number.
    """
    windows = windows_of_all(keys, config.num_layers, config.max_positions)
    return dataclasses.replace(config, windows=windows)


def hf_windows_of_upper(keys: Keys, config: ModelConfig) -> ModelConfig:
    """Add config.json's windows for the upper layers, if enabled. This is an
    `Architecture.read_hf`.

    Raises:
        CheckpointError: The window is not a positive whole number, or a layer type is unknown.
    """
    windows = windows_of_upper(keys, config.num_layers, config.max_positions)
    return dataclasses.replace(config, windows=windows)


def windows_of_all(keys: Keys, num_layers: int, max_positions: int) -> tuple[int, ...]:
    """Return ``sliding_window`` for every layer. Null: empty."""
    if keys.get("sliding_window") is None:
        return ()
    return windows_by_type(keys, [SLIDING] * num_layers, max_positions)


def windows_of_upper(keys: Keys, num_layers: int, max_positions: int) -> tuple[int, ...]:
    """Return the windows for layers after ``max_window_layers``, if ``use_sliding_window`` is
    true.
    """
    first = keys.integer("max_window_layers", 0, MAX_POSITIONS, default=28)
    kinds = keys.get("layer_types")
    if kinds is not None:  # checked even if disabled: unknown layer types have other weights
        kinds = checked_types(keys, kinds, num_layers)
    if not keys.boolean("use_sliding_window", default=False) or keys.get("sliding_window") is None:
        return ()
    if kinds is None:
        kinds = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    return windows_by_type(keys, kinds, max_positions)


def checked_types(keys: Keys, kinds: object, num_layers: int) -> list[str]:
    """Return ``kinds``, the value of ``layer_types``, if all its types are supported.

    Raises:
        CheckpointError: The length is wrong, or a layer type is unknown.
    """
    tail = f"allowed: {num_layers} of {FULL}, {SLIDING}"
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise keys.error("layer_types", kinds, tail)
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise keys.error("layer_types", kind, tail)
    return kinds


def windows_by_type(keys: Keys, kinds: Iterable[str], max_positions: int) -> tuple[int, ...]:
    """Return ``sliding_window`` for sliding layers. Empty: no window is shorter than the
    context.
    """
    window = keys.integer("sliding_window", 1, MAX_POSITIONS)
    if window >= max_positions:
        return ()
    windows = tuple(window if kind == SLIDING else 0 for kind in kinds)
    return windows if any(windows) else ()
