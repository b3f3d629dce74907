"""Shared parts of ``tilewright run`` and ``tilewright chat``.

Contains their options, the steps from a command line to a compiled model, and the dim lines on
standard error. Imports no heavy module before the first progress line.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilewright.cli.arguments.sampling import SamplingOptions
from tilewright.cli.terminal.notes import RANDOM_NOTE, only_fallbacks
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
from tilewright.utils.status_line import StatusLine

if TYPE_CHECKING:
    from tilewright.llm import LLM, Answer
    from tilewright.loading.source import ModelHandle


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


def read_args(
    argv: Sequence[str], extra: type, sign: ModelStatusLine, *, prog: str, description: str
) -> PromptArgs:
    """Read a command line with a path, the ``extra`` options and this module's options.

    ``sign`` shows the first progress line after parsing, before any file is read.

    Raises:
        TilewrightError: for every mistake that is visible without the model.
    """
    parser = Parser(prog=prog, description=description)
    scheduler = names_of(EngineConfig, SCHEDULER)
    add_options(parser, PathArguments, ConfigArguments, extra, SamplingOptions)
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
    """Return a chat's first messages: the system message, or nothing."""
    return [{"role": "system", "content": system}] if system else []


class ModelStatusLine(StatusLine):
    """A status line that names the model."""

    def opening(self, model: object) -> None:
        """Show that a model is opened. None: the default model."""
        self.show(f"opening {model or DEFAULT_MODEL}")


def open_model(args: PromptArgs, sign: ModelStatusLine) -> ModelHandle:
    """Open the requested model without compiling. Imports heavy modules."""
    warnings.filterwarnings("ignore", module="torch")
    with _collected_later():
        from tilewright.api import load

        resolved = args.model
        how: Any = {"use_cache": resolved.config.use_cache, "progress": sign.progress}
        source = load(resolved.path, config=resolved, **how)
    for note in source.notes:
        sign.note(note)
    if source.weights == "random":
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


def compile_model(
    args: PromptArgs, source: ModelHandle, sign: ModelStatusLine, *, context: int | None = None
) -> LLM:
    """Compile the requested model for a single sequence. None: the configuration's context."""
    from tilewright.api import compile, open_draft_model
    from tilewright.llm import LLM

    resolved = args.model
    if context is not None:
        resolved = resolved.changed(max_model_len=context)
    draft = open_draft_model(source, resolved, progress=sign.progress)
    compiled = compile(source, resolved, progress=sign.progress, ends_process=True)
    for note in only_fallbacks(compiled.notes, is_verbose=args.arguments.verbose):
        sign.note(note)
    return LLM.of_compiled(source, compiled, resolved.config, draft)


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
