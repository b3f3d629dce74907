"""The command ``tilewright``: finds the verb, turns user errors into one line and exit code 2.

The scripts in ``demo/`` are the same verbs run from a clone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from tilewright.cli.processes.follow import follow_here, is_follower
from tilewright.compiler import __version__
from tilewright.errors import TilewrightError, allowed
from tilewright.utils.garbage import collect_seldom

_COMMANDS, _BENCH = "tilewright.cli.commands", "bench"

VERBS = {
    "run": (f"{_COMMANDS}.run", "answer a prompt with a model"),
    "chat": (f"{_COMMANDS}.chat", "talk with a model, turn by turn"),
    "bench": (f"{_COMMANDS}.bench", "measure a model: speed, memory, accuracy"),
    "serve": (f"{_COMMANDS}.serve", "serve a model over HTTP, as OpenAI's API does"),
    "batch": (f"{_COMMANDS}.batch", "answer a file of requests, without a server"),
    "bench-serve": (f"{_COMMANDS}.bench_serve", "load a server, and say how fast it answers"),
    "nodes": (f"{_COMMANDS}.nodes", "run a model over CPU nodes, as distributed-llama is run"),
    "compile": (f"{_COMMANDS}.compile", "compile a model into a folder, ONNX or MLIR"),
    "generate-engine": (f"{_COMMANDS}.generate_engine", "the fastest engine.py of a model here"),
    "convert": (f"{_COMMANDS}.convert", "write a model for dllama, or into the cache"),
    "sweep": ("tilewright.cli.sweep.main", "measure many configurations; find the best"),
    "perf": (f"{_COMMANDS}.perf", "render PERF.md from results"),
    "reference": (f"{_COMMANDS}.reference", "write a model's fp32 reference file"),
}

CLONE_VERBS = {
    "compare": (f"{_BENCH}.peers.command", "measure the CPU target beside its peers"),
    "compare-answers": (f"{_BENCH}.peers.answers", "ten answers beside llama.cpp's, same file"),
    "compare-serve": (f"{_BENCH}.serving.command", "our server beside llama.cpp's, in turn"),
    "compare-batch": (f"{_BENCH}.batch.command", "a batch of ours beside llama.cpp's server"),
    "batch-answers": (f"{_BENCH}.batch.answers", "a batch's answers beside one row at a time"),
    "make-batch": (f"{_BENCH}.batch.made", "a data set for batch, like that of ASC24"),
    "compare-targets": (f"{_BENCH}.targets.command", "targets beside each other and the reference"),
    "compare-replicas": (f"{_BENCH}.serving.replicas", "several engines behind one server"),
    "bench-nodes": (f"{_BENCH}.nodes.command", "measure a model over CPU nodes and their links"),
    "bench-loop": (f"{_BENCH}.host_time", "what the runtime's own work takes a step"),
    "bench-masks": (f"{_BENCH}.masks", "what structured answers cost the others, on the host"),
    "bench-engine": (f"{_BENCH}.engine.command", "a generated engine beside torch"),
    "bench-front": (f"{_BENCH}.serving.front_alone", "what the server's front takes, alone"),
    "bench-cuda": (f"{_BENCH}.cuda.command", "measure the CUDA target, random weights"),
    "bench-collectives": (f"{_BENCH}.cuda.collectives", "exchanges between two GPUs"),
    "perf-check": (f"{_BENCH}.perf_check", "measure PERF.md's rows again: are they reproduced?"),
    "fit-perf-model": (f"{_BENCH}.boards_fit.command", "fit the time model of boards"),
}
"""What maintainers measure with: in the folder ``bench`` of a clone, not in a wheel."""

_OF_RANKS = ("run", "chat", "bench", "serve", "batch")
"""Verbs that a model of several ranks has; on another rank than 0 they follow it."""

EXIT_USER_ERROR = 2
_INTERRUPTED = 130
_CLONE = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``tilewright VERB ...``; returns the exit code."""
    if argv is None:  # the process is this command's own
        collect_seldom()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else EXIT_USER_ERROR
    if arguments[0] == "--version":
        print(f"tilewright {__version__}")
        return 0
    verb, *rest = arguments
    try:
        if verb in _OF_RANKS and is_follower(rest):
            return follow_here(rest)
        return _command(verb)(rest)
    except TilewrightError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # the reader has gone (a pager, head); Python must not complain again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _command(verb: str) -> Callable[[list[str]], int]:
    """The function behind a verb.

    Raises:
        TilewrightError: for an unknown verb, or one of a clone where there is none.
    """
    known = {**VERBS, **CLONE_VERBS}
    if verb not in known:
        raise TilewrightError(f"unknown command {verb!r}; {allowed(known, verb)}")
    if verb in CLONE_VERBS:
        if not (_CLONE / "bench" / "in_turn.py").is_file():
            raise TilewrightError(f"{verb}: runs from a clone of the repository, not from a wheel")
        if str(_CLONE) not in sys.path:
            sys.path.insert(0, str(_CLONE))
    command: Callable[[list[str]], int] = import_module(known[verb][0]).main
    return command


def _usage() -> str:
    lines = ["usage: tilewright COMMAND [options]   (COMMAND --help says more)", ""]
    known = {**VERBS, **(CLONE_VERBS if (_CLONE / "bench" / "in_turn.py").is_file() else {})}
    lines += [f"  {verb:<16} {text}" for verb, (_, text) in known.items()]
    return "\n".join(lines)


def _fail(message: str, code: int) -> int:
    print(f"tilewright: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
