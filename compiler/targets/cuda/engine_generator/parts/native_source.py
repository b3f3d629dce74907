"""Kernels in CUDA C++, as the CUDA target has them; the file has those that its choices name."""

from __future__ import annotations

import re
from pathlib import Path

_FOUND = {each.name: each for each in (Path(__file__).parents[2] / "kernels").rglob("*.cu*")}
_MADE = re.compile(r"^(ROUTE|LINEAR|SUM|ALL|DELTA_STEP)\(.*\)\n", re.M)
"""Lines that make kernels of a source's templates: an engine adds those that it needs."""

FILES = {
    "experts": (
        *("primitives.cuh", "tiles.cuh", "experts_walk.cuh", "experts.cu"),
        *("route_choose.cuh", "route_sort.cuh", "route.cu"),
    ),
    "attention": (
        "primitives.cuh",
        "attention_primitives.cuh",
        "attention_pages.cuh",
        "attention.cu",
    ),
    "delta": (
        "primitives.cuh",
        "attention_primitives.cuh",
        "delta_gates.cuh",
        "delta_step.cu",
    ),
}
"""The sources of each choice, what they include first."""


def sources(native: tuple[str, ...]) -> dict[str, str]:
    """The text of each source that some choices need, by its name."""
    names = dict.fromkeys(name for choice in native for name in FILES[choice])
    return {name: _MADE.sub("", _FOUND[name].read_text()).rstrip() + "\n" for name in names}


SOURCES = sources(("experts", "attention", "delta"))
