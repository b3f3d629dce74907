"""What the rooms' scripts share that are run by ``python -m`` and print a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from tilewright.errors import TilewrightError
from tilewright.options.arguments import parse

_T = TypeVar("_T")


def run_script(
    measured: Callable[[_T], str],
    kind: type[_T],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
) -> int:
    """Print what was measured as ``argv`` asks, read as options of a ``kind``; returns the exit
    code. A mistake in the arguments, or what keeps anything from being measured, is one line on
    standard error.
    """
    try:
        print(measured(parse(kind, argv, prog=prog, description=description)), end="")
    except TilewrightError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0
