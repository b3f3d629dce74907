"""How often a process of a command looks for garbage."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 10_000


def collect_seldom() -> None:
    """Look after so many new objects, not after 700: imports of torch make a million that stay,
    through which Python would look again and again.
    """
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
