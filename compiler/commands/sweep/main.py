"""The verbs of ``tilewright sweep``: which module each is in."""

from __future__ import annotations

from importlib import import_module

from tilewright.compiler.commands.sweep.options import PLANS
from tilewright.compiler.errors import ConfigError, allowed

EXIT_USER_ERROR = 2
_PACKAGE = "tilewright.compiler.commands.sweep"
_VERBS = {
    "status": ("control", "a table of a sweep, running or finished"),
    "show": ("show", "the same as a terminal view, with keys"),
    "export": ("report", "Markdown, CSV, PERF.md"),
    "plot": ("report", "SVG and PNG: the front, the sensitivities"),
    "cancel": ("control", "cancel cells, queued or running"),
    "restart": ("control", "run cells again"),
    "log": ("control", "what a cell said"),
}
_YAML = (".yaml", ".yml")


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    verb = argv[0] if argv else "--help"
    if verb in ("-h", "--help"):
        print(_usage())
        return 0 if argv else EXIT_USER_ERROR
    if verb in _VERBS:
        module = import_module(f"{_PACKAGE}.{_VERBS[verb][0]}")
        return int(module.main(verb, argv[1:]))
    if verb in PLANS or verb.endswith(_YAML) or verb.startswith("-"):
        module = import_module(f"{_PACKAGE}.{'search' if verb == 'search' else 'run'}")
        return int(module.main(argv))
    names = [*PLANS, "a .yaml with a grid", *_VERBS]
    raise ConfigError(f"unknown plan {verb[:60]!r}; {allowed(names)}")


def _usage() -> str:
    lines = ["usage: tilewright sweep PLAN [options]      (PLAN --help says more)"]
    lines += ["       tilewright sweep GRID.yaml [options]"]
    lines += ["       tilewright sweep VERB FILE [options]", "", "plans:"]
    lines += [f"  {name:<12} {text}" for name, text in PLANS.items()]
    lines += ["", "verbs, on a sweep's file:"]
    lines += [f"  {name:<12} {text}" for name, (_, text) in _VERBS.items()]
    return "\n".join(lines)
