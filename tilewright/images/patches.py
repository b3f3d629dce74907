"""A vision tower's input: normalized patches, coordinates and interpolation weights, in numpy.

Rows are in merge order: blocks in scan order, and patches within a block in scan order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def normalized(
    pixels: bytes, height: int, width: int, *, mean: Sequence[float], std: Sequence[float]
) -> np.ndarray:
    """Return RGB bytes as float32 ``[3, height, width]`` with zero mean and unit deviation."""
    rgb = np.frombuffer(pixels, np.uint8).reshape(height, width, 3).transpose(2, 0, 1)
    scaled = (rgb.astype(np.float64) * (1 / 255)).astype(np.float32)
    shape = (3, 1, 1)
    centered = scaled - np.asarray(mean, np.float32).reshape(shape)
    result: np.ndarray = centered / np.asarray(std, np.float32).reshape(shape)
    return result


def patches_of(image: np.ndarray, *, patch: int, merge: int, frames: int) -> np.ndarray:
    """Return the patches of ``[3, height, width]`` as ``[P, 3 * frames * patch * patch]``.

    Values are in order (channel, frame, y, x). A still image repeats its frame.
    """
    channels, height, width = image.shape
    down, across = height // (patch * merge), width // (patch * merge)
    split = image.reshape(channels, down, merge, patch, across, merge, patch)
    ordered = split.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    shape = (*ordered.shape[:5], frames, patch, patch)
    return np.broadcast_to(ordered, shape).reshape(-1, channels * frames * patch * patch)


def coordinates(height: int, width: int, merge: int) -> np.ndarray:
    """Return y and x per patch, int64 ``[P, 2]``, in a grid of patches."""
    rows, columns = np.indices((height, width))
    both = np.stack((rows, columns), -1).reshape(height // merge, merge, width // merge, merge, 2)
    return np.ascontiguousarray(both.transpose(0, 2, 1, 3, 4).reshape(-1, 2))


def corners(where: np.ndarray, height: int, width: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return indices (int64) and weights (float32), ``[P, 4]``, of a bilinear interpolation.

    It resamples a square grid of ``side * side`` rows to the grid. Corners are aligned.
    """
    low, high, share = [], [], []
    for axis, size in enumerate((height, width)):
        at = where[:, axis].astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
        floor = np.minimum(at.astype(np.int64), side - 1)
        low.append(floor)
        high.append(np.minimum(floor + 1, side - 1))
        share.append(at - floor.astype(np.float32))
    down, across = share
    indices = [y * side + x for y in (low[0], high[0]) for x in (low[1], high[1])]
    weights = [y * x for y in (1 - down, down) for x in (1 - across, across)]
    return np.stack(indices, -1), np.stack(weights, -1).astype(np.float32)
