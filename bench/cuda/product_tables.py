"""What the scripts share that measure products: their shapes, and how they are shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from tilewright.errors import ConfigError
from tilewright.evaluate.report.table import Table


def read_shape(text: str) -> tuple[int, int]:
    """Rows and columns.

    Raises:
        ConfigError: for another text than two whole numbers above zero with an x between them, the
            second a multiple of 4.
    """
    found = re.fullmatch("([1-9][0-9]*)x([1-9][0-9]*)", text)
    if found is None or int(found[2]) % 4:
        raise ConfigError(f"--shapes {text!r}; allowed: as 8192x28672, columns by fours")
    return int(found[1]), int(found[2])


def table_of(
    measure: Callable[[str, str, Sequence[int]], Iterable[list[str]]],
    kind: str,
    shapes: Sequence[str],
    kinds: Sequence[str],
    counts: Sequence[int],
) -> str:
    """All of these with each other: ``measure`` has a line for each way of a shape and a kind, with
    microseconds by number of tokens; ``kind``: what the kinds are.
    """
    heads = ["weight", kind, "way", *(f"{count} tokens" for count in counts)]
    lines = [line for shape in shapes for one in kinds for line in measure(shape, one, counts)]
    return Table.of(heads, lines).markdown()
