"""How many threads torch itself uses beside those of a target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(num_threads: int | None) -> Iterator[None]:
    """Let torch use so many threads inside the block; None leaves their number as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def single_torch_thread() -> Iterator[None]:
    """Keep torch's own threads asleep.

    Beside a session they fight its threads for the cores, and a decode step takes twice as long;
    packing weights is bound by memory, and gains nothing from them.
    """
    with torch_threads(1):
        yield
