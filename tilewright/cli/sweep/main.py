"""The verbs of ``tilewright sweep`` and their options; what they do is in the modules beside."""

from __future__ import annotations

import argparse
from importlib import import_module

from tilewright.cli.arguments.sweep import PLANS
from tilewright.errors import ConfigError, allowed
from tilewright.options.arguments import Parser

EXIT_USER_ERROR = 2
_PACKAGE = "tilewright.cli.sweep"
_VERBS = {
    "status": ("control", "a table of a sweep, running or finished"),
    "show": ("show", "a terminal view of a sweep, running or finished"),
    "export": ("report", "tables of sweeps: Markdown, CSV, PERF.md"),
    "plot": ("report", "figures of sweeps, SVG and PNG: the front, the sensitivities"),
    "cancel": ("control", "cancel cells, queued or running"),
    "restart": ("control", "run cells again"),
    "log": ("control", "what a cell said, and its outcome"),
}
_YAML = (".yaml", ".yml")
_LEGEND = (
    "KL in nats; t/s/u: tokens per second and user, the median of all rounds; Spr%: (highest - "
    "lowest) / median; TTFT in ms; MB: the weights as held. Front: 'tied' is below a better "
    "point, but inside the noise."
)
_KEYS = (
    "Keys: c cells or configurations, s (or a click on a column's title) sort, S reverse, "
    "m Markdown, p the front, Enter the log, x cancel, r restart, Escape back, q back or quit."
)


def main(argv: list[str]) -> int:
    """Run ``tilewright sweep`` with the arguments behind it; returns the exit code."""
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
    """The options of every verb, ``FILE`` or ``FILES`` first."""
    parser = Parser(prog="tilewright sweep")
    verbs = parser.add_subparsers(dest="verb")
    made = {
        verb: verbs.add_parser(verb, description=f"{text[0].upper()}{text[1:]}.")
        for verb, (_, text) in _VERBS.items()
    }
    status, show, export, plot, cancel, restart, log = made.values()
    status.epilog, show.epilog = _LEGEND, _KEYS
    for each in (status, show, cancel, restart, log):
        each.add_argument("file", metavar="FILE", help="the sweep's file")
    for each in (export, plot):
        each.add_argument("files", nargs="+", metavar="FILE", help="what tilewright sweep wrote")
    lines = status.add_mutually_exclusive_group()
    lines.add_argument("--cells", action="store_true", help="a line a cell, not a configuration")
    lines.add_argument("--pareto", action="store_true", help="the front, and what is not proven")
    status.add_argument("--sort", metavar="COLUMN", help="any of the columns' keys in --json")
    status.add_argument("--reverse", action="store_true", help="the other way round")
    form = status.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one object, figures as they are")
    form.add_argument("--markdown", action="store_true", help="the same table as Markdown")
    which = "a cell's id or how it begins"
    for each in (cancel, restart):
        text = f"{which} (see status --cells), or a configuration's name"
        each.add_argument("cells", nargs="*", metavar="CELL", help=text)
    restart.add_argument("--failed", action="store_true", help="every cell that has failed")
    newest = f"{which}, or a configuration's name: its newest cell"
    log.add_argument("cell", metavar="CELL", help=newest)
    export.add_argument("--markdown", metavar="OUT", help="a document; - for standard output")
    export.add_argument("--csv", metavar="OUT", help="a comma-separated table; - as above")
    export.add_argument("--perf-md", metavar="FILE", help="render this file's tables (PERF.md)")
    export.add_argument("--results", metavar="FILE", help="what --perf-md adds to, and renders")
    plot.add_argument("-o", "--output", metavar="DIR", default="docs", help="default: docs")
    plot.add_argument("--name", metavar="STEM", help="of the files' names (default: front)")
    return parser


def _usage() -> str:
    lines = ["usage: tilewright sweep PLAN [options]      (PLAN --help says more)"]
    lines += ["       tilewright sweep GRID.yaml [options]"]
    lines += ["       tilewright sweep VERB FILE [options]", "", "plans:"]
    lines += [f"  {name:<12} {text}" for name, text in PLANS.items()]
    lines += ["", "verbs, on a sweep's file:"]
    lines += [f"  {name:<12} {text}" for name, (_, text) in _VERBS.items()]
    return "\n".join(lines)
