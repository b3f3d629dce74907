"""The command ``tilewright``: finds the verb, turns user errors into one line and exit code 2.

The scripts in ``demo/`` are the same verbs run from a clone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from compiler import __version__
from compiler.errors import TilewrightError

VERBS = {
    "run": ("compiler.commands.run", "answer prompts with a model, and measure it"),
    "compile": ("compiler.commands.compile", "compile a model into a folder, ONNX or MLIR"),
    "convert": ("compiler.commands.convert", "write a model for dllama, or into the cache"),
    "compare": ("compiler.commands.compare", "measure the CPU target beside its peers"),
    "sweep": ("compiler.commands.sweep.main", "measure many configurations; find the best"),
    "bench-cuda": ("compiler.commands.bench_cuda", "measure the CUDA target, random weights"),
    "perf": ("compiler.commands.perf", "render PERF.md from results"),
    "reference": ("compiler.commands.reference", "write a model's fp32 reference file"),
}

EXIT_USER_ERROR = 2
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``tilewright VERB ...``; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else EXIT_USER_ERROR
    if arguments[0] == "--version":
        print(f"tilewright {__version__}")
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        return _fail(f"unknown command {verb!r}; allowed: {', '.join(VERBS)}")
    command: Callable[[list[str]], int] = import_module(VERBS[verb][0]).main
    try:
        return command(rest)
    except TilewrightError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # the reader has gone (a pager, head); Python must not complain again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _usage() -> str:
    lines = ["usage: tilewright COMMAND [options]   (COMMAND --help says more)", ""]
    lines += [f"  {verb:<10} {text}" for verb, (_, text) in VERBS.items()]
    return "\n".join(lines)


def _fail(message: str) -> int:
    print(f"tilewright: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
