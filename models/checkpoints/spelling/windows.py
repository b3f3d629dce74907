"""Sliding windows of attention, by layer, from config.json: 0 where a layer sees every position."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.config import MAX_POSITIONS, ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def hf_windows_of_all(keys: Keys, config: ModelConfig) -> ModelConfig:
    """``config`` with the window that config.json gives to every layer; an `Architecture.read_hf`.

    Raises:
        CheckpointError: a window that is not a whole number from 1.
    """
    windows = windows_of_all(keys, config.num_layers, config.max_positions)
    return dataclasses.replace(config, windows=windows)


def hf_windows_of_upper(keys: Keys, config: ModelConfig) -> ModelConfig:
    """``config`` with the windows of the upper layers, where config.json switches them on; an
    `Architecture.read_hf`.

    Raises:
        CheckpointError: a window that is not a whole number from 1, or another type of layer.
    """
    windows = windows_of_upper(keys, config.num_layers, config.max_positions)
    return dataclasses.replace(config, windows=windows)


def windows_of_all(keys: Keys, num_layers: int, max_positions: int) -> tuple[int, ...]:
    """``sliding_window`` for every layer; empty where it is null."""
    if keys.get("sliding_window") is None:
        return ()
    return windows_by_type(keys, [SLIDING] * num_layers, max_positions)


def windows_of_upper(keys: Keys, num_layers: int, max_positions: int) -> tuple[int, ...]:
    """The windows of layers from ``max_window_layers`` on, where ``use_sliding_window`` is true."""
    first = keys.integer("max_window_layers", 0, MAX_POSITIONS, default=28)
    kinds = keys.get("layer_types")
    if kinds is not None:  # whatever the switch says: another kind of layer has other weights
        kinds = checked_types(keys, kinds, num_layers)
    if not keys.boolean("use_sliding_window", default=False) or keys.get("sliding_window") is None:
        return ()
    if kinds is None:
        kinds = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    return windows_by_type(keys, kinds, max_positions)


def checked_types(keys: Keys, kinds: object, num_layers: int) -> list[str]:
    """``kinds``, the value of ``layer_types``, if it names a type that is read for each layer.

    Raises:
        CheckpointError: a list of another length, or another type of layer.
    """
    tail = f"allowed: {num_layers} of {FULL}, {SLIDING}"
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise keys.error("layer_types", kinds, tail)
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise keys.error("layer_types", kind, tail)
    return kinds


def windows_by_type(keys: Keys, kinds: Iterable[str], max_positions: int) -> tuple[int, ...]:
    """``sliding_window`` for the sliding layers; empty where no window is shorter than all."""
    window = keys.integer("sliding_window", 1, MAX_POSITIONS)
    if window >= max_positions:
        return ()
    windows = tuple(window if kind == SLIDING else 0 for kind in kinds)
    return windows if any(windows) else ()
