"""Tenstorrent boards without the hardware: emulated in value, checked in form, priced in time."""

from __future__ import annotations

from functools import partial

from tilewright.compiler.targets.tenstorrent.target import BoardTarget

N150, N300, T3K, TG = (partial(BoardTarget, name) for name in ("n150", "n300", "t3k", "tg"))
P100, P150, P300, QB2, LOUDBOX, BH_GALAXY = (
    partial(BoardTarget, name) for name in ("p100", "p150", "p300", "qb2", "loudbox", "bh-galaxy")
)

__all__ = [
    *("N150", "N300", "T3K", "TG"),
    *("P100", "P150", "P300", "QB2", "LOUDBOX", "BH_GALAXY", "BoardTarget"),
]
