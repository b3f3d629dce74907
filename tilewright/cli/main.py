"""The command ``tilewright``: selects the subcommand and prints user errors as one line.

The scripts in ``demo/`` run the same subcommands from a clone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from tilewright.cli.processes.run_follower import is_follower, run_follower
from tilewright.compiler import __version__
from tilewright.errors import TilewrightError, allowed
from tilewright.utils.garbage import run_process

_COMMANDS, _BENCH = "tilewright.cli.commands", "bench"

VERBS = {
    "run": (f"{_COMMANDS}.run", "answer a prompt with a model"),
    "chat": (f"{_COMMANDS}.chat", "talk with a model, turn by turn"),
    "serve": (f"{_COMMANDS}.serve", "serve a model over HTTP with the OpenAI API"),
    "batch": (f"{_COMMANDS}.batch", "answer a file of requests without a server"),
    "compile": (f"{_COMMANDS}.compile", "compile a model to a program, ONNX, MLIR or an engine.py"),
    "convert": (f"{_COMMANDS}.convert", "write a model for dllama or into the program cache"),
    "bench": (f"{_COMMANDS}.bench", "measure a model or a server: speed, memory, accuracy"),
    "sweep": ("tilewright.cli.sweep.main", "measure many configurations and find the best"),
    "calibrate": (f"{_COMMANDS}.calibrate", "choose the codes of weights on a text"),
    "trace": (f"{_COMMANDS}.trace_model", "find the layers that lose accuracy"),
    "plan": (f"{_COMMANDS}.plan", "compare Tenstorrent boards for a model"),
    "models": (f"{_COMMANDS}.models", "list and remove cached programs and downloaded models"),
    "pull": (f"{_COMMANDS}.pull", "download a model from the Hugging Face hub"),
}
"""Module and summary of each subcommand, in the order of ``--help``."""

MOVED = {
    "bench-serve": (f"{_COMMANDS}.bench_serve", "tilewright bench --url URL"),
    "generate-engine": (f"{_COMMANDS}.generate_engine", "tilewright compile --emit engine"),
    "nodes": (f"{_COMMANDS}.nodes", "tilewright run --nodes N or tilewright bench --nodes N"),
}
"""Module and new spelling of each renamed subcommand. The old names are removed in release 0.3."""

MAINTAINERS = frozenset(
    (
        *("perf", "reference", "perf-check", "fit-perf-model", "make-batch"),
        *("compare", "compare-answers", "compare-serve", "bench-loop", "bench-cuda"),
    )
)
"""Old names of the commands of ``python -m bench``. They need a clone of the repository."""

_WITH_RANKS = ("run", "chat", "bench", "serve", "batch")
"""Subcommands with several ranks. Ranks other than 0 follow rank 0."""

EXIT_USER_ERROR = 2
_INTERRUPTED = 130
_CLONE = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``tilewright VERB ...`` and return the exit code."""
    if argv is None:  # this process runs only this command
        return run_process(lambda: _main(sys.argv[1:]))
    return _main(list(argv))


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage("tilewright COMMAND", VERBS))
        return 0 if arguments else EXIT_USER_ERROR
    if arguments[0] == "--version":
        print(f"tilewright {__version__}")
        return 0
    verb, *rest = arguments

    def run() -> int:
        if verb in _WITH_RANKS and is_follower(rest):
            return run_follower(rest)
        return _command(verb)(rest)

    return report_errors(run)


def report_errors(run: Callable[[], int]) -> int:
    """Return the exit code of ``run()``. Print a user error as one line on standard error."""
    try:
        return run()
    except TilewrightError as error:
        print(f"tilewright: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader exited (a pager, head). Python must not report the pipe again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def find_command(name: str, table: Mapping[str, tuple[str, str]]) -> Callable[[list[str]], int]:
    """Return the ``main`` function of a command.

    Raises:
        TilewrightError: for an unknown name. The message suggests the nearest name.
    """
    if name not in table:
        raise TilewrightError(f"unknown command {name[:80]!r}; {allowed(table, name)}")
    command: Callable[[list[str]], int] = import_module(table[name][0]).main
    return command


def usage(command: str, table: Mapping[str, tuple[str, str]]) -> str:
    """Return the commands' overview in ``table``."""
    width = max(map(len, table)) + 2
    lines = [f"usage: {command} [options]   (COMMAND --help lists the options)", ""]
    lines += [f"  {name:<{width}}{text}" for name, (_, text) in table.items()]
    return "\n".join(lines)


def _command(verb: str) -> Callable[[list[str]], int]:
    if verb in MOVED:
        _print_new_name(verb, MOVED[verb][1])
        return find_command(verb, MOVED)
    if verb in MAINTAINERS:
        _print_new_name(verb, f"python -m bench {verb}")
        if not (_CLONE / "bench" / "__main__.py").is_file():
            raise TilewrightError(f"{verb}: not in the wheel; allowed: a clone of the repository")
        if str(_CLONE) not in sys.path:
            sys.path.insert(0, str(_CLONE))
        return find_command(verb, import_module(f"{_BENCH}.__main__").COMMANDS)
    return find_command(verb, VERBS)


def _print_new_name(old: str, new: str) -> None:
    print(f"tilewright: {old} is deprecated; use {new}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
