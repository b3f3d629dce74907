"""The command ``tilewright sweep show``. Checks for a terminal and for the optional library, then
opens the view in `show_app`.
"""

from __future__ import annotations

import argparse
import shlex
import sys

from tilewright.cli.sweep.files import open_sweep
from tilewright.errors import ConfigError


def show(given: argparse.Namespace) -> int:
    """Show the view until it is closed; returns the exit code."""
    journal = open_sweep(given.file)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "sweep show: standard input and output are no terminal; allowed: a terminal, or "
            f"tilewright sweep status {shlex.quote(given.file)}"
        )
    try:
        from tilewright.cli.sweep.show_app import SweepApp
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        message = "sweep show needs textual; allowed: pip install -e '.[show]' in the clone"
        raise ConfigError(message) from None
    app = SweepApp(journal)
    app.run()
    return app.return_code or 0
