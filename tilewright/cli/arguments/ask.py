"""Shared parts of ``tilewright run`` and ``tilewright chat``.

Contains their options, the steps from a command line to a compiled model, and the dim lines on
standard error. Imports no heavy module before the first progress line.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilewright.cli.arguments.sampling import SamplingOptions
from tilewright.cli.terminal.notes import only_fallbacks
from tilewright.models import DEFAULT_MODEL
from tilewright.options.arguments import (
    Parser,
    add_options,
    check_text,
    names_of,
    option,
    values_of,
)
from tilewright.options.config_file import (
    ConfigArguments,
    PathArguments,
    read_config,
    with_config,
)
from tilewright.options.engine_config import SCHEDULER, SINGLE, EngineConfig
from tilewright.options.resolve import ResolvedConfig, resolve

if TYPE_CHECKING:
    from tilewright.llm import LLM, Answer
    from tilewright.loading.source import ModelHandle

_REDRAW_S = 0.1
_NEW_LINE_S, _SAME_LINE_S = 1.0, 5.0
"""Seconds before the first line about a kind of work, and between lines about the same work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskArguments:
    """Options of ``run`` and ``chat`` without those of the engine."""

    system: str | None = option("the system message", metavar="TEXT")
    verbose: bool = option(
        "print the notes of the compiler", "-v", "--verbose", "--explain", default=False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptArgs:
    """A checked command line: the model, the parsed arguments, and the given sampling values."""

    model: ResolvedConfig
    arguments: Any
    sampling: Mapping[str, Any]


def read_asked(
    argv: Sequence[str], kind: type, sign: Sign, *, prog: str, description: str
) -> PromptArgs:
    """Read a command line with a path, the options of ``kind`` and the options of this module.

    ``sign`` shows the first progress line after parsing, before any file is read.

    Raises:
        TilewrightError: for every mistake that is visible without the model.
    """
    parser = Parser(prog=prog, description=description)
    scheduler = names_of(EngineConfig, SCHEDULER)
    add_options(parser, PathArguments, ConfigArguments, kind, SamplingOptions)
    add_options(parser, EngineConfig, without=scheduler, defaults=SINGLE)
    arguments = parser.parse_args(with_config(parser, argv))
    config = read_config(arguments, SINGLE)
    sign.opening(config.model)
    given = values_of(SamplingOptions, arguments)
    check_text(arguments.system or "", "the system message")
    return PromptArgs(
        model=resolve(config),
        arguments=arguments,
        sampling={name: value for name, value in given.items() if value is not None},
    )


def messages_of(system: str | None) -> list[dict[str, str]]:
    """Return the first messages of a chat: the system message, or nothing."""
    return [{"role": "system", "content": system}] if system else []


class Sign:
    """A dim progress line on standard error. The next line replaces it.

    Without a terminal, `note` writes plain lines. A thread also writes a line for each kind of work
    that takes over a second, and then a line every five seconds.
    """

    def __init__(self) -> None:
        self._shown_at = 0.0
        self._work = self._how_far = ""
        self._stop: threading.Event | None = None

    def show(self, text: str) -> None:
        """Show the present work until the next call."""
        if not sys.stderr.isatty():
            self.clear()
        else:
            self._write(f"\r\x1b[K{self._dim(text[:100])}\r")

    def opening(self, model: object) -> None:
        """Show the opening of a model. None: the default model."""
        self.show(f"opening {model or DEFAULT_MODEL}")

    def progress(self, what: str, done: int, total: int) -> None:
        """Report the progress of a compilation, at most ten times a second on a terminal."""
        now, self._work = time.monotonic(), what
        self._how_far = f"{what} {100 * done // max(total, 1)} %"
        if sys.stderr.isatty():
            if now - self._shown_at > _REDRAW_S:
                self._shown_at = now
                self.show(self._how_far)
        elif self._stop is None:
            self._stop = threading.Event()
            threading.Thread(target=self._tell, args=(self._stop,), daemon=True).start()

    def _tell(self, stop: threading.Event) -> None:
        told, told_at = "", 0.0
        while not stop.wait(_NEW_LINE_S):
            now = time.monotonic()
            if self._work != told:
                told, told_at = self._work, now
                self._write(f"{told} ...\n")
            elif now - told_at >= _SAME_LINE_S:
                told_at = now
                self._write(f"{self._how_far}\n")

    def note(self, text: str) -> None:
        """Print a line above the progress line."""
        self.clear()
        self._write(f"{self._dim(' '.join(text.split()))}\n")

    def write_lines(self, text: str) -> None:
        """Print requested lines, such as the table of ``--figures``."""
        self.clear()
        self._write(f"{text}\n")

    def clear(self) -> None:
        """Remove the progress line, and end the plain lines about slow work."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None
        if sys.stderr.isatty():
            self._write("\r\x1b[K")

    def _dim(self, text: str) -> str:
        is_dim = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        return f"\x1b[2m{text}\x1b[0m" if is_dim else text

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def open_asked(asked: PromptArgs, sign: Sign) -> ModelHandle:
    """Open the requested model without compiling. Imports heavy modules."""
    warnings.filterwarnings("ignore", module="torch")
    with _collected_later():
        from tilewright.api import load

        use_cache = asked.model.config.use_cache
        source = load(asked.model.path, use_cache=use_cache, progress=sign.progress)
    for note in source.notes:
        sign.note(note)
    if source.weights == "random":
        from tilewright.cli.terminal.console import RANDOM_NOTE

        sign.note(RANDOM_NOTE.format(source.name))
    return source


@contextmanager
def _collected_later() -> Iterator[None]:
    """Disable garbage collection during imports.

    Imports create a million objects and no garbage. Repeated collections would take a tenth of the
    time before the first token.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def compile_asked(
    asked: PromptArgs, source: ModelHandle, sign: Sign, *, context: int | None = None
) -> LLM:
    """Compile the requested model for a single sequence. None: the context of the configuration."""
    from tilewright.api import compile
    from tilewright.llm import LLM

    resolved = asked.model
    if context is not None:
        resolved = resolved.changed(max_model_len=context)
    compiled = compile(source, resolved, progress=sign.progress, ends_process=True)
    for note in only_fallbacks(compiled.notes, is_verbose=asked.arguments.verbose):
        sign.note(note)
    return LLM.of_compiled(source, compiled, resolved.config)


def cost_line(llm: LLM, answer: Answer) -> str:
    """Return a line about an answer: token count, times, finish reason, model and precision."""
    from tilewright.compiler.targets.table import get_target

    compiled = llm.compiled
    parts = [f"{len(answer.tokens)} tokens"]
    if get_target(compiled.target).is_emulated:
        parts.append("emulated: how long it took says nothing of the board")
    else:
        parts[0] += f" in {answer.total_s:.1f} s"
        parts.append(f"the first after {answer.first_s:.2f} s")
        if answer.tokens_per_second is not None:
            parts.append(f"then {answer.tokens_per_second:.1f} t/s")
    if answer.finish_reason == "length":
        parts.append("cut short there (--max-tokens)")
    elif answer.finish_reason == "cancelled":
        parts.append("stopped")
    where = f"{llm.source.name} on {compiled.target}, {compiled.precision.name}"
    return f"{', '.join(parts)}; {where}"
