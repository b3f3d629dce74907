"""``tilewright sweep show``: checks that there is a sweep, a terminal and the library, then shows.

The view itself is `show_app`; the library it needs is optional.
"""

from __future__ import annotations

import sys

from tilewright.compiler.commands.arguments import Parser
from tilewright.compiler.commands.sweep.files import open_sweep
from tilewright.compiler.errors import ConfigError

_KEYS = (
    "Keys: c cells or configurations, s (or a click on a column's title) sort, S reverse, "
    "m Markdown, p the front, Enter the log, x cancel, r restart, q or Escape back."
)


def main(verb: str, argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = Parser(
        prog=f"tilewright sweep {verb}",
        description="A terminal view of a sweep, running or finished.",
        epilog=_KEYS,
    )
    parser.add_argument("file", metavar="FILE", help="the sweep's file")
    arguments = parser.parse_args(argv)
    journal = open_sweep(arguments.file)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "sweep show: standard input and output are no terminal; allowed: a terminal, or "
            "tilewright sweep status"
        )
    try:
        from tilewright.compiler.commands.sweep.show_app import SweepApp
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        message = "sweep show needs textual; allowed: pip install tilewright[show]"
        raise ConfigError(message) from None
    app = SweepApp(journal)
    app.run()
    return app.return_code or 0
