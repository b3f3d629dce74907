"""Verbs of ``tilewright sweep`` and their options. The sibling modules implement them."""

from __future__ import annotations

import argparse
from importlib import import_module

from tilewright.cli.arguments.sweep import PLANS
from tilewright.errors import ConfigError, allowed
from tilewright.options.arguments import Parser

EXIT_USER_ERROR = 2
_PACKAGE = "tilewright.cli.sweep"
_VERBS = {
    "status": ("control", "table of a sweep, running or finished"),
    "show": ("show", "terminal view of a sweep, running or finished"),
    "export": ("report", "tables of sweeps: Markdown, CSV, PERF.md"),
    "plot": ("report", "SVG and PNG plots of sweeps: front, sensitivities"),
    "cancel": ("control", "cancel cells, queued or running"),
    "restart": ("control", "run cells again"),
    "log": ("control", "log of a cell, and its outcome"),
}
_YAML = (".yaml", ".yml")
_LEGEND = (
    "KL in nats; t/s/u: tokens per second and user, the median of all rounds; Spr%: (highest - "
    "lowest) / median; TTFT in ms; MB: weights as stored. Front: 'tied' is below a better point, "
    "within the noise."
)
_KEYS = (
    "Keys: c cells or configurations, s (or a click on a column's title) sort, S reverse, "
    "m Markdown, p the front, Enter the log, x cancel, r restart, Escape back, q back or quit."
)


def main(argv: list[str]) -> int:
    """Run ``tilewright sweep``. Return the exit code."""
    verb = argv[0] if argv else "--help"
    if verb in ("-h", "--help"):
        print(_usage())
        return 0 if argv else EXIT_USER_ERROR
    if verb in _VERBS:
        given = verb_parser().parse_args(argv)
        return int(getattr(import_module(f"{_PACKAGE}.{_VERBS[verb][0]}"), verb)(given))
    if verb in PLANS or verb.endswith(_YAML) or verb.startswith("-"):
        module = import_module(f"{_PACKAGE}.{'search' if verb == 'search' else 'run'}")
        return int(module.main(argv))
    names = [*PLANS, "a .yaml with a grid", *_VERBS]
    raise ConfigError(f"unknown plan {verb[:60]!r}; {allowed(names, verb)}")


def verb_parser() -> argparse.ArgumentParser:
    """Return the parser for the verbs, ``FILE`` or ``FILES`` first."""
    parser = Parser(prog="tilewright sweep")
    verbs = parser.add_subparsers(dest="verb")
    made = {
        verb: verbs.add_parser(verb, description=f"{text[0].upper()}{text[1:]}.")
        for verb, (_, text) in _VERBS.items()
    }
    status, show, export, plot, cancel, restart, log = made.values()
    status.epilog, show.epilog = _LEGEND, _KEYS
    for each in (status, show, cancel, restart, log):
        each.add_argument("file", metavar="FILE", help="sweep file")
    for each in (export, plot):
        each.add_argument("files", nargs="+", metavar="FILE", help="sweep files")
    lines = status.add_mutually_exclusive_group()
    lines.add_argument("--cells", action="store_true", help="a line per cell")
    lines.add_argument("--pareto", action="store_true", help="the front, with unproven differences")
    status.add_argument("--sort", metavar="COLUMN", help="sort by a column, named as in --json")
    status.add_argument("--reverse", action="store_true", help="reverse the order")
    form = status.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a JSON object with unrounded values")
    form.add_argument("--markdown", action="store_true", help="the table as Markdown")
    which = "id of a cell or its first characters"
    for each in (cancel, restart):
        text = f"{which} (see status --cells), or the name of a configuration"
        each.add_argument("cells", nargs="*", metavar="CELL", help=text)
    restart.add_argument("--failed", action="store_true", help="every failed cell")
    newest = f"{which}, or the name of a configuration with its newest cell"
    log.add_argument("cell", metavar="CELL", help=newest)
    export.add_argument("--markdown", metavar="OUT", help="document, or - for standard output")
    export.add_argument("--csv", metavar="OUT", help="comma-separated table, or -")
    export.add_argument("--perf-md", metavar="FILE", help="file with tables to update (PERF.md)")
    export.add_argument("--results", metavar="FILE", help="results file for --perf-md")
    plot.add_argument(
        "-o", "--output", metavar="DIR", default="docs", help="directory (default: docs)"
    )
    plot.add_argument("--name", metavar="STEM", help="file name stem (default: front)")
    return parser


def _usage() -> str:
    lines = ["usage: tilewright sweep PLAN [options]      (PLAN --help lists the options)"]
    lines += ["       tilewright sweep GRID.yaml [options]"]
    lines += ["       tilewright sweep VERB FILE [options]", "", "plans:"]
    lines += [f"  {name:<12} {text}" for name, text in PLANS.items()]
    lines += ["", "verbs for the file of a sweep:"]
    lines += [f"  {name:<12} {text}" for name, (_, text) in _VERBS.items()]
    return "\n".join(lines)
