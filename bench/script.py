"""What the rooms' scripts share that are run by ``python -m`` and print a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from tilewright.compiler.errors import TilewrightError


def run_script(measured: Callable[[Sequence[str]], str], argv: Sequence[str]) -> int:
    """Print what was measured as ``argv`` asks; returns the exit code. A mistake in the arguments,
    or what keeps anything from being measured, is one line on standard error.
    """
    try:
        print(measured(argv), end="")
    except TilewrightError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0
