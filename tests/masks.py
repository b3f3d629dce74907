"""Masks as tests think of them, and as executables are given them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilewright.compiler.targets.interface.step import Slot
from tilewright.compiler.targets.interface.token_masks import TokenMask, num_words


def allowed_of(masks: Mapping[Slot, np.ndarray]) -> TokenMask:
    """Of bool ``[vocabulary]`` by slot; bits behind the vocabulary are set, which means nothing."""
    if not masks:
        return TokenMask()
    rows = np.stack(list(masks.values()))
    count = rows.shape[1]
    padded = np.ones((len(rows), 32 * num_words(count)), dtype=bool)
    padded[:, :count] = rows
    words = np.packbits(padded, axis=1, bitorder="little").view("<u4").astype(np.uint32)
    return TokenMask(tuple(masks), words)
