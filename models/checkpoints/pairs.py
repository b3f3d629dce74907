"""Order of rotation pairs in q and k."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Order = npt.NDArray[np.int64]


def half_split_order(num_rows: int, num_heads: int, num_rotated: int) -> Order:
    """Return the stored rows in half-split order, if stored pairs are neighbors.

    Pairs ``2 i`` and ``2 i + 1`` become ``i`` and ``i + num_rotated / 2``. Rows of a head after
    ``num_rotated`` keep their order.
    """
    heads = np.arange(num_rows, dtype=np.int64).reshape(num_heads, -1)
    pairs = heads[:, :num_rotated].reshape(num_heads, -1, 2).swapaxes(1, 2)
    turned = pairs.reshape(num_heads, -1)
    return np.concatenate((turned, heads[:, num_rotated:]), axis=1).reshape(-1)
