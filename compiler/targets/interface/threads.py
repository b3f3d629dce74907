"""Limits for torch's own threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(num_threads: int | None) -> Iterator[None]:
    """Set the number of torch threads inside the block. None: unchanged."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def single_torch_thread() -> Iterator[None]:
    """Limit torch to a single thread inside the block.

    More torch threads compete with the target's threads and double a decode step's time.
    Packing of weights is limited by memory and needs no further threads.
    """
    with torch_threads(1):
        yield
